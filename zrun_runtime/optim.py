"""The sharded step: any element-wise torch optimizer on this rank's slices, group by group.

[Note: one optimizer, one group at a time]
The optimizer object and its `param_groups` dicts are the user's (schedulers hold them); only the lists of parameters in
them become the groups' master weights. A step runs the optimizer once per flat group with that group's master alone in
its list, so that the all-gather of one group flies while the next one updates. Hooks that the user registered on the
optimizer's step run once per step, around all groups.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zrun_runtime.errors import ConfigError, EngineError, ParameterError
from zrun_runtime.flat_group import FlatGroup, is_dense
from zrun_runtime.layout import Layout, round_up
from zrun_runtime.optimizers import OWN, Lamb, require_elementwise

ParamGroups = list[dict[str, Any]]


def as_param_groups(parameters: Iterable[Any]) -> ParamGroups:
    """What optimizers take: parameters, (name, parameter) pairs, or dicts of them, as a list of dicts."""
    groups: ParamGroups = []
    loose: list[nn.Parameter] = []
    for item in parameters:
        if isinstance(item, dict):
            members = item["params"]
            groups.append({**item, "params": [members] if isinstance(members, Tensor) else _unnamed(members)})
        else:
            loose += _unnamed([item])
    return ([{"params": loose}] if loose else []) + groups


def _unnamed(members: Iterable[Any]) -> list[nn.Parameter]:
    return [item[1] if isinstance(item, tuple) else item for item in members]


def group_numbers(groups: ParamGroups) -> dict[int, int]:
    """id of each parameter -> number of its optimizer group."""
    return {id(p): number for number, group in enumerate(groups) for p in group["params"]}


def build_optimizer(kind: str, options: dict[str, Any], groups: ParamGroups) -> torch.optim.Optimizer:
    """The class `kind`, ours or of torch.optim, on these groups, fused where it can be.

    Raises:
        ConfigError: no such class, or it does not take these options.
    """
    factory = OWN.get(kind) or getattr(torch.optim, kind, None)
    if not (isinstance(factory, type) and issubclass(factory, torch.optim.Optimizer)):
        raise ConfigError(f"optimizer.type: {kind!r} is not an optimizer of torch.optim")
    if "fused" in inspect.signature(factory).parameters and "foreach" not in options:
        options = {"fused": True, **options}
    try:
        return factory(groups, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.params: {kind} refuses them: {error}") from error


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


class ShardedOptimizer:
    """See [Note: one optimizer, one group at a time]."""

    def __init__(self, optimizer: torch.optim.Optimizer, groups: Sequence[FlatGroup]) -> None:
        _refuse_strangers(optimizer, groups)
        require_elementwise(optimizer)
        self.optimizer = optimizer
        self.adopt(groups)
        if _refuse_direct_step not in optimizer._optimizer_step_pre_hooks.values():
            optimizer.register_step_pre_hook(_refuse_direct_step)

    def adopt(self, groups: Sequence[FlatGroup]) -> None:
        """Put the groups' master weights where the model's parameters were; existing state moves with them."""
        self.groups = [group for group in groups if group.master is not None]
        if isinstance(self.optimizer, Lamb):
            self.optimizer.ratios = {g.master: FlatRatios(g) for g in self.groups if g.master is not None}
        state: dict[Any, dict[str, Any]] = dict(self.optimizer.state)
        self.optimizer.state.clear()
        for number, options in enumerate(self.optimizer.param_groups):
            mine = [g for g in self.groups if g.spec.optimizer_group == number]
            self._prefer_fused(options)
            options["params"] = [group.master for group in mine]
            for group in mine:
                sharded = _shard_state(group, state) or state.get(group.master)
                if sharded and group.master is not None:
                    self._give_state(group.master, options, sharded)

    def _prefer_fused(self, options: dict[str, Any]) -> None:
        """Where the caller left the choice to torch, take the fused kernel: on a CPU it is seven times faster."""
        undecided = "fused" in options and options["fused"] is None and options.get("foreach") is None
        if undecided and not options.get("capturable") and not options.get("differentiable"):
            options["fused"] = True
            vars(self.optimizer)["_step_supports_amp_scaling"] = True

    def read_state(self, group: FlatGroup) -> GroupState:
        """What the optimizer has of this group. No collective; moments and scalars are empty before the first step."""
        if group.master is None:
            return GroupState(None, {}, {})
        state, shape = self.optimizer.state.get(group.master, {}), group.master.shape
        moments = {key: v for key, v in state.items() if isinstance(v, Tensor) and v.shape == shape}
        return GroupState(group.master.detach(), moments, {k: v for k, v in state.items() if k not in moments})

    def state_dtypes(self, group: FlatGroup) -> dict[str, torch.dtype]:
        """The dtypes of what `read_state` gives that is laid out as the master, "master" itself included: no values."""
        state = self.read_state(group)
        kinds = {} if state.master is None else {"master": state.master.dtype}
        return kinds | {key: value.dtype for key, value in sorted(state.moments.items())}

    def write_state(self, group: FlatGroup, state: GroupState) -> None:
        """Have this state from now on; its tensors may be kept. The model sees the values after `group.publish()`."""
        if group.master is None or state.master is None:
            raise EngineError(f"{group.spec.label}: no optimizer updates it")
        if state.master.data_ptr() != group.master.data_ptr():
            group.master.detach().copy_(state.master)
        options = self.optimizer.param_groups[group.spec.optimizer_group or 0]
        self._give_state(group.master, options, {**state.scalars, **state.moments})

    def _give_state(self, master: nn.Parameter, options: dict[str, Any], state: dict[str, Any]) -> None:
        if options.get("fused") and isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(master.device)  # other kernels count on the CPU
        self.optimizer.state[master] = state

    def step(self, reduced: Callable[[FlatGroup], Tensor], scale: float) -> None:
        """Update every group with its reduced gradient times `scale`, and publish. All is readable on return."""
        optimizer, options = self.optimizer, self.optimizer.param_groups
        fused_scale = scale != 1.0 and self._scales_itself()
        lists = [entry["params"] for entry in options]
        before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        published = []
        try:
            for hook in before.values():
                if hook is not _refuse_direct_step:
                    hook(optimizer, (), {})
            for entry in options:
                entry["params"] = []
            for group in self.groups:
                published.append(self._update(group, reduced(group), scale, fused_scale).publish())
            for pending in published:
                pending.wait()
        finally:
            for entry, members in zip(options, lists, strict=True):
                entry["params"] = members
            optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = before, after
        for hook in after.values():
            hook(optimizer, (), {})

    def _update(self, group: FlatGroup, grad: Tensor, scale: float, fused_scale: bool) -> FlatGroup:
        optimizer, number = self.optimizer, group.spec.optimizer_group
        if group.master is None or number is None:
            raise EngineError(f"{group.spec.label}: no optimizer updates it")
        if fused_scale:
            vars(optimizer)["grad_scale"] = torch.full((), 1.0 / scale, device=grad.device)
        elif scale != 1.0:
            grad.mul_(scale)
        group.master.grad = grad
        options = optimizer.param_groups[number]
        options["params"] = [group.master]
        try:
            optimizer.step()
        finally:
            options["params"] = []
            group.master.grad = None
            if fused_scale:
                del vars(optimizer)["grad_scale"]
        return group

    def _scales_itself(self) -> bool:
        """Fused kernels divide by a scale while they read the gradient, which saves a pass over it."""
        fused = all(group.get("fused") for group in self.optimizer.param_groups)
        return fused and getattr(self.optimizer, "_step_supports_amp_scaling", False)


def _refuse_direct_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    raise EngineError(
        "optimizer.step(): the gradients are the engine's, so this would change nothing", "call engine.step()"
    )


def _refuse_strangers(optimizer: torch.optim.Optimizer, groups: Sequence[FlatGroup]) -> None:
    """What no group holds would be dropped from the optimizer."""
    known = {id(p) for group in groups for p in (*group.spec.parameters, group.master)}
    for number, options in enumerate(optimizer.param_groups):
        for parameter in options["params"]:
            if parameter.requires_grad and parameter.numel() and id(parameter) not in known:
                raise ParameterError(
                    f"optimizer group {number}: a parameter of shape {tuple(parameter.shape)} is not in the model",
                    "make one module of all that is trained together, and give that to initialize",
                )


def _shard_state(group: FlatGroup, state: dict[Any, dict[str, Any]]) -> dict[str, Any]:
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
        squares = torch.zeros(round_up(2 * count, world.size), dtype=torch.float64, device=values.device)
        for index, part in self.parts:
            squares[index] = values[part].double().square().sum()
            squares[count + index] = update[part].double().square().sum()
        if self.split:
            self.group.collectives.reduce(squares, Layout.REPLICATED, squares, False, self.group.ticket).wait()
        norms = squares.sqrt()
        ratios = ratio(norms[:count], norms[count : 2 * count]).to(update.dtype)
        for index, part in self.parts:
            update[part].mul_(ratios[index])
