"""Whole values out of sharded ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zrun_runtime.flat_group import FlatGroup
from zrun_runtime.zero_model import ZeroModel


def module_state_dict(module: nn.Module, zero: ZeroModel) -> dict[str, Any]:
    """Parameters and buffers by name, full, on the CPU. Where parameters are sharded only rank 0 gets them.

    A collective where parameters are sharded: every rank must call it. Groups are gathered one at a time.
    """
    sharded = {id(p): g for g in zero.groups if g.comes_and_goes for p in g.spec.parameters}
    full: dict[int, Tensor] = {}
    here = zero.collectives.world.rank == 0
    for group in dict.fromkeys(sharded.values()):
        zero.holder.pin([group])
        if here:
            full.update((id(p), p.detach().cpu().clone()) for p in group.spec.parameters)
        zero.holder.unpin([group])
    if sharded and not here:
        return {}
    state: dict[str, Any] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, parameter in part._parameters.items():
            if parameter is not None:
                state[dot + name] = full[id(parameter)] if id(parameter) in full else parameter.detach().cpu().clone()
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                state[dot + name] = buffer.detach().cpu().clone()
    return state


def full_value(zero: ZeroModel, parameter: nn.Parameter, shard: Tensor | None) -> Tensor | None:
    """The values that belong to one parameter in a tensor laid out like its group's owned part; on every rank.

    shard: (shard_numel,) or, where state is replicated, (padded_numel,). A collective.
    """
    found = find(zero, parameter)
    if found is None or shard is None:
        return None
    group, index = found
    full = shard
    if shard.numel() != group.layout.padded_numel:
        full = torch.empty(group.layout.padded_numel, dtype=shard.dtype, device=shard.device)
        zero.collectives.all_gather(full, shard.contiguous()).wait()
    offset = group.layout.offsets[index]
    view = group.views[index]
    return full.as_strided(view.size(), view.stride(), offset).clone()


def find(zero: ZeroModel, parameter: nn.Parameter) -> tuple[FlatGroup, int] | None:
    """The group of a parameter and its place in it."""
    found = zero.where.get(id(parameter))
    return found if found is not None and found[0].spec.parameters[found[1]] is parameter else None
