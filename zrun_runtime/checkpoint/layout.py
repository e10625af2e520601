"""Which bytes of which files hold a range of a parameter's state. Pure arithmetic over a manifest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from zrun_runtime.checkpoint.manifest import (
    DTYPES,
    MASTER,
    PARAM,
    Manifest,
    StoredFile,
    StoredGroup,
    StoredParameter,
    StoredTensor,
    role_of,
)

WEIGHTS = "weights"  # whichever kind of state they are stored as
_MOST_GAP = 64  # bytes between neighbours that are read over rather than around: the gaps of flat buffers


@dataclass(frozen=True)
class Run:
    """Elements that lie one after the other, in a file and in what they are read into."""

    file: StoredFile
    start: int  # byte in the file
    numel: int
    target: int  # element of the destination
    dtype: str  # by its safetensors name


@dataclass(frozen=True)
class Held:
    """Where a parameter is stored: as a range of a group, or as a tensor of its own."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    group: StoredGroup | None
    number: int  # of the group
    entry: StoredParameter | None = None
    single: StoredTensor | None = None

    @property
    def dtype(self) -> str:
        """Of the weights."""
        if self.group is not None:
            return self.group.kinds[self.group.weights]
        return self.single.dtype if self.single is not None else "F32"

    @property
    def trained(self) -> bool:
        return self.group is not None and MASTER in self.group.kinds

    @property
    def moments(self) -> tuple[str, ...]:
        """The kinds of optimizer state that there are of it."""
        return tuple(k for k in self.group.kinds if k not in (MASTER, PARAM)) if self.group is not None else ()


class Index:
    """The parameters of a checkpoint by all their names, and where their elements are.

    nodes: what can be read is what was written to these disks (numbers of `StoredFile.node`); None: everything.
    """

    def __init__(self, manifest: Manifest, nodes: frozenset[int] | None = None) -> None:
        self.manifest = manifest
        self._nodes = nodes

    @cached_property
    def held(self) -> dict[str, Held]:
        """Canonical name -> where it is."""
        found = {
            p.name: Held(p.name, p.shape, p.strides, group, number, entry=p)
            for number, group in enumerate(self.manifest.groups)
            for p in group.parameters
        }
        for tensor in self.manifest.tensors:
            if tensor.what == "parameter" and self.reachable(self.manifest.file_of["model", tensor.rank]):
                found.setdefault(tensor.name, Held(tensor.name, tensor.shape, None, None, -1, single=tensor))
        return found

    def find(self, name: str) -> Held | None:
        """The parameter of this name, or of which it is another name."""
        return self.held.get(self.manifest.aliases.get(name, name))

    def reachable(self, file: StoredFile) -> bool:
        """It was written to a disk that we read."""
        return self._nodes is None or file.node in self._nodes

    def runs(self, held: Held, kind: str, first: int, last: int, target: int) -> Iterator[Run]:
        """Where elements first..last-1 of a parameter's state of a kind are; the first goes to element `target`."""
        if held.group is None or held.entry is None:
            if held.single is not None and first < last:
                file, single = self.manifest.file_of["model", held.single.rank], held.single
                start = file.data_start + single.start + first * DTYPES[single.dtype].itemsize
                yield Run(file, start, last - first, target, single.dtype)
            return
        kind = held.group.weights if kind == WEIGHTS else kind
        dtype, role = held.group.kinds[kind], role_of(kind)
        each, itemsize = held.group.padded_numel // self.manifest.world_size, DTYPES[dtype].itemsize
        place, end = held.entry.offset + first, held.entry.offset + last
        while place < end:
            rank, within = divmod(place, each)
            count = min(end - place, each - within)
            file = self.manifest.file_of[role, rank]
            start = file.data_start + self.manifest.starts[held.number, kind] + within * itemsize
            yield Run(file, start, count, target, dtype)
            place, target = place + count, target + count

    def single_run(self, tensor: StoredTensor) -> Run:
        """Where a tensor of its own is, all of it."""
        file, dtype = self.manifest.file_of["model", tensor.rank], DTYPES[tensor.dtype]
        return Run(file, file.data_start + tensor.start, tensor.nbytes // dtype.itemsize, 0, tensor.dtype)


def coalesce(runs: Iterable[Run]) -> list[Run]:
    """The same elements in fewer runs: neighbours in the file that are neighbours in the destination become one.

    Small gaps that are alike on both sides are read over: they are the padding of flat buffers, zero in both.
    """
    merged: list[Run] = []
    for run in sorted(runs, key=lambda r: (r.file.name, r.start)):
        if merged:
            last, size = merged[-1], DTYPES[run.dtype].itemsize
            gap = run.start - (last.start + last.numel * size)
            same = last.file is run.file and last.dtype == run.dtype
            if same and 0 <= gap <= _MOST_GAP and run.target - (last.target + last.numel) == gap // size:
                merged[-1] = replace(last, numel=run.target + run.numel - last.target)
                continue
        merged.append(run)
    return merged
