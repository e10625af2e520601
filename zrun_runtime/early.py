"""Parameters that are sharded one by one while a model is built, before there is an engine (`zero.Init`).

[Note: early shards]
A module's parameters are sharded when the module becomes a child of another one, for then its construction is over;
those of the outermost modules at the end of the context. Torch tells of both through its registration hooks, so no
class is patched. What reads or writes a placeholder inside the context (an initialisation after construction, a copy)
borrows it: the values are gathered on every rank, and put back, with rank 0's edits, when something else is borrowed or
registered. After the context, what all ranks do alike may still compare placeholders and write into them in place, as
functions of torch.nn.init do; rank 0's values count. While something is gathered, such a write may be that of one rank
alone and reaches nobody: it is left out, and said. `initialize` takes the values over group by group, so the peak is a
rank's share and two groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from zrun_runtime.agreement import kind_text, require_agreement
from zrun_runtime.collectives import Collectives
from zrun_runtime.errors import ParameterError
from zrun_runtime.flat_group import FlatGroup, GroupSpec
from zrun_runtime.plan import StatePlan
from zrun_runtime.sharded_parameter import call_number
from zrun_runtime.shards import leaves_device
from zrun_runtime.telemetry import notice

_ATTRIBUTE = "_zrun_early"  # of a parameter: its EarlyShard; it lives exactly as long as the parameter
_MADE_HERE = " (made in zero.Init; give its model to initialize() first)"  # behind the name, in errors
_BORROWED_AT_ONCE = 16


class EarlyShard:
    """One parameter's shard. It is what `GatheredParameters` needs a home of parameters to be."""

    pinned = 0  # gatherings of any of them that are not over

    def __init__(self, parameter: nn.Parameter, label: str, collectives: Collectives, plan: StatePlan) -> None:
        self.collectives = collectives
        self.pins = 0
        spec = GroupSpec(label, (label,), (parameter,), None)
        self.group = FlatGroup(spec, plan, collectives, self)

    def recall(self, parameter: nn.Parameter) -> bool:
        """Inside a `zero.Init` the values can be borrowed."""
        return Building.active is not None and Building.active.borrow(self)

    @contextmanager
    def lend(self, parameter: nn.Parameter, writes: bool) -> Iterator[bool]:
        """The model is still being put together, by all ranks alike; see [Note: early shards]."""
        if writes and EarlyShard.pinned:
            notice("warning", f"{self.group.spec.label}: it is not gathered, so what was written into it is lost")
            yield False
            return
        self.pin([self.group])
        try:
            yield True
            if writes:
                self.group.store(source=0)
        finally:
            self.unpin([self.group])

    def give_up(self, parameter: nn.Parameter) -> Tensor:
        """The full values; from now on the parameter is someone else's."""
        self.group.unshard()
        delattr(parameter, _ATTRIBUTE)
        return parameter.detach()

    def replaced(self) -> bool:
        """While its values were here the parameter was given others, of another type or elsewhere (`model.half()`)."""
        return self.group.spec.parameters[0].data_ptr() != self.group.views[0].data_ptr()

    def begin_anew(self) -> None:
        """Shard what the parameter has now."""
        parameter, label = self.group.spec.parameters[0], self.group.spec.label
        delattr(parameter, _ATTRIBUTE)
        shard_early(parameter, label, Building(self.collectives, None, self.group.plan))

    def pin(self, groups: Sequence[FlatGroup]) -> None:
        """Unshard until `unpin`."""
        if Building.active is not None:
            Building.active.give_back()
        self.pins += 1
        EarlyShard.pinned += 1
        self.group.unshard()

    def unpin(self, groups: Sequence[FlatGroup]) -> None:
        """The user is done with it."""
        self.pins -= 1
        EarlyShard.pinned -= 1
        if not self.pins:
            self.group.reshard(leave_aliases=True)


def early_shard(parameter: Any) -> EarlyShard | None:
    """The early shard of a parameter, if it has one."""
    return getattr(parameter, _ATTRIBUTE, None)


