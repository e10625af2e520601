"""Groups follow what a script changes in a model after initialize: what is trained, what it consists of.

[Note: what changes when]
Freezing (`requires_grad_(False)`) counts when `step` runs: a parameter that is frozen then, and got no gradient on any
rank since the last update, is left out of the update as torch leaves out what has no gradient: no decay, no momentum,
no step counted. Its group is split if others of it go on; values, master weights and optimizer state move. Unfreezing,
`optimizer.add_param_group` and new parameters count before the next forward, if no gradients are held then; else at the
step. Parts that were apart once stay apart: each has a count of steps of its own. What becomes trainable and is in no
optimizer would never be trained, so it is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn

from zrun_runtime.agreement import require_agreement
from zrun_runtime.errors import EngineError, ParameterError
from zrun_runtime.flat_group import FlatGroup, GroupSpec
from zrun_runtime.layout import Layout, round_up
from zrun_runtime.optim import ShardedOptimizer
from zrun_runtime.reducer import GroupGrads
from zrun_runtime.regroup import Part, split
from zrun_runtime.zero_model import ZeroModel

_COMPARED = ("lr", "weight_decay", "momentum", "betas")  # options that schedules and people change while it trains


class Structure:
    """Which modules and parameters a model consists of, to see at little cost that this changed."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self._tables: list[dict[str, Any]] = [table for m in model.modules() for table in (m._parameters, m._modules)]
        self._members = self._now()

    def _now(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._tables))]

    def changed(self) -> bool:
        """A module or a parameter came, went, or gave its place to another."""
        now = self._now()
        return len(now) != len(self._members) or not all(map(is_, now, self._members))


