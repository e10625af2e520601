"""Which rank keeps the others waiting: from where the ranks said that they stand, and from the stacks that they showed
when they were ended. Pure.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from zrun.events import RankPosition, WorkerExited
from zrun.job import FailureReport

_EXIT_CODE = 134  # 128 + SIGABRT, which ended them
_LINES = 12  # of positions
_FRAME = re.compile(r'\s*File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


def stall_report(
    seconds: float,
    exits: Sequence[tuple[str, WorkerExited, str]],
    positions: Mapping[int, RankPosition],
) -> FailureReport:
    """Why the job failed.

    Args:
        exits: host, end and directory of files, of each rank that ended.
        positions: by rank, as far as ranks said where they stand.
    """
    silent = f"all ranks were silent for {seconds:g} s"
    by_place: dict[tuple[str, ...], list[tuple[str, WorkerExited, str]]] = {}
    for entry in sorted(exits, key=lambda entry: entry[1].rank):
        frames = main_stack(entry[1].traceback)
        if frames:
            by_place.setdefault(frames, []).append(entry)
    if not by_place:
        report = FailureReport(f"{silent}, and showed no stacks", "", None, -6, _EXIT_CODE, "SIGABRT")
        return dataclasses.replace(report, positions=position_lines(positions))
    # One that is behind is waited for, else the odd one out; among equals the one of the lowest rank.
    late = behind(positions)
    frames, odd = min(by_place.items(), key=lambda item: (not late & {e[1].rank for e in item[1]}, len(item[1])))
    host, event, log_path = min(odd, key=lambda entry: (entry[1].rank not in late, entry[1].rank))
    ranks = first_ranks([entry[1].rank for entry in odd])
    if len(by_place) == 1:
        message = f"{silent}: all are at {frames[0]}"
    else:
        message = f"{silent}: rank {ranks} on {host} {'differs' if len(odd) == 1 else 'differ'}: at {frames[0]}"
        others = max((place for place in by_place if place != frames), key=lambda place: len(by_place[place]))
        message += f"; {len(by_place[others])} others are at {others[0]}"
    return FailureReport(
        message,
        host,
        event.rank,
        event.returncode,
        _EXIT_CODE,
        "SIGABRT",
        event.traceback,
        same_count=len(odd),
        others_stopped=len(exits) - len(odd),
        hint="the stacks of the other ranks are in their files",
        positions=position_lines(positions),
        log_path=log_path,
    )


def first_ranks(ranks: Sequence[int]) -> str:
    """`0, 1, 2`; of more than eight the first."""
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def behind(positions: Mapping[int, RankPosition]) -> set[int]:
    """The ranks that began fewer operations than others; none if it is the same for all, or not known."""
    newest = max((one.operation for one in positions.values()), default=0)
    least = min((one.operation for one in positions.values()), default=0)
    return {rank for rank, one in positions.items() if one.operation == least < newest}


def position_lines(positions: Mapping[int, RankPosition]) -> tuple[str, ...]:
    """A line for each place where ranks stand, those behind first."""
    late = behind(positions)
    places: dict[tuple[int, int, str], list[int]] = {}
    for rank, one in sorted(positions.items()):
        places.setdefault((one.operation, one.step, one.text), []).append(rank)
    lines = []
    for (operation, step, text), ranks in sorted(places.items(), key=lambda item: item[0][0]):
        who = first_ranks(ranks) + (f" ({len(ranks)} ranks)" if len(ranks) > 8 else "")
        mark = "   <- behind" if late & set(ranks) else ""
        lines.append(f"rank {who}: {step} steps done, operation {operation}: {text}{mark}")
    left_out = len(lines) - _LINES
    return tuple(lines[:_LINES]) + ((f"and {left_out} more places",) if left_out > 0 else ())


def main_stack(dump: str) -> tuple[str, ...]:
    """`file:line in function` of each frame of the thread that took the signal, the innermost first."""
    frames: list[str] = []
    inside = False
    for line in dump.splitlines():
        if line.startswith("Current thread"):
            inside = True
        elif inside:
            match = _FRAME.match(line)
            if match is None:
                break
            frames.append(f"{match['file']}:{match['line']} in {match['function']}")
    return tuple(frames)