def shard_early(parameter: nn.Parameter, label: str, building: Building) -> None:
    """Leave this rank its slice of rank 0's values. What cannot be sharded is left alone. A collective."""
    collectives, plan = building.collectives, building.plan
    plain = type(parameter) is nn.Parameter and parameter.is_floating_point() and parameter.layout is torch.strided
    if not plain or parameter.is_meta or not parameter.numel() or early_shard(parameter) is not None:
        return
    device = collectives.world.device
    parameter.data = parameter.data.to(device, building.dtype)
    if collectives.world.size == 1 and not leaves_device(plan.params.tier, device):
        return  # the slice is the whole, and stays
    name = label.removesuffix(_MADE_HERE)
    facts = [("the next parameter", f"{name} ({kind_text(parameter)})")]
    require_agreement(collectives, building.ticket, "zero.Init", facts)
    setattr(parameter, _ATTRIBUTE, EarlyShard(parameter, label, collectives, plan))


def recast_early(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Keep the slice of an early parameter in another dtype. A collective.

    Raises:
        ParameterError: the parameter is gathered.
    """
    shard = early_shard(parameter)
    if shard is not None and shard.pins:
        raise ParameterError(
            f"{shard.group.spec.label}: it is gathered", "leave GatheredParameters before you call initialize()"
        )
    if shard is not None and parameter.dtype is not dtype:
        parameter.data = shard.give_up(parameter).to(dtype)
        early = EarlyShard(parameter, shard.group.spec.label, shard.collectives, shard.group.plan)
        setattr(parameter, _ATTRIBUTE, early)


class Building:
    """What is under construction inside `zero.Init`; see [Note: early shards].

    dtype: parameters are cast to it; None: they keep theirs. plan: how they are laid out until an engine takes over.
    """

    active: Building | None = None

    def __init__(self, collectives: Collectives, dtype: torch.dtype | None, plan: StatePlan) -> None:
        self.collectives, self.dtype, self.plan = collectives, dtype, plan
        self.ticket = collectives.register("zero.Init")
        self._waiting: dict[nn.Module, None] = {}  # have parameters that are not sharded yet
        self._borrowed: dict[EarlyShard, int] = {}  # -> the number of the call that borrowed it last
        self._handles: list[Any] = []

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Shard what is built inside."""
        outer, Building.active = Building.active, self
        self._handles = [
            register_module_parameter_registration_hook(self._on_parameter),
            register_module_module_registration_hook(self._on_child),
        ]
        try:
            yield
            self.finish()
        finally:
            for handle in self._handles:
                handle.remove()
            for shard in self._borrowed:
                shard.group.reshard()
            Building.active = outer

    def finish(self) -> None:
        """Shard what still waits."""
        self.give_back()
        for module in list(self._waiting):
            self.shard(module)

    def shard(self, module: nn.Module) -> None:
        """Shard every parameter in a module."""
        for name, parameter in module.named_parameters():
            label = f"{type(module).__name__}.{name}{_MADE_HERE}"
            shard_early(parameter, label, self)
        for part in module.modules():
            self._waiting.pop(part, None)

    def borrow(self, shard: EarlyShard) -> bool:
        """Gather the values of one parameter for the call under way, and put back what earlier calls left."""
        if len(self._borrowed) >= _BORROWED_AT_ONCE:
            self.give_back(before=call_number())
        self._borrowed[shard] = call_number()
        shard.group.unshard()
        return True

    def give_back(self, before: int | None = None) -> None:
        """Take rank 0's values of what was borrowed (before a call of this number) and shard it again."""
        for shard, number in list(self._borrowed.items()):
            if before is None or number < before:
                del self._borrowed[shard]
                if shard.pins:
                    continue
                if shard.replaced():
                    shard.begin_anew()
                else:
                    shard.group.store(source=0)
                    shard.group.reshard(leave_aliases=True)

    def _on_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if Building.active is self and parameter is not None:
            self.give_back()
            if early_shard(parameter) is None:
                self._waiting[module] = None

    def _on_child(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        if Building.active is self and child is not None:
            self.shard(child)


@contextmanager
def not_building() -> Iterator[None]:
    """Modules made and joined inside are nobody's business."""
    outer, Building.active = Building.active, None
    if outer is not None:
        outer.give_back()
    try:
        yield
    finally:
        Building.active = outer