class Formation:
    """See [Note: what changes when]."""

    def __init__(self, zero: ZeroModel, updater: ShardedOptimizer) -> None:
        self.zero, self.updater = zero, updater
        self._structure = Structure(zero.model)
        held = zero.optimizer_groups
        self._left_out = {id(p): p for p in self._structure.parameters if p.requires_grad and id(p) not in held}
        self._waiting = [p for p in self._structure.parameters if id(p) in held]  # kept, as ids of dead ones come again
        self._flags = self._flags_now()
        self._ticket = zero.collectives.register("a change of what is trained")

    def _flags_now(self) -> list[bool]:
        return [p.requires_grad for p in self._structure.parameters]

    # ---- more is trained

    def follow(self, stepping: bool = False) -> None:
        """Before a forward, and before a step: take in what became trainable or was added.

        Raises:
            ParameterError: no optimizer has it, or it cannot be sharded.
            EngineError: it came while gradients were added up.
        """
        if not self._structure.changed() and self._flags_now() == self._flags and not self._newcomers():
            return
        if not stepping and self._holds_gradients():
            return  # at the step, then
        changed = self._structure.changed()
        if changed:
            self._structure = Structure(self.zero.model)
        self._hear_of_newcomers()
        fresh = self._fresh()
        if stepping and self.zero.settings.window.steps > 1 and any(p.grad is not None for p in fresh.values()):
            raise EngineError(
                f"{next(iter(fresh))}: it began to be trained while gradients of several micro-batches were added up",
                "unfreeze and add parameters right after a step() that is an update",
            )
        if fresh or changed:
            wanted = {id(p) for p in fresh.values()}
            self._relay(lambda group, p: id(p) in wanted or group.trains, fresh)
        self._flags = self._flags_now()

    def _holds_gradients(self) -> bool:
        return any(grads.buffer is not None or grads.reduced is not None for grads in self.zero.reducer.order)

    def _newcomers(self) -> dict[int, tuple[nn.Parameter, int]]:
        """By id: parameters that were added to the optimizer after initialize, and the numbers of their groups.

        Raises:
            ParameterError: what was there is no more, or in another group.
        """
        listed = [{id(p): p for p in options["params"]} for options in self.updater.optimizer.param_groups]
        for group in self.updater.groups:
            number = group.spec.optimizer_group
            if number is None or number >= len(listed) or listed[number].pop(id(group.master), None) is None:
                raise ParameterError(
                    f"{group.spec.names[0]}: it was taken out of optimizer.param_groups[{number}], by which it is "
                    "trained",
                    "requires_grad_(False) ends the training of a parameter; change options of a group in their place",
                )
        return {key: (p, number) for number, members in enumerate(listed) for key, p in members.items()}

    def _hear_of_newcomers(self) -> None:
        names = {id(p): name for name, p in self.zero.model.named_parameters()}
        for key, (parameter, number) in self._newcomers().items():
            found = self.zero.where.get(key)
            if key not in names:
                raise ParameterError(
                    f"optimizer group {number}: a parameter of shape {tuple(parameter.shape)} is not in the model",
                    "add its module to the model first",
                )
            if found is not None and found[0].trains:
                raise ParameterError(f"{names[key]}: it was added to the optimizer, which has it already")
            self.zero.optimizer_groups[key] = number
            self._waiting.append(parameter)
            self._left_out.pop(key, None)

    def _fresh(self) -> dict[str, nn.Parameter]:
        """By name: what has to be trained from now on."""
        fresh = {}
        for name, parameter in self.zero.model.named_parameters():
            found = self.zero.where.get(id(parameter))
            if not parameter.requires_grad or (found is not None and found[0].trains) or not parameter.numel():
                continue
            if id(parameter) in self.zero.optimizer_groups:
                fresh[name] = parameter
            elif id(parameter) not in self._left_out:
                raise ParameterError(
                    f"{name}: it became trainable, or came into the model, after initialize, and no optimizer has it: "
                    "it would never be trained",
                    "engine.optimizer.add_param_group({'params': [parameter]}) trains it; freeze it if that is not "
                    "wanted; load_state_dict without assign=True, and copy_() instead of a new Parameter, keep the old",
                )
        return fresh

    # ---- less is trained

    def mark(self) -> float:
        """A number that is the same on every rank if they have frozen the same parameters; 0: none."""
        frozen = [index for index, p in enumerate(self._trained()) if not p.requires_grad]
        return float(hash(tuple(frozen)) % (1 << 52)) if frozen else 0.0

    def options_mark(self) -> float:
        """A number that is the same on every rank if the optimizer groups have the same options."""
        groups = self.updater.optimizer.param_groups
        options = tuple(_number(group.get(name)) for group in groups for name in _COMPARED)
        return float(hash(options) % (1 << 52))

    def _trained(self) -> list[nn.Parameter]:
        return [p for grads in self.zero.reducer.order for p in grads.group.spec.parameters]

    def retire(self) -> None:
        """After the vote: leave what is frozen, and got no gradient, out of the update and of those to come."""
        frozen = [p for p in self._trained() if not p.requires_grad]
        if not frozen:
            return
        zero, arrived = self.zero, {id(p) for p in self.zero.reducer.arrival}
        seen = torch.zeros(round_up(len(frozen), zero.collectives.world.size), dtype=torch.float64)
        seen[: len(frozen)] = torch.tensor([float(id(p) in arrived) for p in frozen])
        seen = seen.to(zero.collectives.world.device)
        zero.collectives.reduce(seen, Layout.REPLICATED, seen, False, self._ticket).wait()
        idle = {id(p) for p, count in zip(frozen, seen.tolist(), strict=False) if not count}
        if idle:
            self._relay(lambda group, p: group.trains and id(p) not in idle, {})

    # ---- groups laid out anew

    def _relay(self, trained: Callable[[FlatGroup, nn.Parameter], bool], fresh: dict[str, nn.Parameter]) -> None:
        zero = self.zero
        facts = [(name, str(tuple(parameter.shape))) for name, parameter in fresh.items()]
        require_agreement(zero.collectives, self._ticket, "a change of what is trained", facts)
        groups: list[FlatGroup] = []
        parts = {grads.group: [Part(grads, None)] for grads in zero.reducer.order}
        for group in zero.groups:
            groups += self._reformed(group, trained, parts)
        held = {id(p) for group in groups for p in group.spec.parameters}
        new = {name: p for name, p in zero.to_manage().items() if id(p) not in held}
        groups += zero.build(zero.specs(new))
        order = [part.grads for grads in zero.reducer.order for part in parts[grads.group] if part.grads.group.trains]
        ordered = {grads.group for grads in order}
        order += [GroupGrads(group) for group in groups if group.trains and group not in ordered]
        zero.relay(groups, order)
        for part in chain.from_iterable(parts.values()):
            if part.state is not None:
                self.updater.write_state(part.grads.group, part.state)

    def _reformed(
        self,
        group: FlatGroup,
        trained: Callable[[FlatGroup, nn.Parameter], bool],
        parts: dict[FlatGroup, list[Part]],
    ) -> list[FlatGroup]:
        """The group itself, or what takes its place where only a part of it is trained from now on."""
        wanted = [trained(group, p) for p in group.spec.parameters]
        if group.master is None and not any(wanted):
            return [group]
        if group.master is not None and len(set(wanted)) == 1:
            group.frozen = not wanted[0]
            return [group]
        members: dict[tuple[bool, int | None], dict[str, nn.Parameter]] = {}
        for name, parameter, trains in zip(group.spec.names, group.spec.parameters, wanted, strict=True):
            number = group.spec.optimizer_group
            if number is None and trains:
                number = self.zero.optimizer_groups[id(parameter)]
            members.setdefault((trains, number), {})[name] = parameter
        specs = [
            GroupSpec(f"{group.spec.label}, part {i}", tuple(part), tuple(part.values()), number, group.spec.keep_full)
            for i, ((_, number), part) in enumerate(members.items())
        ]
        before = parts.pop(group, [Part(GroupGrads(group), None)])[0]
        parts[group] = split(before.grads, specs, self.zero.build, self.updater)
        for part, (trains, _) in zip(parts[group], members, strict=True):
            part.grads.group.frozen = not trains and part.grads.group.master is not None
        return [part.grads.group for part in parts[group]]


def _number(value: Any) -> Any:
    """An option as numbers whose hash is the same in every process; what is no number, or on a device, as 0."""
    if isinstance(value, tuple):
        return tuple(map(_number, value))
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
        value = value.item()
    return value if isinstance(value, (int, float)) and value == value else 0.0
