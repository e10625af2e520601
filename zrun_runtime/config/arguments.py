"""Checking the arguments of optimizers and schedules: one small checker for each kind of value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zrun_runtime.config.keys import as_number, as_whole
from zrun_runtime.config.names import nearest
from zrun_runtime.config.notes import Ledger, shown

Check = Callable[[Any], Any]


@dataclass(frozen=True)
class Argument:
    """One argument: how it is read, and what it is without being given (UNSET: the class decides)."""

    check: Check
    default: Any = None
    has_default: bool = False
    required: bool = False


def argument(check: Check, default: Any) -> Argument:
    """An argument with a default that is filled in."""
    return Argument(check, default, has_default=True)


def number(low: float = 0.0, high: float = math.inf) -> Check:
    """A finite number within low..high."""

    def check(value: Any) -> float:
        found = float(as_number(value))
        if not math.isfinite(found) or not low <= found <= high:
            raise ValueError(f"must be a number {_range(low, high)}")
        return found

    return check


def whole(low: int = 0) -> Check:
    """A whole number of at least low."""

    def check(value: Any) -> int:
        found = as_whole(value)
        if found < low:
            raise ValueError(f"must be a whole number of at least {low}")
        return found

    return check


def pair(low: float = 0.0, high: float = 1.0) -> Check:
    """Two numbers within low..high, high left out."""

    def check(value: Any) -> tuple[float, ...]:
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            raise ValueError("must be a list of two numbers")
        found = tuple(float(as_number(item)) for item in value)
        if not all(low <= item < high for item in found):
            raise ValueError(f"must be two numbers of at least {low:g} and below {high:g}")
        return found

    return check


def flag(value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def one_of(*choices: str) -> Check:
    """One of these words, in any case."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value.lower() not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return value.lower()

    return check


def per_group(check: Check) -> Check:
    """One value, or a list with one for each parameter group."""

    def check_all(value: Any) -> Any:
        return [check(item) for item in value] if isinstance(value, list) else check(value)

    return check_all


def many(check: Check) -> Check:
    """A list."""

    def check_all(value: Any) -> Any:
        if not isinstance(value, list):
            raise ValueError("must be a list")
        return [check(item) for item in value]

    return check_all


def optional(check: Check) -> Check:
    """null, or what `check` takes."""
    return lambda value: None if value is None else check(value)


def _range(low: float, high: float) -> str:
    if high == math.inf:
        return f"of at least {low:g}"
    return f"from {low:g} to {high:g}"


def read_arguments(
    owner: str, given: Mapping[str, Any], known: Mapping[str, Argument], path: str, ledger: Ledger
) -> dict[str, Any]:
    """The checked arguments with defaults filled in; each fault becomes a problem under path."""
    result = {name: item.default for name, item in known.items() if item.has_default}
    for name, value in given.items():
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near}?" if near else f"{owner} takes {', '.join(known)}"
            ledger.problem(f"{path}.{name}", f"{owner} has no such argument; {hint}")
            continue
        try:
            result[name] = known[name].check(value)
        except ValueError as error:
            ledger.problem(f"{path}.{name}", f"{error}, not {shown(value)}")
    return result
