"""Reduced gradients on their way from the device to the host, beside the backward that makes the next ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch import Tensor

from zrun_runtime.flat_group import FlatGroup
from zrun_runtime.plan import TierKind
from zrun_runtime.tiers.host import Courier, is_host


class Departures:
    """A queue: what left first is taken in first. The memory of `limit` gradients at most is held on the device."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._under_way: deque[tuple[Tensor, Callable[[], None], Callable[[Tensor], None]]] = deque()

    def begin(self, source: Tensor, take: Callable[[Tensor], None]) -> None:
        """Copy `source` to the host; `take` gets the copy, later or in `settle`."""
        host, wait = Courier.of(source.device).receive(source)
        self._under_way.append((host, wait, take))
        while len(self._under_way) > self._limit:
            self._settle_one()

    def settle(self) -> None:
        """Wait until all have arrived and been taken in."""
        while self._under_way:
            self._settle_one()

    def _settle_one(self) -> None:
        host, wait, take = self._under_way.popleft()
        wait()
        take(host)

    def forget(self) -> None:
        """Nobody wants them any more."""
        self._under_way.clear()


def leave_device(group: FlatGroup) -> bool:
    """The group's reduced gradients are wanted on the host, and that is not where they are reduced."""
    return group.plan.grads.tier is TierKind.CPU and not is_host(group.full.device)
