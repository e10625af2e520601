"""Which parameters go together: the units of a model, and the flat groups made of them.

[Note: units]
Where parameters come and go, a unit is a module whose call brings them.
- A block (an item of a ModuleList, ModuleDict or Sequential; a module that reads its children's weights without calling
  them, such as MultiheadAttention) is one unit with everything below it, so its children may read each other's weights.
- An embedding outside the blocks, and any other module there that is larger than the largest block (a head), is a unit
  of its own, so that it is not held while the blocks run.
- What is left belongs to the model itself and is held for its whole forward: its own parameters however large, and
  those that no call brings (a parametrization's, a ModuleList's own). Ranks may use different parts of it: it is
  gathered at one place, whatever the forward does. Its modules are units too, for calls from outside that forward.
A parameter belongs to one group; a unit that shares another unit's parameter brings that group too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from zrun_runtime.errors import ParameterError
from zrun_runtime.flat_group import FlatGroup, GroupSpec
from zrun_runtime.layout import group_limit, small_enough_to_keep
from zrun_runtime.sharded_parameter import ShardedParameter

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_READS_CHILDREN = (nn.MultiheadAttention, nn.RNNBase)


@dataclass(eq=False)
class Unit:
    """See [Note: units]."""

    module: nn.Module
    label: str
    parameters: dict[str, nn.Parameter]  # by full name; those of other units that it shares included
    diverges: bool = False  # it is or has a leaf: ranks may use different parts of it, or none
    groups: list[FlatGroup] = field(default_factory=list)

    @cached_property
    def numel(self) -> int:
        return sum(p.numel() for p in self.parameters.values())


@dataclass(frozen=True)
class GroupingPolicy:
    """How large groups may be, in elements, as the config and the model's size allow."""

    bucket_numel: int
    keep_full_numel: int  # of one group that stays full
    keep_full_total: int  # of all that do


def manageable(named: Iterable[tuple[str, nn.Parameter]], imagined: bool = False) -> dict[str, nn.Parameter]:
    """The parameters that can live in flat groups; frozen ones that cannot are left alone.

    imagined: parameters need no values.

    Raises:
        ParameterError: a trainable parameter is of a kind that cannot be sharded.
    """
    found = {}
    for name, parameter in named:
        known = type(parameter) in (nn.Parameter, ShardedParameter)
        plain = known and parameter.is_floating_point() and parameter.layout is torch.strided
        if plain and (imagined or not parameter.is_meta) and parameter.numel():
            found[name] = parameter
        elif parameter.requires_grad and parameter.numel():
            kind = f"{type(parameter).__name__} of {parameter.dtype} on {parameter.device}"
            raise ParameterError(
                f"{name}: a trainable {kind} cannot be part of a flat group",
                "freeze it (requires_grad_(False)), or replace it by a plain floating-point nn.Parameter with values",
            )
    return found


def find_units(model: nn.Module, managed: dict[str, nn.Parameter], leaves: Sequence[nn.Module] = ()) -> list[Unit]:
    """The units of a model: the model itself, then the others in registration order. `leaves` are taken as blocks."""
    names = {id(p): n for n, p in managed.items()}
    total = sum(p.numel() for p in managed.values())
    blocks: list[Unit] = []
    loose: list[Unit] = []

    def add(units: list[Unit], module: nn.Module, label: str, parameters: Iterable[nn.Parameter]) -> None:
        mine = {names[id(p)]: p for p in parameters if id(p) in names}
        if mine:
            units.append(Unit(module, label or "the model", mine, any(part in leaves for part in module.modules())))

    def visit(module: nn.Module, label: str, in_container: bool) -> None:
        if module in leaves or isinstance(module, _READS_CHILDREN) or (in_container and _is_block(module, total)):
            add(blocks, module, label, module.parameters())
            return
        if not isinstance(module, _NEVER_CALLED):
            add(loose, module, label, _read_directly(module))
        for name, child in module.named_children():
            if not isinstance(child, (nn.ParameterList, nn.ParameterDict)):
                visit(child, f"{label}.{name}" if label else name, isinstance(module, _CONTAINERS))

    visit(model, "", False)
    largest = max((unit.numel for unit in blocks), default=total)
    brought = {name for unit in loose + blocks for name in unit.parameters}
    root = Unit(model, "the model", {name: p for name, p in managed.items() if name not in brought})
    for unit in loose:
        small = not isinstance(unit.module, nn.Embedding) and unit.numel <= largest
        if small or unit.module is model:
            root.parameters.update(unit.parameters)
    in_order = [u for u in loose if u.module is not model] + blocks
    return ([root] if root.parameters else []) + in_order


