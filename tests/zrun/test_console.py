"""What the plain and the JSON console print, seen as their stream sees it."""

from __future__ import annotations

import io
import json
import os

import pytest

from zrun import events
from zrun.console import make_console
from zrun.console.fold import PATIENCE
from zrun.console.output import Output
from zrun.console.plain import PlainConsole
from zrun.errors import UsageError
from zrun.job import FailureReport, JobView

TRACEBACK = "Traceback (most recent call last):\n  File \x1b[1mtrain.py\x1b[0m\nValueError: [bold]no[/bold]\n"


def view(hosts: tuple[str, ...] = ("localhost",), world_size: int = 2) -> JobView:
    return JobView("job-1", world_size, hosts, "cpu", "gloo", "127.0.0.1:29500", "train.py --lr 1")


def failure(**fields) -> FailureReport:
    values = {
        "message": "rank 3 on node-2 exited with code 3",
        "host": "node-2",
        "rank": 3,
        "returncode": 3,
        "exit_code": 3,
    }
    return FailureReport(**{**values, **fields})


def step(number: int, **fields) -> events.StepDone:
    values = {"seconds": 0.05, "samples": 32, "skipped_steps": 0, "loss": 2.5}
    return events.StepDone(rank=0, step=number, **{**values, **fields})


def printed(mode: str, *said, job: JobView | None = None, verbose: bool = False) -> list[str]:
    """The lines that console prints after the job's first one. `said`: an event, (host, event), or a failure."""
    stream = io.StringIO()
    console = make_console(mode, stream, verbose)
    job = job or view()
    console.job_started(job)
    for item in said:
        if isinstance(item, FailureReport):
            console.failed(item)
        else:
            console.handle(*(item if isinstance(item, tuple) else (job.hosts[0], item)))
        console.tick()
    console.close(7)
    lines = stream.getvalue().splitlines()
    return lines if mode == "json" else lines[1:]


def output(rank: int, text: str) -> events.WorkerOutput:
    return events.WorkerOutput(rank, "stdout", text)


def test_an_unknown_mode_is_refused():
    with pytest.raises(UsageError, match="pretty"):
        make_console("pretty", io.StringIO())


# ---- plain ---------------------------------------------------------------------------------------------------------


def test_the_job_is_announced_in_one_line():
    stream = io.StringIO()
    make_console("plain", stream).job_started(view(("a", "b"), 4))
    assert stream.getvalue() == "zrun: 4 workers on 2 hosts, device cpu, backend gloo, master 127.0.0.1:29500\n"


@pytest.mark.parametrize(
    ("hosts", "world_size", "line"),
    [
        (("localhost",), 1, "hello"),
        (("localhost",), 2, "[0] hello"),
        (("node-1", "node-2"), 2, "[node-1:0] hello"),
        (("node-1.example.org", "node-2.example.org"), 2, "[node-1:0] hello"),
        (("a.north", "a.south"), 2, "[a.north:0] hello"),
        (("10.0.0.1", "10.0.0.2"), 2, "[10.0.0.1:0] hello"),
    ],
)
def test_worker_lines_say_where_they_come_from(hosts, world_size, line):
    assert printed("plain", output(0, "hello"), job=view(hosts, world_size)) == [line]


def test_worker_text_is_text():
    lines = printed("plain", output(1, "[red]x[/red] :smile: \x1b[2Jy\rz"))
    assert lines == ["[1] [red]x[/red] :smile: yz"]


def test_only_steps_that_are_owed_a_line_get_one():
    lines = printed("plain", *(step(n, due=n % 2 == 0, total_steps=4) for n in range(1, 5)))
    assert [line.split("  ")[:2] for line in lines] == [["step 2/4", "loss 2.5000"], ["step 4/4", "loss 2.5000"]]


def test_a_skipped_step_is_said_even_if_it_is_owed_no_line():
    assert printed("plain", step(1, skipped_steps=1)) == [
        "zrun: warning: step 1 skipped: a gradient is not finite (1 skipped so far)"
    ]


def test_the_run_is_described_once():
    details = (("model", "1 parameter"), ("ZeRO stage", "2"))
    said = [events.RunStarted(rank, 10, 100, details) for rank in (1, 0)]
    assert printed("plain", *said) == ["zrun: model       1 parameter", "zrun: ZeRO stage  2"]


def test_a_second_engine_counts_its_own_steps():
    lines = printed(
        "plain", events.RunStarted(0, 1, 50), step(50, due=True), events.RunStarted(0, 1), step(1, due=True)
    )
    assert lines[0].startswith("step 50/50")
    assert lines[1].startswith("step 1  ")


