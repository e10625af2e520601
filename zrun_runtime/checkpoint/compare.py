"""Two checkpoints side by side, and one against its own checksums."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from zrun_runtime.checkpoint.errors import CheckpointError
from zrun_runtime.checkpoint.layout import WEIGHTS, Held
from zrun_runtime.checkpoint.manifest import DTYPES
from zrun_runtime.checkpoint.open import open_checkpoint
from zrun_runtime.checkpoint.reader import CheckpointReader

_PIECE = 2**20  # elements


@dataclass(frozen=True)
class Difference:
    """name: of a parameter, with the kind of optimizer state after a slash. text: in what two checkpoints differ."""

    name: str
    text: str


def verify(path: Path, tag: str) -> str:
    """ "" if every file of a checkpoint is there and every byte is what was written; else what is wrong."""
    try:
        with open_checkpoint(path, tag) as reader:
            for file in reader.manifest.files:
                reader.verify(file)
    except CheckpointError as error:
        return error.message
    return ""


def differences(first: CheckpointReader, second: CheckpointReader) -> Iterator[Difference]:
    """What differs in parameters, in what the optimizer has of them, and in counters. A piece is read at a time."""
    one, other = first.index.held, second.index.held
    for name in sorted(one.keys() | other.keys()):
        if name not in other or name not in one:
            yield Difference(name, f"only in {(first if name in one else second).where}")
        else:
            yield from _of_parameter(first, one[name], second, other[name])
    for key in sorted(first.manifest.state.keys() | second.manifest.state.keys()):
        a, b = first.manifest.state.get(key), second.manifest.state.get(key)
        if a != b and (not isinstance(a, (list, dict)) or not isinstance(b, (list, dict))):
            yield Difference(key, f"{a} and {b}")
        elif a != b:
            yield Difference(key, "differs")


def _of_parameter(first: CheckpointReader, one: Held, second: CheckpointReader, other: Held) -> Iterator[Difference]:
    if one.shape != other.shape:
        yield Difference(one.name, f"shapes {one.shape} and {other.shape}")
        return
    if one.dtype != other.dtype:
        yield Difference(one.name, f"stored as {one.dtype} and {other.dtype}")
    if one.strides != other.strides:
        yield Difference(one.name, "lies in another order of dimensions; its values were not compared")
        return
    for kind in (WEIGHTS, *sorted({*one.moments, *other.moments})):
        label = one.name if kind == WEIGHTS else f"{one.name}/{kind}"
        if kind != WEIGHTS and (kind not in one.moments or kind not in other.moments):
            yield Difference(label, f"only in {(first if kind in one.moments else second).where}")
            continue
        count, most = _distance(first, one, second, other, kind)
        if count:
            yield Difference(label, f"{count:,} of {math.prod(one.shape):,} values differ, by up to {most:.3g}")


def _distance(
    first: CheckpointReader, one: Held, second: CheckpointReader, other: Held, kind: str
) -> tuple[int, float]:
    """(how many values differ, by how much at most); two NaN are alike."""
    count, most, numel = 0, 0.0, math.prod(one.shape)
    exact = DTYPES[one.dtype] if one.single is not None and not DTYPES[one.dtype].is_floating_point else torch.float64
    for start in range(0, numel, _PIECE):
        stop = min(start + _PIECE, numel)
        a, b = torch.empty(stop - start, dtype=exact), torch.empty(stop - start, dtype=exact)
        first.fill(a, first.index.runs(one, kind, start, stop, 0))
        second.fill(b, second.index.runs(other, kind, start, stop, 0))
        apart = ~((a == b) | ((a != a) & (b != b)))
        count += int(apart.sum())
        if bool(apart.any()):
            most = max(most, float((a.double() - b.double())[apart].abs().max()))
    return count, most
