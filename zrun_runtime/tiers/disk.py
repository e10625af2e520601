"""Files of tensors on a local disk: direct, aligned, in few large requests.

[Note: large requests]
Measured: a request releases Python's lock and takes it again, which costs up to 5 ms beside a thread that computes in
Python. So requests have at least 8 MiB where there is that much, and one thread reaches the disk's bandwidth; a second
one is worth it only where the disk is faster than a thread can copy.

[Note: direct input and output]
Without O_DIRECT the page cache holds a second copy of all that was to leave the memory, and writes come back as stalls
later. It wants addresses, offsets and lengths that are multiples of the device's block; a page does for every device.
Whether a file system takes it is found out by trying.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zrun_runtime.errors import OffloadError
from zrun_runtime.layout import round_up
from zrun_runtime.telemetry import notice
from zrun_runtime.tiers.host import host_empty
from zrun_runtime.tiers.scratch import Scratch

PAGE = 4096
REQUEST_BYTES = 8 * 2**20
_RESUME = "training cannot go on without this state: start again, and load the last checkpoint"


@dataclass(frozen=True)
class DiskSettings:
    """Where and how.

    path: a directory on the disk. key: the config key that named it, for messages.
    threads: requests under way at a time. request_bytes: the smallest request that is worth a thread of its own.
    """

    path: str
    key: str
    threads: int = 1
    request_bytes: int = REQUEST_BYTES


class Disk:
    """Files in a directory of this process, and the threads that read and write them.

    Once a request has failed every other fails too: what the files have and what training has may differ from then on.
    """

    def __init__(self, settings: DiskSettings) -> None:
        self.settings = settings
        self._failure: OffloadError | None = None
        self._sizes: dict[Path, int] = {}
        self.scratch = Scratch(settings.path, settings.key)
        self.direct = self._takes_direct()
        self._threads = ThreadPoolExecutor(settings.threads, thread_name_prefix="zrun-disk")

    def _takes_direct(self) -> bool:
        """Try one page. Says so once if the file system only works through the page cache."""
        trial = self.scratch.path / "trial"
        page = aligned_buffer(PAGE).fill_(7)
        try:
            with _opened(trial, os.O_RDWR | os.O_CREAT | os.O_DIRECT) as file:
                os.pwrite(file, _bytes_of(page), 0)
                if os.preadv(file, [_bytes_of(page)], 0) == PAGE and bool((page == 7).all()):
                    return True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                self.scratch.remove()
                raise self._unusable("writing", trial, error) from error
        finally:
            trial.unlink(missing_ok=True)
        notice("warning", f"{self.settings.key}: no direct I/O on {self.settings.path}; it goes through the page cache")
        return False

    def create(self, name: str, nbytes: int) -> Path:
        """A file of this size whose space is reserved, so that it cannot run out later.

        Raises:
            OffloadError: the disk is full.
        """
        path = self.scratch.path / name
        self._sizes[path] = nbytes
        try:
            with _opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as file:
                os.posix_fallocate(file, 0, nbytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise self._unusable(f"reserving {nbytes:,} bytes for", path, error) from error
        return path

    def delete(self, path: Path) -> None:
        """Give back a file's space."""
        self._sizes.pop(path, None)
        path.unlink(missing_ok=True)

    def read(self, path: Path, offset: int, into: Tensor) -> Callable[[], None]:
        """Begin to fill `into` (uint8, an aligned buffer or a part of whole pages). Returns what waits for it."""
        return self._submit("reading", _read_all, path, offset, into)

    def write(self, path: Path, offset: int, source: Tensor) -> Callable[[], None]:
        """Begin to write `source`; it must not change before what is returned has returned."""
        return self._submit("writing", _write_all, path, offset, source)

    def _submit(
        self, doing: str, action: Callable[[int, int, Tensor], None], path: Path, offset: int, data: Tensor
    ) -> Callable[[], None]:
        if self._failure is not None:
            raise OffloadError(self._failure.message, self._failure.hint)
        flags, size = os.O_RDWR | (os.O_DIRECT if self.direct else 0), self._sizes[path]

        def run(start: int, part: Tensor) -> None:
            try:
                with _opened(path, flags) as file:
                    if (now := os.fstat(file).st_size) != size:
                        raise OSError(errno.EIO, f"another program made it {now:,} of {size:,} bytes")
                    action(file, offset + start, part)
            except OSError as error:
                self._failure = OffloadError(self._what(doing, path, error), _RESUME)
                raise self._failure from error

        count = max(1, min(self.settings.threads, data.numel() // self.settings.request_bytes))
        step = round_up(-(-data.numel() // count), PAGE)
        futures = [
            self._threads.submit(run, at, data[at : at + step]) for at in range(0, data.numel(), step)
        ]  # fmt: skip

        def complete() -> None:
            wait(futures)
            for future in futures:
                future.result()

        return complete

    def _unusable(self, doing: str, path: Path, error: OSError) -> OffloadError:
        """Before training."""
        hint = "use more ranks, or another disk"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = f"free space, {hint}"
        elif error.errno == errno.EFBIG:
            hint = f"raise the limit of a file's size (ulimit -f), {hint}"
        return OffloadError(self._what(doing, path, error), hint)

    def _what(self, doing: str, path: Path, error: OSError) -> str:
        what = f"{self.settings.key}: {doing} {path}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            with contextlib.suppress(OSError):
                free = os.statvfs(self.settings.path)
                what += f"; {free.f_bavail * free.f_frsize:,} bytes are free"
        return what

    def close(self) -> None:
        """Remove the files."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.scratch.remove()


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    # Opened for each request: a file per group would be more descriptors than a process may have.
    file = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def _bytes_of(data: Tensor) -> memoryview:
    return data.numpy().data


def _read_all(file: int, offset: int, into: Tensor) -> None:
    view, done = _bytes_of(into), 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], offset + done)
        if count == 0:
            raise OSError(errno.EIO, f"the file ends after {offset + done:,} bytes")
        done += count


def _write_all(file: int, offset: int, source: Tensor) -> None:
    view, done = _bytes_of(source), 0
    while done < len(view):
        count = os.pwritev(file, [view[done:]], offset + done)
        if count == 0:
            raise OSError(errno.EIO, f"nothing more is written after {offset + done:,} bytes")
        done += count


def aligned_buffer(nbytes: int) -> Tensor:
    """(nbytes,) uint8 in host memory that starts on a page; nbytes is a multiple of a page.

    Not page-locked: what goes on to a device is copied in pieces, so that the buffer is free for the disk at once.
    """
    room = host_empty(nbytes + PAGE, torch.uint8, pin=False)
    start = -room.data_ptr() % PAGE
    return room[start : start + nbytes]
