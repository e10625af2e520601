"""Where a rank is in its program, in words, and the table of all ranks that an error shows. Pure.

[Note: positions]
All ranks run the operations that they have in common (gathers, reductions, the exchanges of a step) in one order, so
their number tells who is behind. What a rank does between two of them only its stack knows: the innermost module that
runs, and the line of the script. Nothing is recorded for that while training goes on; a stack is looked at when the
rank stands still.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

_OURS = str(Path(__file__).parent)
_MODULE_FILE = torch.nn.Module.__call__.__code__.co_filename
_MODULE_CALL = "_call_impl"
_LIBRARIES = tuple(
    {
        str(Path(torch.__file__).parent),
        _OURS,
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    }
)
_WRAPPERS = ("measured",)  # of stopwatch.py, around what a script calls
_WAITS, _ENDED = "waits for other ranks at", "ended"  # the beginnings of texts
_TABLE_LINES = 12
_TEXT_CHARS = 300


@dataclass(frozen=True)
class Position:
    """Where one rank is; see [Note: positions].

    operation: how many operations that all ranks have in common it has begun. step: optimizer steps it has done.
    text: what it does there, a phrase that follows its number. since: seconds since the epoch when it came there.
    """

    operation: int
    step: int
    text: str
    since: float

    @property
    def waits(self) -> bool:
        """It is inside an operation, and other ranks are not."""
        return self.text.startswith(_WAITS)

    @property
    def is_last(self) -> bool:
        """It was said at the end of the process."""
        return self.text.startswith(_ENDED)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Position:
        return cls(**json.loads(text))


def position_text(frame: FrameType | None, awaited: str, name_of: Callable[[Any], str]) -> str:
    """What the thread of `frame` does.

    Args:
        awaited: the operation in which it waits for other ranks; empty: it does not.
        name_of: the name of a module in its model.
    """
    place = script_place(frame)
    if awaited:
        return f"{_WAITS} {awaited}{place}"
    call, module = _calls(frame)
    inside = f"in {call}()" if call else "outside the engine"
    return f"{inside}{f', in {name_of(module)}' if module is not None else ''}{place}"


def script_place(frame: FrameType | None) -> str:
    """`, at FILE:LINE in FUNCTION` of the innermost frame that is no library's; empty if all are."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_LIBRARIES, "<")):
            return f", at {'/'.join(Path(name).parts[-2:])}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _calls(frame: FrameType | None) -> tuple[str, Any]:
    """The function of ours that the script called, and the innermost module that runs."""
    call, module = "", None
    while frame is not None:
        code = frame.f_code
        if module is None and code.co_name == _MODULE_CALL and code.co_filename == _MODULE_FILE:
            module = frame.f_locals.get("self")
        if code.co_filename.startswith(_OURS) and code.co_name not in _WRAPPERS:
            call = code.co_name
        frame = frame.f_back
    return call, module


def end_text() -> str:
    """How this process ends, as far as its interpreter knows."""
    error = getattr(sys, "last_value", None)
    return f"{_ENDED} with {type(error).__name__}: {error}"[:_TEXT_CHARS] if error is not None else _ENDED


def table(positions: Sequence[Position | None], now: float) -> list[str]:
    """A line for each rank, or for several that are at one place; those that are behind are marked.

    Args:
        positions: by rank; None: nothing is known.
        now: seconds since the epoch.
    """
    known = [one.operation for one in positions if one is not None]
    alike: dict[tuple[int, str], list[int]] = {}
    for rank, one in enumerate(positions):
        key = (one.operation, one.text) if one is not None else (-1, "")
        alike.setdefault(key, []).append(rank)
    lines = []
    for (operation, _), ranks in sorted(alike.items(), key=lambda item: item[0][0])[:_TABLE_LINES]:
        one = positions[ranks[0]]
        if one is None:
            lines.append(f"{ranks_text(ranks)}: goes on, as far as is known")
            continue
        behind = "   <- behind" if operation < max(known) else ""
        seconds = f", for {max(0.0, now - one.since):.0f} s"
        lines.append(f"{ranks_text(ranks)}: {one.step} steps done, operation {operation}: {one.text}{seconds}{behind}")
    if len(alike) > _TABLE_LINES:
        lines.append(f"and {len(alike) - _TABLE_LINES} more places")
    return lines


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1, 2`, `ranks 0, 1, ... (40 ranks)`."""
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:6]))}, ... ({len(ranks)} ranks)"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
