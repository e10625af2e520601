"""Plain data to JSON and back, tensors aside: what a checkpoint may hold beside weights, and nothing that runs code.

[Note: what can be stored]
None, bool, int, float, complex, str, bytes; list, tuple, dict, OrderedDict, set, frozenset, deque; dense torch tensors
(on any device; they come back on the CPU), sizes, dtypes and devices; numpy arrays and scalars; paths; namespaces of
argparse and types. Subclasses of these come back as the plain type (an AttributeDict as a dict, a named tuple as a
tuple, an IntEnum as an int). Anything else is an error that names where it is. In JSON an object with the key "$" is
one that JSON does not know.
"""

from __future__ import annotations

import argparse
import math
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zrun_runtime.checkpoint.errors import CheckpointError

_MARK = "$"
_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_NAMESPACES: dict[str, type] = {"argparse": argparse.Namespace, "types": types.SimpleNamespace}


def encode(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """The JSON of a value; the tensors in it are put into `tensors` by where they are.

    Raises:
        CheckpointError: it is, or holds, something that cannot be stored (see the note above).
    """
    return _Encoder(tensors).encode(value, where, ())


class _Encoder:
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def encode(self, value: Any, where: str, above: tuple[int, ...]) -> Any:
        if id(value) in above:
            raise CheckpointError(f"{where}: it contains itself", "store a copy without the cycle")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {_MARK: "float", "v": repr(float(value))}
        if isinstance(value, str):
            text = str.__str__(value)
            return text if _is_unicode(text) else {_MARK: "text", "v": text.encode("utf-8", "surrogatepass").hex()}
        return self._container(value, where, (*above, id(value)))

    def _container(self, value: Any, where: str, above: tuple[int, ...]) -> Any:
        if isinstance(value, dict):
            return self._dict(value, where, above)
        if isinstance(value, torch.Size):
            return {_MARK: "size", "v": list(value)}
        if isinstance(value, list):
            return self._items(value, where, above)
        for kind, plain in _SEQUENCES.items():
            if isinstance(value, plain) and isinstance(value, Iterable):
                ordered = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else list(value)
                return {_MARK: kind, "v": self._items(ordered, where, above)}
        for kind, plain in _NAMESPACES.items():
            if isinstance(value, plain):
                return {_MARK: "namespace", "kind": kind, "v": self._dict(vars(value), where, above)}
        return self._leaf(value, where)

    def _items(self, values: Iterable[Any], where: str, above: tuple[int, ...]) -> list[Any]:
        return [self.encode(item, f"{where}[{index}]", above) for index, item in enumerate(values)]

    def _dict(self, value: dict[Any, Any], where: str, above: tuple[int, ...]) -> Any:
        plain = all(isinstance(key, str) and _is_unicode(key) for key in value) and _MARK not in value
        if plain and type(value) is not OrderedDict:
            return {str.__str__(k): self.encode(v, f"{where}[{k!r}]", above) for k, v in value.items()}
        pairs = [
            [self.encode(k, f"a key of {where}", above), self.encode(v, f"{where}[{k!r}]", above)]
            for k, v in value.items()
        ]
        return {_MARK: "ordered" if type(value) is OrderedDict else "dict", "v": pairs}

    def _leaf(self, value: Any, where: str) -> Any:
        if isinstance(value, Tensor) and _is_number(value):
            return {_MARK: "scalar", "dtype": str(value.dtype).removeprefix("torch."), "v": _number(value.item())}
        if isinstance(value, Tensor):
            return {_MARK: "tensor", "name": self._keep(value, where), "grad": value.requires_grad}
        if isinstance(value, (bytes, bytearray)):
            flat = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
            return {_MARK: "bytes", "name": self._keep(flat, where)}
        if isinstance(value, (np.ndarray, np.generic)):
            return self._numpy(value, where)
        if isinstance(value, torch.dtype):
            return {_MARK: "dtype", "v": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {_MARK: "device", "v": str(value)}
        if isinstance(value, PurePath):
            return {_MARK: "path", "v": self.encode(str(value), where, ())}
        if isinstance(value, complex):
            return {_MARK: "complex", "v": [repr(value.real), repr(value.imag)]}
        raise CheckpointError(
            f"{where}: a {type(value).__module__}.{type(value).__qualname__} cannot be stored in a checkpoint",
            "store plain data: numbers, strings, lists, dicts, tensors, arrays (its state_dict(), for example)",
        )

    def _numpy(self, value: Any, where: str) -> Any:
        try:
            flat = torch.from_numpy(np.array(value, order="C"))
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"{where}: a numpy array of {value.dtype} cannot be stored", "store numbers, or lists of strings"
            ) from error
        return {_MARK: "numpy", "name": self._keep(flat, where), "scalar": isinstance(value, np.generic)}

    def _keep(self, tensor: Tensor, where: str) -> str:
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if not plain or tensor.is_meta or tensor.is_quantized:
            kind = f"{type(tensor).__name__} of layout {tensor.layout} on {tensor.device}"
            raise CheckpointError(f"{where}: a {kind} cannot be stored in a checkpoint", "store a dense plain tensor")
        self.tensors[where] = tensor.detach()
        return where


def _is_unicode(text: str) -> bool:
    """JSON can hold it: names of files that are not in the system's encoding have parts that it cannot."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _is_number(tensor: Tensor) -> bool:
    """It has one number and no shape: the counters of optimizers."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta and not tensor.requires_grad
    return plain and tensor.dim() == 0 and not tensor.is_complex() and tensor.layout is torch.strided


def _number(value: float | int | bool) -> Any:
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def decode(value: Any, fetch: Callable[[str], Tensor]) -> Any:
    """What `encode` was given. `fetch` gives a tensor by its name.

    Raises:
        CheckpointError: the JSON is none that `encode` makes.
    """
    if isinstance(value, list):
        return [decode(item, fetch) for item in value]
    if not isinstance(value, dict):
        return value
    if _MARK not in value:
        return {key: decode(item, fetch) for key, item in value.items()}
    try:
        return _decode_marked(value, fetch)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the checkpoint holds data of no known kind: {str(value)[:200]} ({error})") from error


def _decode_marked(value: dict[str, Any], fetch: Callable[[str], Tensor]) -> Any:
    kind = value[_MARK]
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(value["v"], fetch))
    if kind in ("dict", "ordered"):
        pairs = [(decode(k, fetch), decode(v, fetch)) for k, v in value["v"]]
        return OrderedDict(pairs) if kind == "ordered" else dict(pairs)
    if kind == "namespace":
        return _NAMESPACES[value["kind"]](**decode(value["v"], fetch))
    if kind == "scalar":
        number = float(value["v"]) if isinstance(value["v"], str) else value["v"]
        return torch.tensor(number, dtype=_dtype(value["dtype"]))
    if kind == "path":
        return Path(decode(value["v"], fetch))
    if kind == "tensor":
        return fetch(value["name"]).requires_grad_(bool(value["grad"]))
    if kind == "bytes":
        return fetch(value["name"]).numpy().tobytes()
    if kind == "numpy":
        array = fetch(value["name"]).numpy()
        return array[()] if value["scalar"] else array
    return _PLAIN[kind](value["v"])


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found


_PLAIN: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "text": lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    "size": torch.Size,
    "dtype": _dtype,
    "device": torch.device,
    "complex": lambda parts: complex(float(parts[0]), float(parts[1])),
}
