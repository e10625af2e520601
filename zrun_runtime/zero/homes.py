"""Who has a parameter's values: the engine that trains it, or the early shard that waits for one."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from zrun_runtime.collectives import Collectives
from zrun_runtime.consolidate import find
from zrun_runtime.early import early_shard
from zrun_runtime.engine import Engine
from zrun_runtime.flat_group import FlatGroup


class Holder(Protocol):
    """Unshards groups and keeps them so."""

    def pin(self, groups: Sequence[FlatGroup]) -> None: ...

    def unpin(self, groups: Sequence[FlatGroup]) -> None: ...


@dataclass(frozen=True)
class Place:
    """Where a parameter is: its group, its number in it, and the engine that trains it, if one does."""

    group: FlatGroup
    index: int
    holder: Holder
    collectives: Collectives
    engine: Engine | None


_engines: list[weakref.ref[Engine]] = []  # the newest first, as one may take over the parameters of an older one


def remember(engine: Engine) -> None:
    """Let the functions of this package find the engine of a parameter."""
    _engines[:] = [weakref.ref(engine), *(known for known in _engines if known() is not None)]


def engine_of(optimizer: object) -> Engine | None:
    """The engine that steps this optimizer, if one does."""
    engines = (known() for known in _engines)
    return next((e for e in engines if e is not None and e.optimizer is optimizer and optimizer is not None), None)


def place_of(parameter: Tensor) -> Place | None:
    """Where the values of a parameter are; None if it is nobody's, and simply has them."""
    if not isinstance(parameter, nn.Parameter):
        return None
    early = early_shard(parameter)
    if early is not None:
        return Place(early.group, 0, early, early.collectives, None)
    for known in _engines:
        engine = known()
        found = find(engine.zero, parameter) if engine is not None else None
        if engine is not None and found is not None:
            return Place(*found, engine.zero.holder, engine.zero.collectives, engine)
    return None
