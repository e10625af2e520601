"""Steps a schedule after an update, and notices a program that steps it too."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from zrun_runtime.telemetry import notice

_left_at: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # schedule -> its count after our last step
_told: weakref.WeakSet[Any] = weakref.WeakSet()


def step_schedule(schedule: Any, lr_kwargs: dict[str, Any], rank: int) -> None:
    """One step of the engine's schedule; None has none, and ReduceLROnPlateau waits until it is given its `metrics`."""
    if schedule is None or (isinstance(schedule, ReduceLROnPlateau) and "metrics" not in lr_kwargs):
        return
    count = _count(schedule)
    # Exactly one more: a schedule that was restored, or set anew, stands anywhere.
    if count is not None and _left_at.get(schedule) == count - 1 and rank == 0 and schedule not in _told:
        _told.add(schedule)
        notice(
            "warning",
            f"{type(schedule).__name__}: it was stepped between two updates, and engine.step() steps it too: it goes "
            "twice as fast. Take out the program's own step(), or do not give it to initialize()",
        )
    schedule.step(**lr_kwargs)
    after = _count(schedule)
    if after is not None:
        _left_at[schedule] = after


def _count(schedule: Any) -> int | None:
    """Where a schedule of torch's or of ours stands; None of another kind."""
    count = getattr(schedule, "last_epoch", getattr(schedule, "last_batch_iteration", None))
    return count if isinstance(count, int) else None
