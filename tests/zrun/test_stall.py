"""The rank that keeps the others waiting is found by its stack."""

from __future__ import annotations

from zrun.events import WorkerExited
from zrun.stall import main_stack, stall_report

DUMP = """Fatal Python error: Aborted

Thread 0x00007f1 (most recent call first):
  File "/lib/threading.py", line 320 in wait

Current thread 0x00007f2 (most recent call first):
  File "/train.py", line {line} in {where}
  File "/train.py", line 50 in <module>

Extension modules: numpy
"""


def ended(rank, where="all_reduce", line=9):
    host = f"node-{rank // 2 + 1}"
    return host, WorkerExited(rank, -6, False, 0.0, DUMP.format(where=where, line=line)), f"/logs/rank-{rank}"


def test_a_stack_is_that_of_the_thread_that_took_the_signal():
    assert main_stack(DUMP.format(where="f", line=3)) == ("/train.py:3 in f", "/train.py:50 in <module>")
    assert main_stack("Killed\n") == ()


def test_the_one_that_differs_is_named():
    report = stall_report(60, [ended(0), ended(1), ended(2, "load"), ended(3)], {})
    assert (report.rank, report.host, report.exit_code, report.log_path) == (2, "node-2", 134, "/logs/rank-2")
    assert report.message.startswith("all ranks were silent for 60 s: rank 2 on node-2 differs: at /train.py:9 in load")
    assert "3 others are at /train.py:9 in all_reduce" in report.message
    assert report.others_stopped == 3


def test_ranks_that_wait_at_the_same_place():
    report = stall_report(60, [ended(1), ended(0)], {})
    assert (report.rank, report.same_count) == (0, 2)
    assert report.message == "all ranks were silent for 60 s: all are at /train.py:9 in all_reduce"


def test_no_stacks():
    report = stall_report(60, [("a", WorkerExited(0, -9, False, 0.0, ""), "")], {})
    assert report.rank is None and "showed no stacks" in report.message
