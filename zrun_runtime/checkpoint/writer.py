"""Writes one safetensors file as a stream: checksummed while it is written, past the page cache where that can be.

[Note: two buffers]
Tensors are copied into one of two 8 MiB buffers; when it is full, a thread writes it while the other one is filled and
its checksum is taken. So the extra memory is 16 MiB however large the state, tensors may lie on a GPU, and the checksum
costs no time beside the disk. Whole pages go out with O_DIRECT: measured, a third faster than through the page cache
with the fsync that a checkpoint needs anyway, and the cache stays the data loader's. zlib's crc32 (2 to 4 GB/s, it
releases the GIL) finds corruption, which is what it is for; it is no signature.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import threading
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from zrun_runtime.checkpoint.files import told
from zrun_runtime.checkpoint.manifest import NAMES, PAGE, Role, StoredFile

BUFFER_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Entry:
    """What a header says of one tensor: its place follows from the order."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def header(entries: Mapping[str, Entry], metadata: Mapping[str, str], pad: bool = True) -> bytes:
    """The beginning of a safetensors file with these tensors, one after the other.

    pad: up to whole pages, so that data begins on one.
    """
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, entry in entries.items():
        start, end = end, end + entry.nbytes
        table[name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    multiple = PAGE if pad else 8
    text += b" " * (-(8 + len(text)) % multiple)
    return len(text).to_bytes(8, "little") + text


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, in place."""
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


class BufferPair:
    """See [Note: two buffers]. May be used for one file after the other."""

    def __init__(self, size: int = BUFFER_BYTES) -> None:
        maps = [mmap.mmap(-1, size) for _ in range(2)]  # on page boundaries, as O_DIRECT wants
        self.views = [memoryview(one) for one in maps]
        self.tensors = [torch.frombuffer(one, dtype=torch.uint8) for one in maps]
        self.size = size


class DiskThread:
    """A thread that does one thing after the other.

    (An executor takes nothing more once the program has come to its end, and the last checkpoint may be written then.)
    """

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="zrun-checkpoint-disk", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Have it done after what was asked for before; the result tells of its end, or raises what it raised."""
        done: Future[None] = Future()
        self._waiting.put((done, work))
        return done

    def close(self) -> None:
        """Once all is done."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            done, work = item
            try:
                work()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)


class StreamWriter:
    """One file. `feed` it, `close` it; whatever fails, `abandon` it.

    Attributes:
        size, crc32: bytes so far, and their checksum.
    """

    def __init__(self, path: Path, buffers: BufferPair, disk: DiskThread, needed: int = 0) -> None:
        self.path, self.needed = path, needed
        self.size = self.crc32 = 0
        self._buffers, self._disk = buffers, disk
        self._filling = self._filled = 0
        self._under_way: Future[None] | None = None
        with told(path, "the file cannot be made", needed):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        self._direct = _set_direct(self._descriptor, True)

    def feed(self, tensor: Tensor) -> None:
        """Append the bytes of a tensor, in C order.

        Raises:
            CheckpointError: the file cannot be written.
        """
        flat = tensor.detach()
        flat = flat.reshape(-1) if flat.is_contiguous() else flat.contiguous().reshape(-1)
        self._append(flat.view(torch.uint8))

    def feed_bytes(self, data: bytes) -> None:
        """Append bytes."""
        self._append(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _append(self, data: Tensor) -> None:
        done, total = 0, data.numel()
        while done < total:
            count = min(total - done, self._buffers.size - self._filled)
            place = self._buffers.tensors[self._filling][self._filled : self._filled + count]
            place.copy_(data[done : done + count])
            done += count
            self._filled += count
            if self._filled == self._buffers.size:
                self._send()

    def _send(self) -> None:
        """Have the filled buffer written, and go on with the other."""
        filled = self._buffers.views[self._filling][: self._filled]
        offset = self.size
        self._await()
        self._under_way = self._disk.submit(partial(self._write, filled, offset))
        self.crc32 = zlib.crc32(filled, self.crc32)
        self.size += len(filled)
        self._filling, self._filled = 1 - self._filling, 0

    def _await(self) -> None:
        pending, self._under_way = self._under_way, None
        if pending is not None:
            with told(self.path, "writing failed", self.needed):
                pending.result()

    def _write(self, data: memoryview, offset: int) -> None:
        while data:
            if self._direct and len(data) % PAGE:  # the end of the file
                self._direct = _set_direct(self._descriptor, False)
            try:
                count = os.pwrite(self._descriptor, data, offset)
            except OSError as error:
                if not self._direct or error.errno != errno.EINVAL:
                    raise
                self._direct = _set_direct(self._descriptor, False)  # another page size, or no such thing here
                continue
            data, offset = data[count:], offset + count

    def close(self) -> None:
        """Write the rest, and make it durable.

        Raises:
            CheckpointError: the file cannot be written.
        """
        self._send()
        self._await()
        with told(self.path, "the file cannot be made durable", self.needed):
            os.fsync(self._descriptor)
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def abandon(self) -> None:
        """Stop; the file is left as it is."""
        with contextlib.suppress(Exception):
            self._await()
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1


def _set_direct(descriptor: int, wanted: bool) -> bool:
    """Whether writes go past the page cache from now on."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return wanted


class FileSet:
    """One rank's files of one checkpoint, written side by side."""

    def __init__(
        self, directory: Path, plan: Mapping[Role, Mapping[str, Entry]], rank: int, size: int, suffix: str
    ) -> None:
        self._rank = rank
        self._starts: dict[Role, int] = {}
        self._writers: dict[Role, StreamWriter] = {}
        heads = {role: header(entries, {"format": "pt"}) for role, entries in plan.items()}
        needed = {role: len(heads[role]) + sum(e.nbytes for e in entries.values()) for role, entries in plan.items()}
        with told(directory, "there is no room", sum(needed.values())):
            disk = os.statvfs(directory)
            if disk.f_bavail * disk.f_frsize < sum(needed.values()):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._disk = DiskThread()
        try:
            for role, head in heads.items():
                path = directory / f"{role}-{rank:05d}-of-{size:05d}{suffix}.safetensors"
                self._writers[role] = StreamWriter(path, BufferPair(), self._disk, needed[role])
                self._writers[role].feed_bytes(head)
                self._starts[role] = len(head)
        except BaseException:
            self.abandon()
            raise

    def feed(self, role: Role, tensor: Tensor) -> None:
        """Append a tensor to the file of this role, in the order of the plan."""
        self._writers[role].feed(tensor)

    def close(self) -> list[StoredFile]:
        """Make all durable. Returns what a manifest says of them."""
        found = []
        for role, writer in self._writers.items():
            writer.close()
            found.append(
                StoredFile(
                    name=writer.path.name,
                    role=role,
                    rank=self._rank,
                    size=writer.size,
                    crc32=writer.crc32,
                    data_start=self._starts[role],
                )
            )
        self._disk.close()
        return found

    def abandon(self) -> None:
        """Stop; what is written is left as it is."""
        for writer in self._writers.values():
            writer.abandon()
        self._disk.close()
