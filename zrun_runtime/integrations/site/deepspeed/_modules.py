"""How the names become modules: `deepspeed.a.b` for each row of the tables in `_names`, filled as it is used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from ._names import ABSENT, EVERYTHING, HERE, REASONS

ROOT = "deepspeed"


class NotProvidedError(NotImplementedError, AttributeError):
    """A name of DeepSpeed that zrun does not have was used. The text says which, and why."""

    zrun_exit_code = 1  # as errors of zrun_runtime have it, which shows them short where they end a script


class _Absent(type):
    """The class of stand-ins: they can be imported and asked about (isinstance), not used."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        importlib.import_module("zrun_runtime")
        raise _not_provided(f"{cls.__module__}.{cls.__name__}", cls.__doc__ or "")

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _not_provided(f"{cls.__module__}.{cls.__name__}.{name}", cls.__doc__ or "")


def _not_provided(name: str, reason: str) -> NotProvidedError:
    return NotProvidedError(f"{name} is not in zrun's deepspeed: {reason}")


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of the tables, and makes them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        known = fullname.startswith(f"{ROOT}.") and (_is_listed(_key(fullname)) or _absent(_key(fullname)))
        return ModuleSpec(fullname, self, is_package=True) if known else None

    def exec_module(self, module: ModuleType) -> None:
        take_over(module.__name__)


_FINDER = _Finder()


def take_over(name: str) -> None:
    """Let the tables answer for the attributes of a module that is being imported."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
    module = sys.modules[name]
    listed = [n for n in (*HERE.get(_key(name), {}), *ABSENT.get(_key(name), {})) if n != EVERYTHING]

    def lookup(attribute: str) -> Any:
        if attribute.startswith("__") and attribute not in listed:
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        value = _resolve(name, attribute)
        setattr(module, attribute, value)
        return value

    module.__dict__.update(__getattr__=lookup, __dir__=lambda: sorted({*module.__dict__, *listed}))


def _resolve(module: str, name: str) -> Any:
    """What `module.name` is.

    Raises:
        AttributeError: nobody knows.
    """
    here, absent = HERE.get(_key(module), {}), _absent(_key(module))
    if name in here:
        place, _, attribute = here[name].partition(":")
        found = importlib.import_module(place)
        return getattr(found, attribute) if attribute else found
    if name in absent:
        return _Absent(name, (), {"__module__": module, "__doc__": REASONS[absent[name]]})
    if _is_listed(_key(f"{module}.{name}")):
        return importlib.import_module(f"{module}.{name}")
    if EVERYTHING in here:
        return getattr(importlib.import_module(here[EVERYTHING]), name)
    if EVERYTHING in absent and not name.startswith("_"):
        return _Absent(name, (), {"__module__": module, "__doc__": REASONS[absent[EVERYTHING]]})
    raise AttributeError(f"zrun's deepspeed does not know {module}.{name}")


def _key(module: str) -> str:
    """The row of a module: its name without the first part."""
    return module.partition(".")[2]


def _is_listed(key: str) -> bool:
    return any(row == key or row.startswith(f"{key}.") for row in (*HERE, *ABSENT))


def _absent(key: str) -> Mapping[str, str]:
    """The row of ABSENT for a module: its own, or that of the package which is not there as a whole."""
    package = key
    while package and package not in HERE:
        row = ABSENT.get(package, {})
        if (package == key and row) or EVERYTHING in row:
            return row
        package = package.rpartition(".")[0]
    return ABSENT.get(key, {})