def test_the_same_notice_of_many_ranks_is_said_once():
    said = [events.Notice(rank, "warning", "two\nlines") for rank in (0, 1)]
    again = events.Notice(0, "warning", "two\nlines")
    assert printed("plain", *said) == ["zrun: warning: two", "zrun: warning: lines"]
    assert len(printed("plain", *said, again)) == 4  # one rank may repeat itself
    assert printed("plain", events.Notice(1, "info", "odd")) == ["zrun: rank 1: odd"]


def test_dropped_lines_say_where_they_are():
    dropped = events.OutputDropped(1, "stdout", 123, "/logs/rank-1/stdout")
    assert printed("plain", dropped) == ["zrun: 123 lines of rank 1 came too fast to show: /logs/rank-1/stdout"]
    lost = events.OutputDropped(1, "stdout", 1, "")
    assert printed("plain", lost) == ["zrun: 1 line of rank 1 came too fast to show: no file could take them"]


def test_the_life_of_workers_is_told_on_request():
    life = [
        events.WorkerStarted(1, 1, 42),
        events.WorkerExited(1, -9, True, 0.0),
        events.AgentFailed("no such file: x.py"),
        events.AgentDone("/logs"),
    ]
    assert printed("plain", *life) == []
    assert printed("plain", *life, verbose=True) == [
        "zrun: job job-1: train.py --lr 1",
        "zrun: rank 1 started, pid 42",
        "zrun: rank 1 ended with signal 9, stopped by zrun",
        "zrun: the agent on localhost gave up: no such file: x.py",
        "zrun: nothing of the job is left on localhost, output in /logs",
    ]


def test_a_failure_shows_the_traceback_then_the_cause():
    report = failure(traceback=TRACEBACK, same_count=8, others_stopped=1, hint="set x", log_path="/logs/rank-3")
    assert printed("plain", report) == [
        "zrun: rank 3 on node-2 ended with:",
        "  Traceback (most recent call last):",
        "    File train.py",
        "  ValueError: [bold]no[/bold]",
        "zrun: error: rank 3 on node-2 exited with code 3",
        "zrun: 8 ranks failed alike, shown is the first",
        "zrun: 1 other rank stopped because of it",
        "zrun: set x",
        "zrun: output: /logs/rank-3 on node-2",
    ]


def test_a_failure_without_a_traceback_is_one_line():
    report = failure(message="node-2 is lost: no route", rank=None, signal_name="")
    assert printed("plain", report) == ["zrun: error: node-2 is lost: no route"]
    killed = failure(message="rank 0 died", signal_name="SIGKILL")
    assert printed("plain", killed) == ["zrun: error: rank 0 died (SIGKILL)"]


class Talk:
    """A plain console with a clock that a test moves."""

    def __init__(self, world_size: int = 3) -> None:
        self.now = 0.0
        self.stream = io.StringIO()
        self.console = PlainConsole(Output(self.stream), clock=lambda: self.now)
        self.console.job_started(view(world_size=world_size))
        self.lines()

    def crash(self, rank: int, error: str, stopped: bool = False, returncode: int = 1) -> None:
        text = f"Traceback (most recent call last):\n  File x.py, line 3\n{error}"
        self.errors(rank, *text.split("\n"))
        self.console.handle("localhost", events.WorkerExited(rank, returncode, stopped, 0.0, text))

    def errors(self, rank: int, *lines: str) -> None:
        for line in lines:
            self.console.handle("localhost", events.WorkerOutput(rank, "stderr", line))

    def lines(self) -> list[str]:
        """What was printed since the last call, once no line waits for others alike any more."""
        self.now += 2 * PATIENCE
        self.console.tick()
        said = self.stream.getvalue().splitlines()
        self.stream.seek(0)
        self.stream.truncate()
        return said


def test_a_traceback_is_shown_once_and_last():
    talk = Talk()
    for rank in range(3):
        talk.crash(rank, f"ValueError: tensor {rank}")
    talk.console.handle("localhost", output(0, "meanwhile"))
    assert talk.lines() == ["[0] meanwhile"]
    report = failure(
        traceback="Traceback (most recent call last):\n  File x.py, line 3\nValueError: tensor 0", same_count=3
    )
    talk.console.failed(report)
    talk.console.close(1)
    said = talk.lines()
    assert said.count("  ValueError: tensor 0") == 1
    assert not any("tensor 1" in line or "tensor 2" in line for line in said)
    assert said[0] == "zrun: rank 3 on node-2 ended with:"


