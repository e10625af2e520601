"""Which engine has which parameter. Two that train the same one would each undo the other's steps, without a word."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from zrun_runtime.errors import ParameterError


class Home(Protocol):
    """What lays parameters out and trains them, until it is removed."""

    @property
    def removed(self) -> bool: ...


_homes = WeakIdKeyDictionary()  # parameter -> weak reference to its Home


def claim(parameters: Iterable[nn.Parameter], home: Home) -> None:
    """These are `home`'s from now on."""
    for parameter in parameters:
        _homes[parameter] = weakref.ref(home)


def home_of(parameter: nn.Parameter) -> Home | None:
    """Who has a parameter; None if nobody alive does."""
    known = _homes.get(parameter)
    home = known() if known is not None else None
    return home if home is not None and not home.removed else None


def refuse_to_train(name: str, parameter: nn.Parameter) -> None:
    """
    Raises:
        ParameterError: another engine has it.
    """
    if home_of(parameter) is not None:
        raise ParameterError(
            f"{name}: another engine has this parameter, and two cannot train it",
            "call destroy() on that engine first, or let one of them have it frozen (requires_grad_(False))",
        )


def refuse_to_cast(name: str, parameter: nn.Parameter, wanted: torch.dtype) -> None:
    """
    Raises:
        ParameterError: another engine has it, and in another dtype.
    """
    if parameter.dtype is not wanted and home_of(parameter) is not None:
        raise ParameterError(
            f"{name}: another engine has it as {parameter.dtype}, and this config wants {wanted}",
            "give both engines the same precision, or call destroy() on the other one first",
        )
