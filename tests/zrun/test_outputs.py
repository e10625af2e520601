from __future__ import annotations

import itertools
import random
import textwrap

import pytest

from zrun.outputs import (
    LINE_LIMIT,
    WORDS_LIMIT,
    Allowance,
    Line,
    LineSplitter,
    last_traceback,
    last_words,
    likeness,
)


def split(*chunks: bytes, step: float = 0.0) -> list[Line]:
    splitter, clock = LineSplitter(), itertools.count(100.0, step)
    lines = [line for chunk in chunks for line in splitter.feed(chunk, next(clock))]
    return lines + splitter.end()


def texts(lines: list[Line]) -> list[str]:
    return [line.text for line in lines if not line.transient]


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([b"a\nb\n"], ["a", "b"]),
        ([b"a", b"b\nc", b"\n"], ["ab", "c"]),
        ([b"\n\n"], ["", ""]),
        ([b"a"], ["a"]),
        ([], []),
        ([b"a\r\nb\r\n"], ["a", "b"]),
        ([b"a\r", b"\nb\n"], ["a", "b"]),
        ([b"1%\r2%\r3%\n"], ["3%"]),
        ([b"\r1%", b"\r2%", b"\r3%\ndone\n"], ["3%", "done"]),
        ([b"1%\r", b"2%\r", b"3%\r"], ["3%"]),
        ([b"\xff\n"], ["\ufffd"]),
        (["ü".encode()[:1], "ü".encode()[1:] + b"\n"], ["ü"]),
    ],
)
def test_lines(chunks, expected):
    assert texts(split(*chunks)) == expected


def test_any_cut_gives_the_same_lines():
    data = b"one\ntwo\r\n\rbar 1%\rbar 2%\r\nthree \xc3\xbc\n\nlast"
    whole = texts(split(data))
    rng = random.Random(1)
    for _ in range(300):
        cuts = sorted(rng.sample(range(len(data)), rng.randint(0, 8)))
        chunks = [data[a:b] for a, b in itertools.pairwise([0, *cuts, len(data)])]
        assert texts(split(*chunks)) == whole


def test_a_bar_is_shown_now_and_then():
    splitter = LineSplitter()
    shown = [line for i in range(1000) for line in splitter.feed(b"\r%d%%" % i, i / 10)]
    assert all(line.transient for line in shown)
    assert 3 <= len(shown) <= 10
    assert [line.text for line in splitter.tick(1000.0)] == ["999%"]
    assert splitter.tick(2000.0) == []
    assert splitter.end() == [Line("999%")]


def test_a_long_line_is_cut_once_and_its_rest_left_out():
    long = b"x" * (3 * LINE_LIMIT)
    for chunks in ([long + b"\nnext\n"], [long, long, b"\nnext\n"], [long[:LINE_LIMIT], long, b"y\nnext", b"\n"]):
        lines = split(*chunks)
        assert [(len(line.text), line.partial) for line in lines] == [(LINE_LIMIT, True), (4, False)]


def test_a_cut_does_not_split_a_character():
    (line,) = split(b"x" * (LINE_LIMIT - 1) + "€€".encode() + b"\n")
    assert line == Line("x" * (LINE_LIMIT - 1), partial=True)


def test_skipping_counts_what_feeding_would_show():
    rng = random.Random(2)
    for _ in range(200):
        data = bytes(rng.choice(b"ab\n\n\n") for _ in range(60)) + b"end"
        cut = rng.randrange(len(data))
        fed, mixed = LineSplitter(), LineSplitter()
        expected = fed.feed(data, 0.0) + fed.end()
        count = mixed.skip(data[:cut])
        assert count + len(mixed.feed(data[cut:], 0.0) + mixed.end()) == len(expected)


def test_an_allowance_gives_a_burst_and_then_runs():
    allowance = Allowance(burst=100, per_second=10)
    assert allowance.is_open(0.0)
    assert sum(allowance.take(0) for _ in range(500)) == 100
    assert not allowance.is_open(1.0)
    assert allowance.is_open(2.5)
    assert sum(allowance.take(0) for _ in range(500)) == 25
    assert allowance.is_open(1000.0)
    assert sum(allowance.take(10 * 1024) for _ in range(500)) == 9


TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    f(1)
  File "train.py", line 2, in f
    raise ValueError("bad 17 at 0x7f001")
ValueError: bad 17 at 0x7f001"""


def test_the_last_traceback_is_found():
    noise = "step 1\nWARNING x\n"
    assert last_traceback(noise + TRACEBACK.replace("17", "3") + "\nmore\n" + noise + TRACEBACK + "\n") == TRACEBACK


def test_what_follows_a_traceback_stays_with_it():
    assert last_traceback(TRACEBACK + "\nnote: check the data\n").endswith("note: check the data")


def test_a_traceback_long_ago_is_not_the_reason():
    later = "\n".join(f"line {i}" for i in range(300))
    assert last_traceback(TRACEBACK + "\n" + later) == ""
    assert last_words(TRACEBACK + "\n" + later).splitlines() == [f"line {i}" for i in range(280, 300)]


def test_chains_are_whole():
    chain = f"""\
Traceback (most recent call last):
  File "a.py", line 1, in <module>
KeyError: 'x'

The above exception was the direct cause of the following exception:

{TRACEBACK}

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "b.py", line 9, in <module>
OSError: gone"""
    assert last_traceback("before\n" + chain + "\n") == chain


def test_the_prefix_of_torch_is_taken_off():
    prefixed = textwrap.indent(TRACEBACK, "[rank3]: ")
    assert last_traceback(prefixed) == TRACEBACK
    assert likeness(prefixed) == likeness(TRACEBACK)


def test_groups_and_fatal_errors_count():
    group = (
        "  + Exception Group Traceback (most recent call last):\n  |   File\n  | ExceptionGroup: two (2 sub-exceptions)"
    )
    assert last_traceback("x\n" + group) == group
    fatal = (
        'Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n  File "x.py", line 1'
    )
    assert last_traceback("x\n" + fatal) == fatal


def test_an_error_that_was_said_short_counts():
    short = "zrun_runtime: ConfigError: ds.json: 7 is odd\n  at /job/train.py:12, in main\n  -> make it 8"
    prefixed = textwrap.indent(short, "[rank1]: ")
    assert last_traceback(f"{TRACEBACK}\nx\n{short}\n") == short
    assert last_traceback(f"x\n{prefixed}\nlater\n") == f"{short}\nlater"
    assert likeness(f"{prefixed}\nlater: 1") == likeness(short.replace("7", "9"))
    assert likeness(short) != likeness(short.replace("train.py:12", "train.py:13"))
    assert last_traceback("\n".join([short, *(f"step {i}" for i in range(300))])) == ""


def test_what_is_ignored_at_the_end_of_the_interpreter_is_not_the_reason():
    ignored = "Exception ignored in: <function Pool.__del__ at 0x7f001>\n" + TRACEBACK.replace("ValueError", "OSError")
    assert last_traceback(f"{TRACEBACK}\n{ignored}\n").startswith(TRACEBACK)
    assert last_traceback(f"x\n{ignored}\n") == ""


def test_likeness_ignores_what_differs_by_rank():
    other = TRACEBACK.replace("17", "4").replace("0x7f001", "0x55ab2")
    assert likeness(other) == likeness(TRACEBACK)
    assert likeness(other + "\nnote of rank 5") == likeness(TRACEBACK)
    assert likeness(TRACEBACK.replace("line 2", "line 5")) != likeness(TRACEBACK)
    assert likeness(TRACEBACK.replace("ValueError", "TypeError")) != likeness(TRACEBACK)


def test_words_are_bounded():
    words = last_words("Traceback (most recent call last):\n" + "  File x\n" * 50_000 + "RecursionError: deep")
    assert len(words) < WORDS_LIMIT + 100
    assert words.startswith("Traceback") and words.endswith("RecursionError: deep")
    assert last_words("") == ""
