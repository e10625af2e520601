"""The rank that keeps the others waiting is found by its stack."""

from __future__ import annotations

from zrun.events import RankPosition, WorkerExited
from zrun.stall import main_stack, position_lines, stall_report

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


def test_a_rank_that_is_behind_is_the_one_whatever_the_stacks_say():
    stands = {rank: RankPosition(rank, 9 - (rank == 1), 2, f"at {rank // 2}", 0.0) for rank in range(4)}
    report = stall_report(60, [ended(0, "load"), ended(1), ended(2), ended(3)], stands)
    assert (report.rank, report.positions[0]) == (1, "rank 1: 2 steps done, operation 8: at 0   <- behind")
    assert report.positions[2] == "rank 2, 3: 2 steps done, operation 9: at 1"


def test_positions_of_many_ranks_take_few_lines():
    stands = {rank: RankPosition(rank, rank, 0, "x", 0.0) for rank in range(100)}
    lines = position_lines(stands)
    assert len(lines) == 13 and lines[-1] == "and 88 more places"
    same = position_lines({rank: RankPosition(rank, 1, 0, "x", 0.0) for rank in range(100)})
    assert same == ("rank 0, 1, 2, 3, 4, 5, 6, 7, ... (100 ranks): 0 steps done, operation 1: x",)
