"""Which rank keeps the others waiting, from the stacks that all ranks showed when they were ended. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from zrun.events import WorkerExited
from zrun.job import FailureReport

_EXIT_CODE = 134  # 128 + SIGABRT, which ended them
_FRAME = re.compile(r'\s*File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


def stall_report(seconds: float, exits: Sequence[tuple[str, WorkerExited, str]]) -> FailureReport:
    """Why the job failed.

    Args:
        exits: host, end and directory of files, of each rank that ended.
    """
    silent = f"all ranks were silent for {seconds:g} s"
    by_place: dict[tuple[str, ...], list[tuple[str, WorkerExited, str]]] = {}
    for entry in sorted(exits, key=lambda entry: entry[1].rank):
        frames = main_stack(entry[1].traceback)
        if frames:
            by_place.setdefault(frames, []).append(entry)
    if not by_place:
        return FailureReport(f"{silent}, and showed no stacks", "", None, -6, _EXIT_CODE, "SIGABRT")
    # The odd one out is the one the others wait for; among equals the one of the lowest rank.
    frames, odd = min(by_place.items(), key=lambda item: len(item[1]))
    host, event, log_path = odd[0]
    ranks = ", ".join(str(entry[1].rank) for entry in odd[:8]) + (", ..." if len(odd) > 8 else "")
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
        log_path=log_path,
    )


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
