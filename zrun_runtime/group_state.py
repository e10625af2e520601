"""The optimizer state of one flat group: what it is made of, and how it comes from state of whole parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zrun_runtime.flat_group import FlatGroup, is_dense
from zrun_runtime.layout import Layout, round_up


@dataclass(frozen=True)
class GroupState:
    """What an optimizer has of one flat group, on this rank. Tensors are (shard_numel,), or (padded_numel,) where the
    state is whole on every rank; where they are in memory between uses, they are the ones in use, not copies.

    master: fp32 (fp64) weights; None if nothing updates the group. moments: laid out as the master, by the optimizer's
    own names. scalars: what the group has one of (`step`): numbers, or tensors of any other shape.
    """

    master: Tensor | None
    moments: dict[str, Tensor]
    scalars: dict[str, Any]


def is_sized(value: Any, numel: int) -> bool:
    """A state entry that has one number for each element."""
    return isinstance(value, Tensor) and value.shape == (numel,)


def shard_state(group: FlatGroup, state: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    """The state that the parameters of a group had, as the state of its master weights."""
    known = [(index, state[p]) for index, p in enumerate(group.spec.parameters) if state.get(p)]
    if not known or group.master is None:
        return {}
    rank = group.collectives.world.rank if group.owned is not group.full else 0
    start = group.layout.shard_bounds(rank)[0]
    sharded: dict[str, Any] = {}
    for index, entries in known:
        offset = group.layout.offsets[index] - start
        for key, value in entries.items():
            shape = group.spec.parameters[index].shape
            if key == "step" or not isinstance(value, Tensor) or value.shape != shape:
                sharded[key] = value
                continue
            whole = sharded.setdefault(key, torch.zeros_like(group.master, dtype=value.dtype).detach())
            first, last = max(0, offset), min(whole.numel(), offset + value.numel())
            if first < last:
                flat = value.detach()
                flat = flat.as_strided((flat.numel(),), (1,)) if is_dense(flat) else flat.reshape(-1)
                whole[first:last] = flat[first - offset : last - offset]
    return sharded


class FlatRatios:
    """The norms that LAMB wants of whole parameters, of which a rank may have a part (see optimizers.Ratios)."""

    def __init__(self, group: FlatGroup) -> None:
        self.group = group
        layout, collectives = group.layout, group.collectives
        self.split = group.owned is not group.full and collectives.world.size > 1
        if self.split:
            parts = [(f.index, f.shard_offset, f.numel) for f in layout.fragments(collectives.world.rank)]
        else:
            parts = [(i, o, n) for i, (o, n) in enumerate(zip(layout.offsets, layout.numels, strict=True))]
        self.parts = [(index, slice(start, start + numel)) for index, start, numel in parts]

    def __call__(self, values: Tensor, update: Tensor, ratio: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Multiply each parameter's part of `update`. A collective where ranks have parts."""
        count, world = len(self.group.layout.numels), self.group.collectives.world
        device = self.group.full.device  # which ranks exchange from
        squares = torch.zeros(round_up(2 * count, world.size), dtype=torch.float64, device=device)
        for index, part in self.parts:
            squares[index] = values[part].double().square().sum()
            squares[count + index] = update[part].double().square().sum()
        if self.split:
            self.group.collectives.reduce(squares, Layout.REPLICATED, squares, False, self.group.ticket).wait()
        norms = squares.sqrt()
        ratios = ratio(norms[:count], norms[count : 2 * count]).to(update)
        for index, part in self.parts:
            update[part].mul_(ratios[index])
