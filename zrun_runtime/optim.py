"""The sharded step: any element-wise torch optimizer on this rank's slices, group by group.

[Note: one optimizer, one group at a time]
The optimizer object and its `param_groups` dicts are the user's (schedulers hold them); only the lists of parameters in
them become the groups' master weights. A step runs the optimizer once per flat group with that group's master alone in
its list, so that the all-gather of one group flies while the next one updates. Hooks that the user registered on the
optimizer's step run once per step, around all groups.

[Note: tiles and strips]
Where the optimizer's state is off the device a group is updated in pieces: a tile is what is fetched from its tier at
once, a strip of it what the optimizer sees as one parameter. The gradient of a strip is cast and clipped, updated and
shown to the model while it is in the cache. Scalars of the state (the count of steps) are the group's: every strip
begins with those that the step began with, and the last one's are kept.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zrun_runtime.errors import ConfigError, EngineError, ParameterError
from zrun_runtime.flat_group import FlatGroup
from zrun_runtime.fused import StripAdam, steps_like_adam
from zrun_runtime.group_state import FlatRatios, GroupState, is_sized, shard_state
from zrun_runtime.optimizers import OWN, Lamb, require_elementwise
from zrun_runtime.state_homes import MASTER, StateHomes, master_of, number_of, shown, weights_of
from zrun_runtime.tiers import MemoryStore, OffloadSettings, Slot, Values, stream
from zrun_runtime.tiers.host import host_empty

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
    fusable = "fused" in inspect.signature(factory).parameters and "foreach" not in options
    if fusable and not any(p.is_meta for group in groups for p in group["params"]):
        options = {"fused": True, **options}
    try:
        return factory(groups, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.params: {kind} refuses them: {error}") from error


class ShardedOptimizer:
    """See the notes above."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, groups: Sequence[FlatGroup], offload: OffloadSettings | None = None
    ) -> None:
        """
        Raises:
            OffloadError: the disk cannot hold the state that is to go there.
        """
        _refuse_strangers(optimizer, groups)
        require_elementwise(optimizer)
        self.optimizer = optimizer
        self.homes = StateHomes(optimizer, offload)
        self.groups: list[FlatGroup] = []
        self._like_adam = steps_like_adam(optimizer)
        self._strip: Tensor | None = None  # (most elements of a strip,) master dtype: a gradient on its way
        self.adopt(groups)
        if _refuse_direct_step not in optimizer._optimizer_step_pre_hooks.values():
            optimizer.register_step_pre_hook(_refuse_direct_step)

    def adopt(self, groups: Sequence[FlatGroup]) -> None:
        """Put the groups' master weights where the model's parameters were; existing state moves with them."""
        kept = set(self.homes.stores)
        self.groups = [group for group in groups if group.master is not None]
        if isinstance(self.optimizer, Lamb):
            self.optimizer.ratios.clear()
        state: dict[Any, dict[str, Any]] = dict(self.optimizer.state)
        self.optimizer.state.clear()
        for number, options in enumerate(self.optimizer.param_groups):
            self._prefer_fused(options)
            options["params"] = [master_of(g) for g in self.groups if g.spec.optimizer_group == number]
        self.homes.build(self.groups)
        for group in self.groups:
            entries = shard_state(group, state) or state.get(group.master)
            if group in kept and entries:
                self.optimizer.state[master_of(group)] = entries
            elif entries:
                moments = {key: v for key, v in entries.items() if is_sized(v, master_of(group).numel())}
                scalars = {key: value for key, value in entries.items() if key not in moments}
                self.write_state(group, GroupState(self.homes.read(group).master, moments, scalars))

    def _prefer_fused(self, options: dict[str, Any]) -> None:
        """Where the caller left the choice to torch, take the fused kernel: on a CPU it is seven times faster."""
        undecided = "fused" in options and options["fused"] is None and options.get("foreach") is None
        real = self.groups and not any(group.full.is_meta for group in self.groups)  # meta has no fused kernels
        if undecided and real and not options.get("capturable") and not options.get("differentiable"):
            options["fused"] = True
            vars(self.optimizer)["_step_supports_amp_scaling"] = True

    # ---- a step

    def step(self, reduced: Callable[[FlatGroup], Tensor], scale: float) -> list[FlatGroup]:
        """Update every group with its reduced gradient times `scale`, and publish. All is readable on return.

        Returns offloaded groups with 16-bit weights that were edited since the last step, which their master followed.
        """
        homes, edited = self.homes, {}
        groups = {store: group for group, store in homes.stores.items()}
        slots = [slot for group in self.groups if group.trains for slot in homes.slots(group)]
        with self._one_at_a_time(), ExitStack() as opened:
            opened.callback(homes.finish)
            published = []
            for slot, values in stream(slots, homes.ahead):
                group = groups[slot.store]
                if slot.start == 0:
                    weights_of(group).inspect()
                    group_opened = opened.enter_context(ExitStack())
                    group_opened.enter_context(shown(group, changed=True, fresh=homes.updates_all(group)))
                if self._update(group, slot, values, reduced(group), scale):
                    edited[group] = True
                if slot.is_last:
                    group_opened.close()
                    weights_of(group).behind = False
                    published.append((group, group.publish()))
            for group, pending in published:
                pending.wait()
                weights_of(group).mark(group.holders, group in edited)
        return list(edited)

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        """Inside, the optimizer's lists are empty and its hooks silent; they ran before and run after."""
        optimizer, options = self.optimizer, self.optimizer.param_groups
        lists = [entry["params"] for entry in options]
        before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        try:
            for hook in before.values():
                if hook is not _refuse_direct_step:
                    hook(optimizer, (), {})
            for entry in options:
                entry["params"] = []
            yield
        finally:
            for entry, members in zip(options, lists, strict=True):
                entry["params"] = members
            optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = before, after
        for hook in after.values():
            hook(optimizer, (), {})

    def _update(self, group: FlatGroup, slot: Slot, values: Values, grad: Tensor, scale: float) -> bool:
        """Update the elements of one slot and show them; were any edited? See [Note: tiles and strips]."""
        weights, master = weights_of(group), self.homes.master_tile(group, slot, values)
        scalars, size = self.homes.scalars(group), self.homes.strip(group)
        before = [name for name in values if name != MASTER]  # what is new in one strip is new in every other
        options, kernel = self.optimizer.param_groups[number_of(group)], None
        if self._like_adam and StripAdam.fits(options, scalars, before):
            kernel = StripAdam(options, scalars["step"], scale)
        left: dict[str, Any] = {}
        edited = False
        for start in range(0, slot.numel, size):
            piece, first = master[start : start + size], slot.start + start
            part = grad[first : first + piece.numel()]
            edited |= weights.catch_up(piece, first)
            part_of = {name: values[name][start : start + size] for name in before}
            if piece.numel() == slot.store.numel and isinstance(slot.store, MemoryStore):
                self._update_whole(group, part, scale)
            elif kernel is not None:
                kernel(piece, part_of, *self._scaled(part, piece, scale))
                left = kernel.scalars
                vars(self.optimizer)["_opt_called"] = True  # schedulers of torch ask whether it has stepped
            else:
                parameter = nn.Parameter(piece)
                self.optimizer.state[parameter] = {**_copies_of(scalars), **part_of}
                self._run(group, parameter, *self._scaled(part, piece, scale))
                left = self._keep(slot, values, start, parameter)
            weights.show(piece, first)
        if slot.is_last:
            self.optimizer.state[weights.parameter].update(left)
        return edited

    def _keep(self, slot: Slot, values: Values, start: int, parameter: nn.Parameter) -> dict[str, Any]:
        """Put the state of a strip where it belongs. Returns its scalars."""
        numel, scalars = parameter.numel(), {}
        for name, value in self.optimizer.state.pop(parameter).items():
            if not is_sized(value, numel):
                scalars[name] = value
                continue
            if name not in values:
                values[name] = slot.store.room(slot, name, value.dtype)
            home = values[name][start : start + numel]
            if home.data_ptr() != value.data_ptr():
                home.copy_(value)
        return scalars

    def _update_whole(self, group: FlatGroup, grad: Tensor, scale: float) -> None:
        """Update a group that is in memory, with its own state."""
        master = master_of(group)
        if grad.dtype is not master.dtype:
            self._run(group, master, *self._scaled(grad, master, scale))
        elif scale == 1.0 or self._scales_itself():
            self._run(group, master, grad, scale)
        else:
            self._run(group, master, grad.mul_(scale))

    def _run(self, group: FlatGroup, parameter: nn.Parameter, grad: Tensor, scale: float = 1.0) -> None:
        """The optimizer's step on one parameter, with the options of the group's.

        scale: of the gradient, not yet applied; another than 1 for fused kernels only.
        """
        optimizer, options = self.optimizer, self.optimizer.param_groups[number_of(group)]
        parameter.grad = grad
        options["params"] = [parameter]
        if scale != 1.0:
            vars(optimizer)["grad_scale"] = torch.full((), 1.0 / scale, device=grad.device)
        if isinstance(optimizer, Lamb):
            optimizer.ratios[parameter] = FlatRatios(group)
        try:
            optimizer.step()
        finally:
            options["params"] = []
            parameter.grad = None
            vars(optimizer).pop("grad_scale", None)
            if isinstance(optimizer, Lamb):
                del optimizer.ratios[parameter]

    def _scaled(self, grad: Tensor, like: Tensor, scale: float) -> tuple[Tensor, float]:
        """A strip's gradient in the dtype of its master, and the scale it still needs.

        What had to be cast is in a buffer that the next strip overwrites; a fused kernel may scale that in place.
        """
        if self._strip is None or self._strip.numel() < grad.numel() or self._strip.dtype is not like.dtype:
            self._strip = host_empty(grad.numel(), like.dtype, pin=False)
        strip = self._strip[: grad.numel()]
        if grad.dtype is not like.dtype or grad.device != like.device:
            grad = strip.copy_(grad)
        if scale == 1.0 or (grad is strip and self._scales_itself()):
            return grad, scale
        if self._scales_itself():  # divide as fused kernels do, so that the bits are the same
            return torch.div(grad, torch.full((), 1.0 / scale, dtype=like.dtype), out=strip), 1.0
        return torch.mul(grad, scale, out=strip), 1.0

    def _scales_itself(self) -> bool:
        """Fused kernels divide by a scale while they read the gradient, which saves a pass over it."""
        fused = all(group.get("fused") for group in self.optimizer.param_groups)
        return fused and getattr(self.optimizer, "_step_supports_amp_scaling", False)

    # ---- the state of a group

    def read_state(self, group: FlatGroup) -> GroupState:
        """What the optimizer has of this group, edits of the weights included. No collective; moments and scalars are
        empty before the first step.

        Of a group whose state is on a disk: copies, of one group's size.
        """
        group.take_back()
        return self.homes.read(group) if group.master is not None else GroupState(None, {}, {})

    def state_dtypes(self, group: FlatGroup) -> dict[str, torch.dtype]:
        """The dtypes of what `read_state` gives that is laid out as the master, "master" itself included: no values."""
        if group.master is None:
            return {}
        return {"master": group.master.dtype} | self.homes.dtypes(group)

    def write_state(self, group: FlatGroup, state: GroupState) -> None:
        """Have this state from now on; its tensors may be kept. The model sees the values after `group.publish()`."""
        self.homes.write(group, state)


def _copies_of(scalars: dict[str, Any]) -> dict[str, Any]:
    """Scalars of the state that a step may change in place."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in scalars.items()}


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
