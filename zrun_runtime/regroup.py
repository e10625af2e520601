"""Moving what is laid out in groups into other groups, one old group at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zrun_runtime.collectives import Collectives
from zrun_runtime.errors import EngineError
from zrun_runtime.flat_group import FlatGroup, GroupSpec
from zrun_runtime.group_state import GroupState
from zrun_runtime.layout import FlatLayout, lay_out
from zrun_runtime.optim import ShardedOptimizer
from zrun_runtime.plan import StatePlan
from zrun_runtime.reducer import GroupGrads


class _Target:
    """Where a new group's gradient is put together: this rank's slice of it, or all of it."""

    def __init__(self, layout: FlatLayout, like: Tensor, rank: int, whole: bool) -> None:
        self.start, self.stop = (0, layout.padded_numel) if whole else layout.shard_bounds(rank)
        self.grad = torch.zeros(self.stop - self.start, dtype=like.dtype, device=like.device)

    def put(self, values: Tensor, offset: int) -> None:
        """Take what of a parameter's gradient (flat, `offset` in the new group) lies here."""
        first, last = max(offset, self.start), min(offset + values.numel(), self.stop)
        if first < last:
            self.grad[first - self.start : last - self.start] = values[first - offset : last - offset]


def carry_gradients(old: Sequence[GroupGrads], specs: Sequence[GroupSpec], collectives: Collectives) -> list[Tensor]:
    """The reduced gradients of the old groups, laid out as groups of these specs want them.

    Old gradients are dropped as they are read, so this costs one group's full gradient beside the new ones.
    """
    rank, size = collectives.world.rank, collectives.world.size
    places: dict[int, tuple[_Target, int]] = {}
    targets = []
    whole = size == 1 or old[0].group.owned is old[0].group.full
    for spec in specs:
        layout = lay_out([p.numel() for p in spec.parameters], spec.parameters[0].element_size(), size)
        like = next(_reduced(g) for g in old if any(p is spec.parameters[0] for p in g.group.spec.parameters))
        targets.append(_Target(layout, like, rank, whole))
        for parameter, offset in zip(spec.parameters, layout.offsets, strict=True):
            places[id(parameter)] = (targets[-1], offset)
    for grads in old:
        layout, reduced = grads.group.layout, _reduced(grads)
        full = _whole(grads.group, reduced)
        grads.reduced = None
        for parameter, offset, numel in zip(grads.group.spec.parameters, layout.offsets, layout.numels, strict=True):
            target, place = places[id(parameter)]
            target.put(full[offset : offset + numel], place)
    return [target.grad for target in targets]


Build = Callable[[Sequence[GroupSpec], StatePlan], list[FlatGroup]]


@dataclass(frozen=True)
class Part:
    """What comes of a part of a group: a new group's gradients, and the state that the optimizer is to have of it."""

    grads: GroupGrads
    state: GroupState | None


def split(grads: GroupGrads, specs: Sequence[GroupSpec], build: Build, updater: ShardedOptimizer) -> list[Part]:
    """Several groups in the place of one: values, master weights, optimizer state and reduced gradients move.

    A collective; for a moment each kind of state of this one group is whole on every rank.
    """
    group = grads.group
    state = updater.read_state(group)
    kinds = {name: _whole(group, moment) for name, moment in state.moments.items()}
    master = _whole(group, state.master) if state.master is not None else None
    reduced = _whole(group, grads.reduced) if grads.reduced is not None else None
    group.unshard()  # so that the parameters, which move now, can be read
    parts = []
    for new in build(specs, group.plan):
        own = GroupGrads(new)
        own.reduced = _cut(reduced, group, new) if reduced is not None else None
        if master is None:
            parts.append(Part(own, None))
            continue
        moments = {name: _cut(moment, group, new) for name, moment in kinds.items()}
        scalars = {name: copy.deepcopy(value) for name, value in state.scalars.items()}
        parts.append(Part(own, GroupState(_cut(master, group, new), moments, scalars)))
    return parts


def _whole(group: FlatGroup, stored: Tensor) -> Tensor:  # (padded_numel,)
    """A tensor that is laid out like the group's master weights, from all ranks."""
    stored = stored.to(group.full.device)
    if stored.numel() == group.layout.padded_numel:
        return stored
    full = torch.empty(group.layout.padded_numel, dtype=stored.dtype, device=stored.device)
    group.collectives.all_gather(full, stored.contiguous(), group.ticket).wait()
    return full


def _cut(values: Tensor, old: FlatGroup, new: FlatGroup) -> Tensor:
    """What of `values`, whole and laid out as the old group, a new one of its parameters wants on this rank."""
    whole = new.owned.numel() == new.layout.padded_numel
    target = _Target(new.layout, values, new.collectives.world.rank, whole)
    offsets = {id(p): offset for p, offset in zip(old.spec.parameters, old.layout.offsets, strict=True)}
    for parameter, place, numel in zip(new.spec.parameters, new.layout.offsets, new.layout.numels, strict=True):
        start = offsets[id(parameter)]
        target.put(values[start : start + numel], place)
    return target.grad


def _reduced(grads: GroupGrads) -> Tensor:
    if grads.reduced is None:
        raise EngineError(f"{grads.group.spec.label}: its gradients are not reduced yet")
    return grads.reduced
