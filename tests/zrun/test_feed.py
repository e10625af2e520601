from __future__ import annotations

import threading

from zrun.events import AgentDone, Notice, OutputDropped, WorkerOutput, WorkerStarted
from zrun.feed import ConsoleFeed
from zrun.job import FailureReport, JobView

VIEW = JobView("id", 2, ("h",), "cpu", "gloo", "x:1", "train.py")


class Recorder:
    """A console that remembers, and that stalls while `gate` is closed."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.ticks = 0
        self.gate = threading.Event()
        self.gate.set()

    def _note(self, *call):
        assert self.gate.wait(20)
        self.calls.append(call)

    def job_started(self, job):
        self._note("job_started", job)

    def handle(self, host, event):
        self._note("handle", host, event)

    def message(self, level, text):
        self._note("message", level, text)

    def failed(self, failure):
        self._note("failed", failure)

    def tick(self):
        self.ticks += 1

    def close(self, exit_code):
        self._note("close", exit_code)


def line(number):
    return WorkerOutput(0, "stdout", f"line {number}")


def test_everything_arrives_in_order():
    console = Recorder()
    feed = ConsoleFeed(console)
    failure = FailureReport("m", "h", 0, 1, 1)
    feed.job_started(VIEW)
    feed.handle("h", line(1))
    feed.message("info", "hello")
    feed.handle("h", line(2))
    feed.failed(failure)
    feed.close(1)
    assert feed.wait(20)
    assert console.calls == [
        ("job_started", VIEW),
        ("handle", "h", line(1)),
        ("message", "info", "hello"),
        ("handle", "h", line(2)),
        ("failed", failure),
        ("close", 1),
    ]
    assert not feed.left_out


def test_a_stalled_console_costs_nothing_but_lines():
    console = Recorder()
    console.gate.clear()
    feed = ConsoleFeed(console)
    feed.handle("h", WorkerStarted(0, 0, 1, "/logs/rank-0"))
    count = 60_000
    for number in range(count):
        feed.handle("h", line(number))
    for number in range(50_000):
        feed.handle("h", Notice(0, "info", str(number)))
    feed.handle("h", OutputDropped(0, "stdout", 1000, "/logs/rank-0/stdout"))
    feed.handle("h", AgentDone("/logs"))
    feed.close(0)
    assert feed.left_out
    assert not feed.wait(0.2)
    console.gate.set()
    assert feed.wait(20)
    events = [call[2] for call in console.calls if call[0] == "handle"]
    shown = [e for e in events if isinstance(e, WorkerOutput)]
    dropped = [e for e in events if isinstance(e, OutputDropped)]
    assert len(shown) < 30_000
    assert len(shown) + sum(e.lines for e in dropped) == count + 1000
    assert {(e.rank, e.stream, e.path) for e in dropped} == {(0, "stdout", "/logs/rank-0/stdout")}
    assert AgentDone("/logs") in events
    assert console.calls[-1] == ("close", 0)


def test_long_lines_count_by_their_length():
    console = Recorder()
    console.gate.clear()
    feed = ConsoleFeed(console)
    for _ in range(2000):
        feed.handle("h", WorkerOutput(0, "stdout", "x" * 30_000))
    assert feed.left_out
    feed.close(0)
    console.gate.set()
    assert feed.wait(20)


def test_a_console_that_breaks_holds_nobody_up(capfd):
    class Broken(Recorder):
        def handle(self, host, event):
            raise RuntimeError("a bug in the console")

    feed = ConsoleFeed(Broken())
    feed.handle("h", line(1))
    for number in range(100):
        feed.handle("h", line(number))
    feed.close(0)
    assert feed.wait(20)
    assert "a bug in the console" in capfd.readouterr().err


def test_the_console_hears_the_clock():
    console = Recorder()
    feed = ConsoleFeed(console)
    assert not feed.wait(1.0)
    feed.close(0)
    assert feed.wait(20)
    assert console.ticks >= 2
