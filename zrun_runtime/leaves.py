"""Modules that are gathered as a whole, because ranks may use different parts of them (a mixture of experts)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from zrun_runtime.config import LeafModuleConfig
from zrun_runtime.errors import ParameterError

_MARK = "_z3_leaf"  # the field's own name for it: other libraries set and read it


def leaves_of(model: nn.Module, config: LeafModuleConfig) -> list[nn.Module]:
    """The modules that are marked as leaves, and those that the config names."""
    return [
        module
        for name, module in model.named_modules()
        if getattr(module, _MARK, False)
        or type(module).__name__ in config.classes
        or name in config.names
        or any(name.endswith(suffix) for suffix in config.name_suffixes)
    ]


def _matching(model: nn.Module, wanted: Sequence[type | str]) -> Iterator[nn.Module]:
    kinds = tuple(item for item in wanted if isinstance(item, type))
    texts = {item for item in wanted if isinstance(item, str)}
    for name, module in model.named_modules():
        kind = type(module)
        words = {name, kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}"}
        if isinstance(module, kinds) or texts & words:
            yield module


def _mark(
    model: nn.Module, wanted: Sequence[type | str], flag: bool, raise_if_not_found: bool, what: str
) -> list[nn.Module]:
    found = list(_matching(model, wanted))
    if not found and raise_if_not_found:
        names = ", ".join(item if isinstance(item, str) else item.__name__ for item in wanted)
        raise ParameterError(f"{what}: no module of the model is {names}", "give classes, their names, or paths")
    for module in found:
        setattr(module, _MARK, flag)
    return found


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Before `initialize`: gather these modules as a whole, so ranks may use different parts of them.

    Args:
        leaf_module_classes: classes, names of classes, or paths in the model.

    Returns:
        The modules that were found.

    Raises:
        ParameterError: none was found.
    """
    return _mark(model, leaf_module_classes, True, raise_if_not_found, "set_z3_leaf_modules")


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the mark away again; see set_z3_leaf_modules."""
    return _mark(model, leaf_module_classes, False, raise_if_not_found, "unset_z3_leaf_modules")


def set_z3_leaf_modules_by_name(model: nn.Module, leaf_names: Sequence[str]) -> list[nn.Module]:
    """The same for modules by their paths in the model.

    Raises:
        ParameterError: none was found.
    """
    return _found(leaf_names, [m for name, m in model.named_modules() if name in leaf_names])


def set_z3_leaf_modules_by_suffix(model: nn.Module, leaf_name_suffixes: Sequence[str]) -> list[nn.Module]:
    """The same for modules whose path in the model ends with one of these.

    Raises:
        ParameterError: none was found.
    """
    return _found(leaf_name_suffixes, [m for n, m in model.named_modules() if n.endswith(tuple(leaf_name_suffixes))])


def _found(wanted: Sequence[str], modules: list[nn.Module]) -> list[nn.Module]:
    if not modules:
        raise ParameterError(f"set_z3_leaf_modules: no module of the model is {', '.join(wanted)}", "give other paths")
    for module in modules:
        set_z3_leaf_module(module, True)
    return modules


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or take its mark away."""
    setattr(model, _MARK, flag)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that are marked."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether this module is marked."""
    return bool(getattr(model, _MARK, False))