def _is_block(module: nn.Module, total: int) -> bool:
    """An item of a container is a block, unless it is a large part of the model and has containers of its own."""
    if isinstance(module, _CONTAINERS):
        return False
    mine = sum(p.numel() for p in module.parameters())
    nested = any(isinstance(m, _CONTAINERS) and len(list(m.children())) > 1 for m in module.modules())
    return not (nested and mine > total / 8)


def _read_directly(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters a module's own forward reads: its own, and those of lists of parameters, which no one calls."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if isinstance(child, (nn.ParameterList, nn.ParameterDict)):
            yield from child.parameters()


# ---- groups

_Key = tuple[torch.dtype, torch.device, bool, int | None, bool]


def _key(parameter: nn.Parameter, optimizer_groups: dict[int, int], apart: set[int]) -> _Key:
    """What the parameters of a group have in common."""
    group = optimizer_groups.get(id(parameter)) if parameter.requires_grad else None
    return parameter.dtype, parameter.device, parameter.requires_grad, group, id(parameter) in apart


def specs_of_units(units: Sequence[Unit], optimizer_groups: dict[int, int], policy: GroupingPolicy) -> list[GroupSpec]:
    """Groups for parameters that come and go: a unit's own, those that differ in kind apart."""
    claimed: set[int] = set()
    specs: list[GroupSpec] = []
    for unit in units:
        kinds: dict[_Key, dict[str, nn.Parameter]] = {}
        for name, parameter in unit.parameters.items():
            if id(parameter) not in claimed:
                claimed.add(id(parameter))
                kinds.setdefault(_key(parameter, optimizer_groups, set()), {})[name] = parameter
        for number, (key, members) in enumerate(kinds.items()):
            label = unit.label if len(kinds) == 1 else f"{unit.label}#{number}"
            specs.append(GroupSpec(label, tuple(members), tuple(members.values()), key[3]))
    return _keep_small_ones(specs, policy)


def _keep_small_ones(specs: list[GroupSpec], policy: GroupingPolicy) -> list[GroupSpec]:
    """Mark the smallest groups as always full, up to a small share of the model."""
    kept = small_enough_to_keep([_numel(s.parameters) for s in specs], policy.keep_full_numel, policy.keep_full_total)
    return [
        GroupSpec(s.label, s.names, s.parameters, s.optimizer_group, index in kept) for index, s in enumerate(specs)
    ]


def specs_in_order(
    named: Sequence[tuple[str, nn.Parameter]],  # trainable, in the order in which gradients arrive
    model: nn.Module,
    optimizer_groups: dict[int, int],
    policy: GroupingPolicy,
) -> list[GroupSpec]:
    """Groups for parameters that stay: as they arrive, up to a size, embeddings apart."""
    total = sum(p.numel() * p.element_size() for _, p in named)
    limit = group_limit(total)
    apart = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    closed: list[dict[str, nn.Parameter]] = []
    filling: dict[_Key, dict[str, nn.Parameter]] = {}
    keys: dict[int, _Key] = {}
    for name, parameter in named:
        key = _key(parameter, optimizer_groups, apart)
        most = min(limit // parameter.element_size(), policy.bucket_numel)
        members = filling.setdefault(key, {})
        if members and _numel(members.values()) + parameter.numel() > most:
            closed.append(filling.pop(key))
            members = filling.setdefault(key, {})
        members[name] = parameter
        keys[id(members)] = key
    closed.extend(filling.values())
    return [
        GroupSpec(_span(members), tuple(members), tuple(members.values()), keys[id(members)][3]) for members in closed
    ]


def _numel(parameters: Iterable[Tensor]) -> int:
    return sum(p.numel() for p in parameters)


def _span(members: dict[str, nn.Parameter]) -> str:
    first, last = next(iter(members)), next(reversed(members))
    return first if len(members) == 1 else f"{first} .. {last}"
