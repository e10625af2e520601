"""Whole values out of sharded ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zrun_runtime.errors import EngineError
from zrun_runtime.flat_group import FlatGroup
from zrun_runtime.ownership import home_of
from zrun_runtime.zero_model import ZeroModel


def module_state_dict(module: nn.Module, zero: ZeroModel) -> dict[str, Any]:
    """What the module's own `state_dict` has, its hooks and extra state included, full, in copies on the CPU.

    Tied weights stay one tensor. A collective where parameters are sharded: every rank must call it, and only rank 0
    gets something. Groups are gathered one at a time.
    """
    named = module.state_dict(keep_vars=True)
    here = zero.collectives.world.rank == 0
    copies: dict[int, Tensor] = {}
    sharded = _sharded_groups(module)
    for group, home in sharded.items():
        home.holder.pin([group])
        if here:
            copies.update((id(p), p.detach().cpu().clone()) for p in group.spec.parameters)
        home.holder.unpin([group])
    if sharded and not here:
        return {}
    for value in named.values():
        if isinstance(value, Tensor) and id(value) not in copies:
            copies[id(value)] = value.detach().cpu().clone()
    for name, value in named.items():
        named[name] = copies[id(value)] if isinstance(value, Tensor) else value
    return named


def _sharded_groups(module: nn.Module) -> dict[FlatGroup, ZeroModel]:
    """The groups that must be gathered for the parameters of a module, in their order, and who has them."""
    found: dict[FlatGroup, ZeroModel] = {}
    for parameter in module.parameters():
        home = home_of(parameter)
        if isinstance(home, ZeroModel):
            group, _ = home.where[id(parameter)]
            if group.comes_and_goes:
                found[group] = home
    return dict(sorted(found.items(), key=lambda item: item[0].ticket))


def load_module_state_dict(
    module: nn.Module,
    zero: ZeroModel,
    checkpoint: Mapping[str, Any],
    strict: bool = True,
    custom_load: Callable[..., Any] | None = None,
) -> None:
    """The reverse; see Engine.load_module_state_dict. Groups are gathered one at a time (all for `custom_load`)."""
    given = zero.collectives.world.rank == 0 or bool(checkpoint)
    misfit = _misfit(module, checkpoint) if given and strict and custom_load is None else ""
    if not zero.agree(not misfit):
        raise EngineError(
            f"the state dict does not fit the model: {misfit or 'another rank says where'}",
            "load the dict of the same model, or pass strict=False",
        )
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    grouped = set()
    for groups in [zero.groups] if custom_load is not None else [[group] for group in zero.groups]:
        zero.holder.pin(groups)
        mine = {name for group in groups for p in group.spec.parameters for name in names[id(p)]}
        grouped |= mine
        if custom_load is not None and given:
            custom_load(src=checkpoint, dst=module)
        elif given:
            module.load_state_dict({k: v for k, v in checkpoint.items() if k in mine}, strict=False)
        for group in groups:
            group.store(source=0)
        zero.holder.unpin(groups)
    if given and custom_load is None:
        module.load_state_dict({k: v for k, v in checkpoint.items() if k not in grouped}, strict=False)
    zero.share_the_rest()


def _misfit(module: nn.Module, checkpoint: Mapping[str, Any]) -> str:
    """What is missing from a state dict, what nobody knows, and what has another shape."""
    transient = {
        f"{prefix}.{name}".lstrip(".") for prefix, m in module.named_modules() for name in m._non_persistent_buffers_set
    }
    wanted = {name: p.shape for name, p in module.named_parameters(remove_duplicate=False)}
    wanted |= {n: b.shape for n, b in module.named_buffers(remove_duplicate=False) if n not in transient}
    given = {name: value for name, value in checkpoint.items() if not name.endswith("_extra_state")}
    found = {
        "missing": [name for name in wanted if name not in given],
        "unknown": [name for name in given if name not in wanted],
        "of another shape": [n for n, v in given.items() if n in wanted and v.shape != wanted[n]],
    }
    return "; ".join(f"{what}: {', '.join(map(str, names[:5]))}" for what, names in found.items() if names)


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
        shard = shard.to(group.full.device).contiguous()  # which may be on the host
        full = torch.empty(group.layout.padded_numel, dtype=shard.dtype, device=shard.device)
        zero.collectives.all_gather(full, shard, group.ticket).wait()
    offset = group.layout.offsets[index]
    view = group.views[index]
    return full.as_strided(view.size(), view.stride(), offset).clone()


def find(zero: ZeroModel, parameter: nn.Parameter) -> tuple[FlatGroup, int] | None:
    """The group of a parameter and its place in it."""
    found = zero.where.get(id(parameter))
    return found if found is not None and found[0].spec.parameters[found[1]] is parameter else None
