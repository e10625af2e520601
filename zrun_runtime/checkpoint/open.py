"""A checkpoint as a mapping of names to tensors, read when they are asked for: no engine, no model, no GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from zrun_runtime.checkpoint.errors import CheckpointError
from zrun_runtime.checkpoint.files import LATEST, checked_tag, list_tags, read_latest, read_manifest
from zrun_runtime.checkpoint.layout import WEIGHTS, Held
from zrun_runtime.checkpoint.manifest import DTYPES, MANIFEST, Manifest, StoredTensor, parse
from zrun_runtime.checkpoint.reader import CheckpointReader


def locate(path: Path, tag: str | None = None) -> tuple[Path, str]:
    """(directory of checkpoints, tag) of what a person means: a directory with `latest`, or one checkpoint's own.

    Raises:
        CheckpointError: there is no checkpoint; it says what is there.
    """
    path = path.absolute()
    if tag is None and (path / MANIFEST).is_file() and not (path / LATEST).exists():
        return path.parent, checked_tag(path.name)
    found = checked_tag(tag) if tag is not None else read_latest(path)
    tags = list_tags(path)
    if found is None or not (path / found).is_dir():
        if not path.is_dir():
            raise CheckpointError(
                f"{path}: {'a file, not a directory' if path.exists() else 'there is no such directory'}"
            )
        missing = f"has no `{LATEST}` file" if found is None else f"has no checkpoint {found!r}"
        there = f"; its checkpoints: {', '.join(tags[:10])}" if tags else f", and no directory in it has a {MANIFEST}"
        raise CheckpointError(
            f"{path}: {missing}{there}", "give the directory that save_checkpoint was given, or --tag"
        )
    return path, found


def open_checkpoint(path: Path, tag: str | None = None) -> CheckpointReader:
    """A reader of the checkpoint that `locate` finds."""
    parent, found = locate(path, tag)
    manifest = parse(read_manifest(parent, found), str(parent / found / MANIFEST))
    return CheckpointReader(parent / found, manifest)


class StoredState(Mapping[str, Tensor]):
    """The model's state dict: every parameter by all its names, and rank 0's buffers. A tensor is read when asked for.

    Names of one tied parameter give equal tensors; `dict_of` gives them the same one.

    Args:
        dtype: floating-point parameters are cast to it; None: as they are stored.
    """

    def __init__(
        self, reader: CheckpointReader, dtype: torch.dtype | None = torch.float32, exclude_frozen: bool = False
    ) -> None:
        self.reader, self.dtype = reader, dtype
        held = {name: one for name, one in reader.index.held.items() if one.trained or not exclude_frozen}
        self.sources: dict[str, Held | StoredTensor] = dict(held)
        for alias, name in reader.manifest.aliases.items():
            if name in held:
                self.sources[alias] = held[name]
        for tensor in reader.manifest.tensors:
            if tensor.what == "buffer" and tensor.rank == 0:
                self.sources[tensor.name] = tensor
        self.sources = dict(sorted(self.sources.items(), key=lambda item: _natural(item[0])))

    def __len__(self) -> int:
        return len(self.sources)

    def __iter__(self) -> Iterator[str]:
        return iter(self.sources)

    def dtype_of(self, name: str) -> torch.dtype:
        """That a tensor is given in."""
        source = self.sources[name]
        stored = DTYPES[source.dtype]
        cast = isinstance(source, Held) and stored.is_floating_point and self.dtype is not None
        return self.dtype if cast and self.dtype is not None else stored

    def nbytes_of(self, name: str) -> int:
        """Of a tensor as it is given."""
        return torch.Size(self.sources[name].shape).numel() * self.dtype_of(name).itemsize

    def __getitem__(self, name: str) -> Tensor:
        return torch.cat(list(self.parts(name))).view(self.sources[name].shape)

    def parts(self, name: str, most: int = 2**21) -> Iterator[Tensor]:
        """A tensor in C order, as flat pieces of at most `most` elements."""
        source = self.sources[name]
        if not isinstance(source, Held):
            yield self.reader.tensor(source).reshape(-1)
            return
        numel, dtype = torch.Size(source.shape).numel(), self.dtype_of(name)
        if source.strides is not None:
            flat = torch.empty(numel, dtype=dtype)
            self.reader.fill(flat, self.reader.index.runs(source, WEIGHTS, 0, numel, 0))
            yield flat.as_strided(source.shape, source.strides).reshape(-1)
            return
        for first in range(0, max(numel, 1), most):
            last = min(first + most, numel)
            piece = torch.empty(last - first, dtype=dtype)
            self.reader.fill(piece, self.reader.index.runs(source, WEIGHTS, first, last, 0))
            yield piece

    def dict_of(self) -> dict[str, Tensor]:
        """All of it in memory; names of one tied parameter hold one tensor."""
        first: dict[int, Tensor] = {}
        found = {}
        for name, source in self.sources.items():
            if id(source) not in first:
                first[id(source)] = self[name]
            found[name] = first[id(source)]
        return found


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sorts block 10 after block 9."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def summary_of(manifest: Manifest) -> dict[str, object]:
    """What a checkpoint is, in a few words and numbers."""
    parameters = [p for group in manifest.groups for p in group.parameters]
    trained = sum(p.numel for g in manifest.groups if "master" in g.kinds for p in g.parameters)
    alone = {t.name: t for t in manifest.tensors if t.what == "parameter"}
    total = sum(p.numel for p in parameters) + sum(torch.Size(t.shape).numel() for t in alone.values())
    state = manifest.state
    return {
        "tag": manifest.tag,
        "written": f"{manifest.written_at} by {manifest.written_by}",
        "ranks": manifest.world_size,
        "parameters": total,
        "trained": trained,
        "bytes": sum(file.size for file in manifest.files),
        "steps": state.get("global_steps"),
        "samples": state.get("global_samples"),
        "optimizer": state.get("optimizer"),
        "scheduler": state.get("scheduler"),
        "precision": state.get("precision"),
    }