def test_other_tracebacks_than_the_reported_one_are_shown_before_it():
    talk = Talk(world_size=4)
    talk.crash(0, "ValueError: mine")
    for rank in (1, 2, 3):
        talk.crash(rank, f"RuntimeError: connection {rank} closed", stopped=True)
    talk.console.failed(failure(traceback="Traceback (most recent call last):\n  File x.py, line 3\nValueError: mine"))
    assert talk.lines()[:5] == [
        "[1] Traceback (most recent call last):",
        "[1]   File x.py, line 3",
        "[1] RuntimeError: connection 1 closed",
        "zrun: 2 other ranks said the same",
        "zrun: rank 3 on node-2 ended with:",
    ]


def test_a_traceback_of_a_worker_that_goes_on_is_shown_a_moment_later():
    talk = Talk()
    talk.errors(1, "before", "[rank1]: Traceback (most recent call last):", "  File y.py", "KeyError: 1")
    assert talk.lines() == ["[1] before"]
    talk.now = 1.0
    talk.console.tick()
    assert talk.lines() == []
    talk.now = 6.0
    talk.console.tick()
    talk.errors(1, "after")
    assert talk.lines() == [
        "[1] [rank1]: Traceback (most recent call last):",
        "[1]   File y.py",
        "[1] KeyError: 1",
        "[1] after",
    ]


def test_a_traceback_of_a_worker_that_ends_well_is_shown():
    talk = Talk()
    talk.crash(1, "KeyError: caught", returncode=0)
    assert talk.lines()[-1] == "[1] KeyError: caught"


def test_an_interrupted_job_shows_what_its_ranks_said_once():
    talk = Talk()
    for rank in range(3):
        talk.crash(rank, "KeyboardInterrupt", stopped=True)
    talk.console.close(130)
    assert talk.lines()[2:] == ["[0] KeyboardInterrupt", "zrun: 2 other ranks said the same"]


def test_an_endless_traceback_is_not_kept_back():
    talk = Talk()
    talk.errors(0, "Traceback (most recent call last):")
    for number in range(50):
        talk.errors(0, f"  {number} " + "x" * 1000)
    said = talk.lines()
    assert said[0] == "[0] Traceback (most recent call last):"
    assert [line.split()[1] for line in said[1:]] == [str(number) for number in range(50)]


def test_a_stream_that_lacks_characters_shows_others_instead():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    console = make_console("plain", stream)
    console.handle("h", output(0, "naïve"))
    assert raw.getvalue() == b"na?ve\n"


@pytest.mark.parametrize("mode", ["plain", "json", "rich"])
def test_a_reader_that_went_away_does_no_harm(mode):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as stream:
        console = make_console(mode, stream)
        console.job_started(view())
        for number in range(1000):
            console.handle("localhost", output(1, f"line {number}"))
            console.tick()
        console.failed(failure())
        console.close(1)  # and closing the stream, as at exit, raises nothing either


# ---- JSON ----------------------------------------------------------------------------------------------------------


def test_json_lines_are_the_events_with_their_host():
    lines = printed("json", ("node-1", output(1, "a\nb \x9b \u2028 \ud800 ü")), ("node-1", step(3)), failure(hint="h"))
    first, out, done, failed, end = (json.loads(line) for line in lines)
    assert first["event"] == "job_started"
    assert (first["job_id"], first["world_size"], first["hosts"], first["master"]) == (
        "job-1",
        2,
        ["localhost"],
        "127.0.0.1:29500",
    )
    assert out == {
        "event": "output",
        "host": "node-1",
        "rank": 1,
        "stream": "stdout",
        "text": "a\nb \x9b \u2028 \ud800 ü",
    } | {"partial": False, "transient": False}
    assert events.decode(lines[2]) == step(3)
    assert done["host"] == "node-1"
    assert (failed["event"], failed["rank"], failed["exit_code"], failed["hint"]) == ("failure", 3, 3, "h")
    assert end == {"event": "exit", "code": 7}


def test_json_lines_hold_nothing_that_moves_a_cursor():
    line = printed("json", output(1, "\x1b[2J \x9b2J \x7f \u2028"))[1]
    assert line.isprintable()


def test_json_messages_have_a_level():
    stream = io.StringIO()
    make_console("json", stream).message("warning", "look out")
    assert json.loads(stream.getvalue()) == {"event": "message", "level": "warning", "text": "look out"}
