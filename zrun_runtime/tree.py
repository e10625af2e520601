"""Finding tensors in whatever a module takes or returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLAIN = (str, bytes, int, float, complex, bool, type(None))
_DEPTH = 6  # deeper than outputs nest, shallow enough never to walk into a model


def tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """Every tensor in nested lists, tuples, sets, mappings, dataclasses and plain objects."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, _PLAIN) or depth == 0:
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_in(item, depth - 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), depth - 1)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        for item in list(vars(value).values()):
            yield from tensors_in(item, depth - 1)


def plain_parts(value: Tensor) -> Iterator[Tensor]:
    """What has the values: the tensors within a tensor subclass that wraps some (a quantized weight), else itself."""
    if not is_traceable_wrapper_subclass(value):
        yield value
        return
    for name in value.__tensor_flatten__()[0]:
        yield from plain_parts(getattr(value, name))


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """The same nesting of tuples, lists and dicts with its floating-point tensors in `dtype`."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_floats(item, dtype) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(cast_floats(item, dtype) for item in value)
    if isinstance(value, dict):
        return {key: cast_floats(item, dtype) for key, item in value.items()}
    return value
