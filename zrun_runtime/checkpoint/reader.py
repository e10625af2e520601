"""Reads ranges of a checkpoint's files: straight into place where dtypes agree, through a small buffer where not."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from zrun_runtime.checkpoint.errors import CheckpointError
from zrun_runtime.checkpoint.files import open_directory, open_file
from zrun_runtime.checkpoint.layout import Index, Run, coalesce
from zrun_runtime.checkpoint.manifest import DTYPES, Manifest, StoredFile, StoredTensor
from zrun_runtime.checkpoint.writer import bytes_of

_BUFFER_BYTES = 8 * 2**20
_MOST_OPEN = 128  # descriptors


class CheckpointReader:
    """The files of one checkpoint, opened when they are needed.

    Args:
        where: the directory of the checkpoint. nodes: the disks whose files are here (None: all).
        patience: seconds to wait for files that other hosts wrote (NFS).
    """

    def __init__(
        self, where: Path, manifest: Manifest, nodes: frozenset[int] | None = None, patience: float = 0.0
    ) -> None:
        self.where, self.manifest = where, manifest
        self.index = Index(manifest, nodes)
        self._patience = patience
        self._directory = open_directory(where.parent, where.name)
        self._open: dict[str, int] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for descriptor in (*self._open.values(), self._directory):
            os.close(descriptor)
        self._open.clear()

    def descriptor(self, file: StoredFile) -> int:
        """An open descriptor of a file, whose size is right.

        Raises:
            CheckpointError: it is missing, is no regular file, or has another size.
        """
        found = self._open.get(file.name)
        if found is not None:
            return found
        if len(self._open) >= _MOST_OPEN:
            os.close(self._open.pop(next(iter(self._open))))
        found = open_file(self._directory, file.name, self.where, self._patience)
        size = os.fstat(found).st_size
        if size != file.size:
            os.close(found)
            raise CheckpointError(
                f"{self.where / file.name}: {size} bytes instead of {file.size}", "the checkpoint is damaged"
            )
        self._open[file.name] = found
        return found

    def verify(self, file: StoredFile) -> None:
        """Read a whole file and compare its checksum.

        Raises:
            CheckpointError: as `descriptor`; or a byte is not what was written.
        """
        descriptor, view = self.descriptor(file), bytes_of(self._scratch())
        crc = done = 0
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        os.posix_fadvise(descriptor, 0, 2 * len(view), os.POSIX_FADV_WILLNEED)
        while done < file.size:
            count = self._read(descriptor, view[: min(len(view), file.size - done)], done, file)
            done += count
            # The disk goes on while the checksum is taken.
            os.posix_fadvise(descriptor, done, 2 * len(view), os.POSIX_FADV_WILLNEED)
            crc = zlib.crc32(view[:count], crc)
        if crc != file.crc32:
            raise CheckpointError(
                f"{self.where / file.name}: its checksum is {crc:08x} instead of {file.crc32:08x}",
                "the checkpoint is damaged",
            )

    def fill(self, target: Tensor, runs: Iterable[Run]) -> None:
        """Read runs into a flat tensor, cast to its dtype. target: (n,), contiguous, on any device.

        Raises:
            CheckpointError: a file is missing, short, or cannot be read.
        """
        for run in coalesce(runs):
            dtype = DTYPES[run.dtype]
            place = target[run.target : run.target + run.numel]
            if dtype is target.dtype and target.device.type == "cpu":
                self._fill_exactly(bytes_of(place), run)
                continue
            most = _BUFFER_BYTES // dtype.itemsize
            for first in range(0, run.numel, most):
                part = place[first : first + most]
                staged = self._scratch()[: part.numel() * dtype.itemsize]
                self._fill_exactly(bytes_of(staged), run, first * dtype.itemsize)
                part.copy_(staged.view(dtype))

    def tensor(self, stored: StoredTensor) -> Tensor:
        """A tensor of its own, on the CPU."""
        flat = torch.empty(stored.nbytes // DTYPES[stored.dtype].itemsize, dtype=DTYPES[stored.dtype])
        self.fill(flat, [self.index.single_run(stored)])
        return flat.view(stored.shape)

    def _scratch(self) -> Tensor:
        if not self._buffer.numel():
            self._buffer = torch.empty(_BUFFER_BYTES, dtype=torch.uint8)
        return self._buffer

    def _fill_exactly(self, view: memoryview, run: Run, offset: int = 0) -> None:
        descriptor, start = self.descriptor(run.file), run.start + offset
        while view:
            count = self._read(descriptor, view, start, run.file)
            view, start = view[count:], start + count

    def _read(self, descriptor: int, view: memoryview, offset: int, file: StoredFile) -> int:
        try:
            count = os.preadv(descriptor, [view], offset)
        except OSError as error:
            raise CheckpointError(f"{self.where / file.name}: cannot be read: {error.strerror}") from error
        if count <= 0:
            raise CheckpointError(f"{self.where / file.name}: ends at byte {offset}", "the checkpoint is damaged")
        return count


def needed_files(index: Index, roles: Sequence[str]) -> list[StoredFile]:
    """The files of these roles that were written to the disks we read."""
    return [file for file in index.manifest.files if file.role in roles and index.reachable(file)]
