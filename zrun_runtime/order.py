"""Which unit is likely to come next, and fetching it ahead of its use."""

from __future__ import annotations

from collections.abc import Sequence

from zrun_runtime.flat_group import FlatGroup
from zrun_runtime.grouping import Unit
from zrun_runtime.residence import Residence

# What may be full at once: the two largest groups, and a little for a small third (in elements).
_LIVE_SHARE, _LIVE_SLACK = 1.05, 2**18


class Order:
    """Which unit came after which, the last time; the guess for the next time, and what was fetched upon it.

    Only units that bring something count: what is held by the model anyway may be used by some ranks and not by others.
    """

    def __init__(self, groups: Sequence[FlatGroup], prefetch_numel: int, live_numel: int) -> None:
        self.groups, self.prefetch_numel = groups, prefetch_numel
        largest = sorted((group.layout.padded_numel for group in groups), reverse=True)[:2]
        self.live_numel = min(live_numel, int(_LIVE_SHARE * sum(largest)) + _LIVE_SLACK)
        self._next: dict[Unit, Unit] = {}
        self._doubtful: set[Unit] = set()  # something else came after them, the last time
        self._previous: Unit | None = None
        self._fetched: list[FlatGroup] = []
        self.ended: Unit | None = None

    def fetch_after(self, unit: Unit) -> None:
        """`unit` is here: begin to gather what is likely to come next, and put away what was fetched for nothing."""
        for group in self._fetched:
            if group.residence is Residence.GATHERING:
                group.reshard()
        following = self._after(unit)
        self._fetched = following.groups if following is not None and self._may_fetch(following) else []
        for group in self._fetched:
            group.start_unshard()
        second = self._next.get(following) if following is not None and following not in self._doubtful else None
        for group in second.groups if second is not None else ():
            group.home.prefetch()  # a disk takes longer than a gather

    def _may_fetch(self, unit: Unit) -> bool:
        """A unit may be on its way early if it is not too large, and no more is full then than two groups take."""
        live = sum(group.layout.padded_numel for group in self.groups if group.residence is not Residence.SHARDED)
        return unit.numel <= self.prefetch_numel and live + unit.numel <= self.live_numel

    def _after(self, unit: Unit) -> Unit | None:
        """The unit that is likely to follow, if any is; remembers that `unit` is here now."""
        if self._previous is not None:
            if self._next.setdefault(self._previous, unit) is unit:
                self._doubtful.discard(self._previous)
            else:
                self._doubtful.add(self._previous)
            self._next[self._previous] = unit
        self._previous = unit
        return self._next.get(unit) if unit not in self._doubtful else None

    def restart(self) -> None:
        """A new pass begins."""
        self._previous = self.ended = None
