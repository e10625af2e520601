"""The jobs of this user on this machine, as files that only they can read: for `zrun ps` and `zrun kill`.

A job is there if the process that wrote its file is: known by pid and start time, since a pid is only a number. Files
of others are swept away by whoever comes across them.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from zrun.errors import ProtocolError
from zrun.processes import Process, read_process
from zrun.wire import from_line

_SUFFIX = ".json"


@dataclass(frozen=True)
class Entry:
    """A running job."""

    job_id: str
    pid: int  # of its launcher
    start: int  # of that, in clock ticks after boot
    world_size: int
    hosts: tuple[str, ...]
    command: str  # without arguments, which may hold what is nobody's business
    since: float  # seconds since the epoch

    @property
    def process(self) -> Process | None:
        """The launcher, if it still is the one that wrote this."""
        found = read_process(self.pid)
        return found if found is not None and found.start == self.start and found.state not in "ZXx" else None


def directory(environ: Mapping[str, str]) -> str:
    """Where the files are."""
    base = environ.get("XDG_RUNTIME_DIR", "")
    return os.path.join(base, "zrun") if base and os.path.isdir(base) else f"/tmp/zrun-{os.getuid()}"


def _is_ours(place: str) -> bool:
    """Whether it is a directory that nobody else can have put anything into."""
    try:
        found = os.lstat(place)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


@contextmanager
def registered(place: str, job_id: str, world_size: int, hosts: tuple[str, ...], command: str) -> Iterator[None]:
    """Lists this process's job while entered. Where that cannot be done it is not listed, and runs all the same."""
    with suppress(OSError):
        os.mkdir(place, 0o700)
    sweep(place)
    own = read_process(os.getpid())
    entry = Entry(job_id, os.getpid(), own.start if own else 0, world_size, hosts, command, time.time())
    path = os.path.join(place, job_id + _SUFFIX)
    with suppress(OSError):
        if _is_ours(place):
            with open(path + ".new", "x", encoding="utf-8") as file:
                json.dump(asdict(entry), file)
            os.replace(path + ".new", path)
    try:
        yield
    finally:
        if _is_ours(place):
            with suppress(OSError):
                os.unlink(path)
            with suppress(OSError):
                os.rmdir(place)  # the last one; others are still listed otherwise


def running(place: str) -> list[Entry]:
    """The jobs that run, the oldest first."""
    found = [entry for _, entry in _read(place) if entry is not None and entry.process is not None]
    return sorted(found, key=lambda entry: entry.since)


def sweep(place: str) -> None:
    """Takes away the files of jobs that were killed."""
    for path, entry in _read(place):
        if entry is None or entry.process is None:
            with suppress(OSError):
                os.unlink(path)


def _read(place: str) -> list[tuple[str, Entry | None]]:
    found: list[tuple[str, Entry | None]] = []
    try:
        names = os.listdir(place) if _is_ours(place) else []
    except OSError:  # the last job has just taken it away, or nobody may read it
        return found
    for name in names:
        if name.endswith(_SUFFIX):
            path = os.path.join(place, name)
            try:
                with open(path, "rb") as file:
                    found.append((path, from_line(Entry, file.read(), path)))
            except (OSError, ProtocolError):
                found.append((path, None))
    return found
