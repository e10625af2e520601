"""Lines that several ranks say alike, as the consoles show them."""

from __future__ import annotations

import io
import random

import pytest
from rich.console import Console as Terminal

from zrun import events
from zrun.console.fold import MAX_LINES, PATIENCE
from zrun.console.jsonlines import JsonConsole
from zrun.console.live import LiveConsole
from zrun.console.output import Output
from zrun.console.plain import PlainConsole
from zrun.job import FailureReport, JobView

EIGHT = tuple(range(8))
TWO_HOSTS = ("node-1.org", "node-2.org")


class Talk:
    """A plain console with a clock that a test moves. The first half of the ranks is on the first host."""

    def __init__(self, world_size: int = 8, hosts: tuple[str, ...] = ("localhost",)) -> None:
        self.now = 0.0
        self.stream = io.StringIO()
        self.console = PlainConsole(Output(self.stream), clock=lambda: self.now)
        self.job = JobView("j", world_size, hosts, "cpu", "gloo", "127.0.0.1:1", "train.py")
        self.console.job_started(self.job)
        self.lines()

    def say(self, rank: int, *texts: str, stream: str = "stdout", transient: bool = False) -> None:
        host = self.job.hosts[rank * len(self.job.hosts) // self.job.world_size]
        for text in texts:
            self.console.handle(host, events.WorkerOutput(rank, stream, text, transient=transient))

    def wait(self, seconds: float = PATIENCE) -> None:
        self.now += seconds
        self.console.tick()

    def lines(self) -> list[str]:
        """What was printed since the last call."""
        said = self.stream.getvalue().splitlines()
        self.stream.seek(0)
        self.stream.truncate()
        return said


def test_a_line_of_all_ranks_is_shown_once_and_at_once():
    talk = Talk()
    for rank in EIGHT[:-1]:
        talk.say(rank, "hello")
    assert talk.lines() == []
    talk.say(7, "hello")
    assert talk.lines() == ["[0-7] hello"]
    talk.wait()
    assert talk.lines() == []


def test_a_line_of_some_ranks_names_them():
    talk = Talk()
    for rank in (5, 0, 2, 1):
        talk.say(rank, "hello")
    talk.wait(0.1)
    assert talk.lines() == []
    talk.wait(0.2)
    assert talk.lines() == ["[0-2,5] hello"]
    talk.say(7, "hello")
    talk.wait()
    assert talk.lines() == ["[7] hello"]


def test_no_line_waits_longer_than_its_moment():
    talk = Talk()
    talk.say(0, "a")
    talk.wait(0.2)
    talk.say(1, "b")
    talk.say(1, "a")
    talk.wait(0.1)
    assert talk.lines() == ["[0] a"]
    talk.wait(0.2)
    assert talk.lines() == ["[1] b", "[1] a"]


def test_blocks_fold_line_by_line():
    talk = Talk()
    for _ in range(2):
        for rank in EIGHT:
            talk.say(rank, "+---+", "| 1 |", "+---+")
    assert talk.lines() == ["[0-7] +---+", "[0-7] | 1 |", "[0-7] +---+"] * 2


def test_blocks_that_differ_in_one_line_stay_in_order():
    talk = Talk(2)
    for rank in (0, 1):
        talk.say(rank, "begin", f"I am {rank}", "end")
    talk.wait()
    assert talk.lines() == ["[0-1] begin", "[0] I am 0", "[0] end", "[1] I am 1", "[1] end"]


def test_a_rank_that_repeats_itself_is_not_folded():
    talk = Talk(2)
    talk.say(0, "tick", "tick")
    talk.say(1, "tick")
    assert talk.lines() == ["[0-1] tick"]
    talk.wait()
    assert talk.lines() == ["[0] tick"]


def test_a_stream_is_not_the_other():
    talk = Talk(2)
    talk.say(0, "x")
    talk.say(1, "x", stream="stderr")
    talk.wait()
    assert talk.lines() == ["[0] x", "[1] x"]


@pytest.mark.parametrize("seed", range(20))
def test_each_rank_keeps_its_order_and_nothing_is_lost(seed):
    chance, talk, shown = random.Random(seed), Talk(3), []
    said: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for _ in range(300):
        rank, text = chance.randrange(3), chance.choice("abcd")
        said[rank].append(text)
        talk.say(rank, text, stream=chance.choice(("stdout", "stderr")), transient=chance.random() < 0.1)
        if chance.random() < 0.1:
            talk.wait(chance.random() / 3)
    talk.console.close(0)
    for line in talk.lines():
        ranks, text = line[1:].split("] ")
        low, _, high = ranks.replace("0,2", "0 2").partition("-")
        several = range(int(low), int(high) + 1) if high else map(int, low.split())
        shown += [(rank, text) for rank in several]
    assert {rank: [text for who, text in shown if who == rank] for rank in said} == said
    assert len(shown) == 300


def test_a_state_of_a_bar_does_not_wait_but_overtakes_nothing():
    talk = Talk(2)
    talk.say(0, "10%", transient=True)
    talk.say(1, "10%", transient=True)
    assert talk.lines() == ["[0] 10%", "[1] 10%"]
    talk.say(0, "hello")
    talk.say(0, "20%", transient=True)
    assert talk.lines() == []
    talk.wait()
    assert talk.lines() == ["[0] hello", "[0] 20%"]


def test_a_single_rank_never_waits():
    talk = Talk(1)
    talk.say(0, "a")
    assert talk.lines() == ["a"]


def test_what_the_launcher_says_comes_after_what_was_said_before():
    talk = Talk()
    talk.say(3, "last words")
    talk.console.message("warning", "the job starts again")
    assert talk.lines() == ["[3] last words", "zrun: warning: the job starts again"]
    talk.say(3, "again")
    talk.console.failed(FailureReport("it broke", "localhost", 3, 1, 1))
    assert talk.lines() == ["[3] again", "zrun: error: it broke"]
    talk.say(3, "end")
    talk.console.close(1)
    assert talk.lines() == ["[3] end"]


def test_tracebacks_of_ranks_that_go_on_are_folded():
    talk = Talk(2)
    for rank in (0, 1):
        talk.say(rank, "Traceback (most recent call last):", "KeyError: 1", stream="stderr")
    talk.wait(6)
    assert talk.lines() == ["[0-1] Traceback (most recent call last):", "[0-1] KeyError: 1"]


def test_a_flood_is_bounded_and_in_order():
    talk = Talk(2)
    texts = [f"line {number}" for number in range(3 * MAX_LINES)]
    talk.say(0, *texts)
    assert talk.lines() == [f"[0] {text}" for text in texts[: 2 * MAX_LINES]]
    talk.say(1, *texts[2 * MAX_LINES :])
    assert talk.lines() == [f"[0-1] {text}" for text in texts[2 * MAX_LINES :]]


def test_a_flood_of_long_lines_is_bounded():
    talk = Talk(2)
    talk.say(0, *("x" * 60_000 for _ in range(100)))
    assert len(talk.lines()) >= 80


@pytest.mark.parametrize(
    ("world_size", "hosts", "ranks", "prefix"),
    [
        (4, TWO_HOSTS, range(4), "[node-1:0-1 node-2:2-3]"),
        (4, TWO_HOSTS, (3, 0), "[node-1:0 node-2:3]"),
        (4, TWO_HOSTS, (2, 3), "[node-2:2-3]"),
        (32, tuple(f"node-{n}" for n in range(4)), range(32), "[0-31]"),
        (64, ("a",), range(0, 64, 2), "[32 of 64 ranks]"),
    ],
)
def test_names_of_many_ranks(world_size, hosts, ranks, prefix):
    talk = Talk(world_size, hosts)
    for rank in ranks:
        talk.say(rank, "hello")
    talk.wait()
    assert talk.lines() == [f"{prefix} hello"]


def test_a_terminal_folds_and_a_program_gets_everything():
    now = 0.0
    stream = io.StringIO()
    live = LiveConsole(Output(stream), terminal=Terminal(file=stream, width=80), clock=lambda: now)
    said = io.StringIO()
    for console in (live, JsonConsole(Output(said))):
        console.job_started(JobView("j", 2, ("localhost",), "cpu", "gloo", "127.0.0.1:1", "train.py"))
        for rank in (0, 1):
            console.handle("localhost", events.WorkerOutput(rank, "stdout", "hello"))
        console.close(0)
    assert stream.getvalue().count("hello") == 1 and "[0-1] hello" in stream.getvalue()
    assert said.getvalue().count("hello") == 2
