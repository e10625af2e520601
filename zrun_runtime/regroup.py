"""Moving reduced gradients from one set of groups to another, one old group at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zrun_runtime.collectives import Collectives
from zrun_runtime.errors import EngineError
from zrun_runtime.flat_group import GroupSpec
from zrun_runtime.layout import FlatLayout, lay_out
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
        layout, reduced = grads.group.layout, _reduced(grads).to(grads.group.full.device)
        full = reduced
        if reduced.numel() != layout.padded_numel:
            full = torch.empty(layout.padded_numel, dtype=reduced.dtype, device=reduced.device)
            collectives.all_gather(full, reduced).wait()
        grads.reduced = None
        for parameter, offset, numel in zip(grads.group.spec.parameters, layout.offsets, layout.numels, strict=True):
            target, place = places[id(parameter)]
            target.put(full[offset : offset + numel], place)
    return [target.grad for target in targets]


def _reduced(grads: GroupGrads) -> Tensor:
    if grads.reduced is None:
        raise EngineError(f"{grads.group.spec.label}: its gradients are not reduced yet")
    return grads.reduced
