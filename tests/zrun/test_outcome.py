from __future__ import annotations

import dataclasses

import pytest

from zrun.advice import advice_for
from zrun.errors import HostLostError, ProtocolError
from zrun.events import AgentDone, AgentFailed, RankPosition, WorkerExited, WorkerStarted
from zrun.job import JobSpec
from zrun.outcome import Outcome
from zrun.transport.base import AgentEnd

FIRST = JobSpec("id", "a", 0, 2, 4, 0, 2, "::1", 1, "cpu", "gloo", ("x",), "/", {})
SECOND = dataclasses.replace(FIRST, host="b", node_rank=1, first_rank=2)
TRACEBACK = "Traceback (most recent call last):\n  File 'x', line 1\nValueError: rank {} at 0x{}f"


def exited(rank, code=0, stopped=False, at=0.0, traceback="", hint=""):
    return WorkerExited(rank, code, stopped, at, traceback, hint)


def outcome_of(*events, ends=(None, None), skews=()):
    outcome = Outcome([FIRST, SECOND], skews)
    for rank in range(4):
        outcome.take(rank // 2, WorkerStarted(rank, rank % 2, 100 + rank, f"/logs/rank-{rank}"))
    for event in events:
        outcome.take(event.rank // 2, event)
    for node_rank, error in enumerate(ends):
        if error is None:
            outcome.take(node_rank, AgentDone("/logs"))
        outcome.close(node_rank, error)
    return outcome


def test_success_needs_every_worker_and_every_agent():
    outcome = outcome_of(*(exited(rank) for rank in range(4)))
    assert (outcome.exit_code, outcome.report(), outcome.failed) == (0, None, False)


def test_an_agent_that_leaves_early_is_never_a_success():
    outcome = outcome_of(*(exited(rank) for rank in range(3)))
    assert outcome.exit_code == 4
    assert "b is lost" in outcome.report().message


@pytest.mark.parametrize(
    ("code", "exit_code", "name"), [(3, 3, ""), (-9, 137, "SIGKILL"), (-11, 139, "SIGSEGV"), (255, 255, "")]
)
def test_exit_codes(code, exit_code, name):
    outcome = outcome_of(exited(0, code, hint="h"), *(exited(r, -15, stopped=True) for r in (1, 2, 3)))
    report = outcome.report()
    assert (outcome.exit_code, report.exit_code, report.signal_name) == (exit_code, exit_code, name)
    assert (report.rank, report.host, report.others_stopped, report.hint) == (0, "a", 3, "h")
    assert report.log_path == "/logs/rank-0"
    assert ("rank 0 on a (pid 100) was killed by" in report.message) == bool(name)


def test_no_directory_is_named_that_is_gone():
    outcome = outcome_of(exited(0, 3), *(exited(r, -15, stopped=True) for r in (1, 2, 3)))
    outcome.take(0, AgentDone(""))  # nothing was in its files, so they were removed
    assert outcome.report().log_path == ""


def test_the_earliest_failure_decides_whichever_host_was_heard_first():
    outcome = outcome_of(exited(3, 7, at=50.0), exited(2, 6, at=40.0), exited(0, 5, at=45.0), exited(1))
    assert (outcome.exit_code, outcome.report().rank) == (6, 2)


def test_a_cause_that_was_slow_to_end_is_blamed_though_it_was_stopped():
    cause = exited(2, 1, stopped=True, at=39.0, traceback="ValueError: the cause")
    late = exited(3, 1, stopped=True, at=41.0, traceback="KeyboardInterrupt")
    old = exited(1, 1, stopped=True, at=2.0, traceback="ValueError: that was handled")
    outcome = outcome_of(exited(0, 6, at=40.0), cause, late, old)
    assert (outcome.exit_code, outcome.report().rank) == (1, 2)


def test_ranks_that_ended_by_themselves_are_named_where_another_fails():
    outcome = outcome_of(exited(0, 0, at=41.0), exited(1, 1, at=40.0), exited(2, -15, stopped=True))
    assert outcome.report().hint == "rank 0 had ended by itself, with exit code 0"
    outcome = outcome_of(exited(0, 0, at=60.0), exited(1, 1, at=40.0))
    assert outcome.report().hint == ""


def test_positions_are_shown_where_a_watchdog_ended_the_job():
    stands = RankPosition(0, 7, 2, "waits", 1.0), RankPosition(3, 5, 2, "sleeps", 1.0), RankPosition(2, 7, 2, "x", 1.0)
    outcome = outcome_of(*stands, RankPosition(2, 0, 0, "", 2.0), exited(0, -6))
    assert outcome.report().positions == (
        "rank 3: 2 steps done, operation 5: sleeps   <- behind",
        "rank 0: 2 steps done, operation 7: waits",
    )
    assert outcome_of(*stands, exited(0, 1)).report().positions == ()


def test_failures_are_compared_by_one_clock():
    outcome = outcome_of(exited(2, 6, at=40.0), exited(0, 5, at=45.0), skews=(10.0, 0.0))
    assert (outcome.exit_code, outcome.report().rank) == (5, 0)


def test_those_who_were_stopped_are_no_reason():
    outcome = outcome_of(exited(0, 1, stopped=True, at=1.0), exited(1, 4, at=2.0), exited(2), exited(3))
    assert (outcome.exit_code, outcome.report().others_stopped) == (4, 1)


def test_ranks_that_failed_alike_are_counted_also_if_they_were_stopped_meanwhile():
    outcome = outcome_of(
        exited(0, 1, traceback=TRACEBACK.format(0, 11)),
        exited(1, 1, traceback=TRACEBACK.format(1, 12)),
        exited(2, -15, stopped=True, traceback=TRACEBACK.format(2, 13)),
        exited(3, -15, stopped=True),
    )
    report = outcome.report()
    assert (report.same_count, report.others_stopped, report.traceback) == (3, 1, TRACEBACK.format(0, 11))


def test_other_words_or_codes_are_not_alike():
    outcome = outcome_of(
        exited(0, 1, traceback=TRACEBACK.format(0, 11)),
        exited(1, 1, traceback="TypeError"),
        exited(2, 2, traceback=TRACEBACK.format(2, 11)),
        exited(3, 1),
    )
    assert outcome.report().same_count == 1


def test_silent_failures_with_one_code_are_alike():
    events = [exited(0, 3), exited(1, 3), exited(2, 4), exited(3, -15, stopped=True)]
    assert outcome_of(*events).report().same_count == 2


def test_an_interrupt_is_no_failure_but_never_0():
    outcome = Outcome([FIRST, SECOND])
    outcome.interrupt(2)
    for node_rank in (0, 1):
        for rank in (2 * node_rank, 2 * node_rank + 1):
            outcome.take(node_rank, exited(rank, 0, stopped=True))
        outcome.take(node_rank, AgentDone())
        outcome.close(node_rank, None)
    assert (outcome.exit_code, outcome.report()) == (130, None)


def test_a_failure_before_the_interrupt_stays_the_reason():
    outcome = Outcome([FIRST, SECOND])
    outcome.take(0, exited(0, 3))
    outcome.interrupt(15)
    assert (outcome.exit_code, outcome.interrupted_by) == (3, None)


@pytest.mark.parametrize("error", [HostLostError("cut", "try again"), ProtocolError("nonsense")])
def test_a_lost_host(error):
    outcome = outcome_of(exited(2), exited(3), ends=(error, None))
    outcome.hosts[0].end = AgentEnd(137, "its last words")
    report = outcome.report()
    assert (outcome.exit_code, report.rank, report.host) == (4, None, "a")
    assert error.message in report.message and "SIGKILL" in report.message
    assert (report.traceback, report.hint, report.log_path) == ("its last words", error.hint, "/logs")


def test_an_agent_that_gives_up_says_with_which_code():
    outcome = Outcome([FIRST])
    outcome.take(0, AgentFailed("no such program", "install it", 2))
    outcome.take(0, AgentDone())
    outcome.close(0, None)
    report = outcome.report()
    assert (outcome.exit_code, report.message, report.hint) == (2, "no such program", "install it")


@pytest.mark.parametrize(
    ("arguments", "traceback", "said"),
    [
        (
            ("--num-gpus=2",),
            "x.py: error: unrecognized arguments: --num-gpus=2",
            "--num-gpus=2 stands after the script",
        ),
        (("--lr", "2", "--hostfile", "h"), "x.py: error: unrecognized arguments: --hostfile h", "--hostfile stands"),
        (("--lr", "2"), "x.py: error: unrecognized arguments: --lr 2", ""),
        (("--num_gpus", "2"), "x.py: error: the following arguments are required: --lr", ""),
        ((), "Traceback (most recent call last):\n  x\nbdb.BdbQuit", "python alone"),
        ((), "Traceback (most recent call last):\n  x\nEOFError: EOF when reading a line", "python alone"),
        ((), "EOFError: Ran out of input", ""),
    ],
)
def test_advice(arguments, traceback, said):
    spec = dataclasses.replace(FIRST, command=("python", "x.py", *arguments), local_rank_at=2)
    advice = advice_for(spec, exited(0, 2, traceback=traceback))
    assert said in advice and bool(advice) == bool(said)
    outcome = Outcome([spec])
    outcome.take(0, exited(0, 2, traceback=traceback))
    assert outcome.report().hint == advice
