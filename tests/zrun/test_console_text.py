"""Worker text made harmless, numbers made readable, figures that fit."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zrun.console import cells, figures
from zrun.console.progress import Progress
from zrun.console.sanitize import clean_line, clean_lines
from zrun.events import MemoryUsed, StepDone


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("plain text, naïve 漢字 🙂\tand a tab", "plain text, naïve 漢字 🙂\tand a tab"),
        ("\x1b[1;31mred\x1b[0m and \x1b[38;5;12mblue\x1b[m", "red and blue"),
        ("\x1b[2J\x1b[H\x1b[?25lgone", "gone"),
        ("\x1b]0;a title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bPdevice control\x1b\\text", "text"),
        ("\x9b31mC1\x9d0;title\x9c text", "C1 text"),
        ("\x1b]0;never ended", "0;never ended"),  # a sequence without an end costs no text
        ("\x1b(B\x1b=\x1b7ok\x1b", "ok"),
        ("bell\x07 back\x08 nul\x00 del\x7f nel\x85 cr\r lf\n", "bell back nul del nel cr lf"),
        ("half a pair \ud83d", "half a pair \N{REPLACEMENT CHARACTER}"),
    ],
)
def test_control_sequences_are_stripped(raw, clean):
    assert clean_line(raw) == clean


@given(st.text(alphabet=st.sampled_from("\x1b\x9b\x9d\x9c\x07[]P\\0;m a\t\r\n\x85\u2028"), max_size=40))
def test_no_control_character_survives(raw):
    clean = clean_line(raw)
    assert clean == clean_line(clean)
    assert all(c == "\t" or (" " <= c < "\x7f") or c > "\xa0" for c in clean)


def test_a_hostile_line_takes_no_longer_than_an_honest_one():
    clean_line("\x1b]" * 32_000)  # quadratic work would be minutes
    clean_line("\x1b[" + "1;" * 32_000)


def test_lines_keep_their_indentation():
    assert clean_lines("Traceback:\r\n  File \x1b[1mx\x1b[m\n\n    y\n") == ["Traceback:", "  File x", "", "    y"]
    assert clean_lines(" \n") == []


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (figures.decimal(2.34561), "2.3456"),
        (figures.decimal(0.0), "0.0000"),
        (figures.decimal(0.00012345), "1.234e-04"),
        (figures.decimal(12345.678), "12345.7"),
        (figures.decimal(3.2e38), "3.200e+38"),
        (figures.decimal(None), "-"),
        (figures.decimal(math.nan), "not finite"),
        (figures.exponent(3e-4), "3.0e-04"),
        (figures.exponent(0.0), "0.0e+00"),
        (figures.short(0.98), "0.98"),
        (figures.short(12.345), "12.3"),
        (figures.short(4560.4), "4560"),
        (figures.short(0.00012), "1.2e-04"),
        (figures.short(math.inf), "not finite"),
        (figures.scale(65536.0), "65536"),
        (figures.scale(2.0**32), "2^32"),
        (figures.scale(1.5), "1.5"),
        (figures.step_time(0.00085), "0.85 ms"),
        (figures.step_time(0.00721), "7.2 ms"),
        (figures.step_time(0.045), "45 ms"),
        (figures.step_time(1.234), "1.23 s"),
        (figures.step_time(12.34), "12.3 s"),
        (figures.step_time(125), "2:05"),
        (figures.duration(12), "0:12"),
        (figures.duration(3723), "1:02:03"),
        (figures.duration(2 * 86400 + 3723), "2d 01:02:03"),
        (figures.size(0), "0 B"),
        (figures.size(512 * 1024**2), "512 MiB"),
        (figures.size(1.2 * 1024**3), "1.2 GiB"),
        (figures.size(1000 * 1024**3), "1.0 TiB"),
        (figures.size(5 * 1024**5), "5120 TiB"),
        (figures.count(1, "worker"), "1 worker"),
        (figures.count(2, "worker"), "2 workers"),
    ],
)
def test_figures(shown, expected):
    assert shown == expected


def step(number: int, **fields) -> StepDone:
    values = {"seconds": 0.05, "samples": 32, "skipped_steps": 0, "loss": 2.0, "learning_rate": 1e-3, "grad_norm": 1.0}
    return StepDone(rank=0, step=number, **{**values, **fields})


def test_rates_forget_the_first_step_and_follow_the_newest():
    progress = Progress(1, total=110)
    progress.step_done(step(1, seconds=60.0))
    assert progress.seconds_left is None  # one step, with all its warming up, tells nothing
    for number in range(2, 11):
        progress.step_done(step(number))
    assert progress.samples_per_second == pytest.approx(640)
    assert progress.step_seconds == pytest.approx(0.05)
    assert progress.seconds_left == pytest.approx(5.0)
    assert progress.fraction == pytest.approx(10 / 110)


def test_the_rank_that_holds_most_is_named_and_strangers_are_not_kept():
    progress = Progress(3)
    for rank, used in ((0, 5), (1, 9), (2, 9), (7, 100), (-1, 100)):
        progress.memory_used(MemoryUsed(rank, used, used))
    assert progress.most_memory == (9, 1)


def test_the_line_of_a_step():
    progress = Progress(2)
    progress.memory_used(MemoryUsed(1, int(1.2 * 1024**3), 0))
    for number in range(1, 21):
        progress.step_done(
            step(number, loss=2.34561, total_steps=200, skipped_steps=int(number > 3), loss_scale=1024.0)
        )
    assert cells.step_line(progress) == (
        "step 20/200  loss 2.3456  lr 1.0e-03  scale 1024  norm 1.00  samples/s 640  step time 50 ms  mem 1.2 GiB"
        "  skipped 1  eta 0:09"
    )


def test_the_line_of_a_step_of_which_little_is_known():
    progress = Progress(1)
    progress.step_done(step(1, seconds=0.0, loss=None, learning_rate=None, grad_norm=None))
    assert cells.step_line(progress) == "step 1  loss -  norm -  samples/s -  step time 0.00 ms"


def test_a_loss_that_is_lost_is_not_called_unknown():
    progress = Progress(1)
    progress.step_done(step(1))
    progress.step_done(step(2, loss=None, grad_norm=None, skipped_steps=1))
    line = cells.step_line(progress)
    assert "loss not finite" in line
    assert "norm not finite" in line


def test_skipped_steps_are_said_ever_more_rarely():
    progress = Progress(1)
    said = []
    for number in range(1, 10):
        progress.step_done(step(number, skipped_steps=number, loss_scale=2.0 ** (16 - number)))
        said.append(cells.skipped_line(progress))
    assert [bool(text) for text in said] == [True, True, False, True, False, False, False, True, False]
    assert said[0] == "step 1 skipped: a gradient is not finite, loss scale now 32768 (1 skipped so far)"
    assert said[3].startswith("4 steps in a row skipped, the last was 4: ")
    progress.step_done(step(10, skipped_steps=9))
    assert cells.skipped_line(progress) == ""
    progress.step_done(step(11, skipped_steps=10))
    assert cells.skipped_line(progress).startswith("step 11 skipped")


ROW = [
    cells.Cell("loss", "2.0000", 9),
    cells.Cell("mem", "1.2 GiB (rank 3)", 4, "1.2 GiB"),
    cells.Cell("lr", "1.0e-03", 7),
]


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (100, [["2.0000", "1.2 GiB (rank 3)", "1.0e-03"]]),
        (40, [["2.0000", "1.2 GiB", "1.0e-03"]]),  # brief before a second line
        (33, [["2.0000", "1.2 GiB (rank 3)"], ["1.0e-03"]]),
        (24, [["2.0000", "1.2 GiB"], ["1.0e-03"]]),
        (15, [["2.0000"], ["1.0e-03"]]),  # the least important goes
        (3, [["2.0000"], ["1.0e-03"]]),
    ],
)
def test_figures_flow(width, lines):
    assert [[c.value for c in line] for line in cells.flow(ROW, width, 2)] == lines
