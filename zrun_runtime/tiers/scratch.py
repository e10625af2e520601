"""A directory for the files of one process, which does not outlive it.

[Note: whose directory]
Several jobs may share one path, also from several containers or hosts. A directory's name says host, process id and the
moment that process started; a file in it is locked for as long as the process lives, which the kernel ends whatever
ends the process. A directory is swept only if it is this host's, nobody holds its lock, and no process of that id and
start is alive: a lock alone would be missed where a file system has none, an id alone in another container.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import time
import uuid
import weakref
from pathlib import Path

from zrun_runtime.errors import OffloadError

_NAME = re.compile(r"zrun-offload\.(?P<host>[^.]+)\.(?P<pid>\d+)-(?P<start>\d+)\.[0-9a-f]+")
_LOCK = "in-use"
_MAKING_SECONDS = 60.0  # a directory without its lock is not that new any more


class Scratch:
    """See [Note: whose directory]. Made 0700; removed by `remove`, at the latest when the interpreter exits."""

    def __init__(self, parent: str, key: str) -> None:
        """Sweep what dead processes left in `parent`, and make a directory there.

        key: the config key that named `parent`, for messages.

        Raises:
            OffloadError: there is no such directory, or nothing can be written into it.
        """
        place = Path(parent).expanduser().absolute()  # a script may change its directory later
        if not place.is_dir():
            what = "is not a directory" if place.exists() else "does not exist"
            raise OffloadError(f"{key}: {place} {what}", "create it on the disk that is meant, or correct the path")
        sweep(place)
        host = _host()
        name = f"zrun-offload.{host}.{os.getpid()}-{_start_of(os.getpid())}.{uuid.uuid4().hex[:8]}"
        self.path = place / name
        self._pid = os.getpid()
        try:
            self.path.mkdir(mode=0o700)
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise OffloadError(
                f"{key}: cannot write into {parent}: {error.strerror}", "make it writable for this user"
            ) from error
        with contextlib.suppress(OSError):  # a file system without locks: the process id has to do
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._finalizer = weakref.finalize(self, _remove, self.path, self._lock, self._pid)

    def remove(self) -> None:
        """Remove the directory and all that is in it."""
        self._finalizer()


def _remove(path: Path, lock: int, pid: int) -> None:
    if os.getpid() == pid:  # not in a fork, which has inherited all of this
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def sweep(place: Path) -> None:
    """Remove the directories of dead processes of this host. What cannot be removed is left alone."""
    host = _host()
    with contextlib.suppress(OSError):
        for entry in list(place.iterdir()):
            named = _NAME.fullmatch(entry.name)
            if named and named["host"] == host and not _alive(int(named["pid"]), int(named["start"])):
                _sweep_one(entry)


def _sweep_one(entry: Path) -> None:
    try:
        lock = os.open(entry / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:  # it is being made, or removed; or its process was killed while it did that
        if time.time() - entry.lstat().st_mtime > _MAKING_SECONDS:
            shutil.rmtree(entry, ignore_errors=True)
        return
    except OSError:
        return  # someone else's
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(entry, ignore_errors=True)
    except OSError:
        pass  # its process lives, where we cannot see it
    finally:
        os.close(lock)


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "_", socket.gethostname())


def _start_of(pid: int) -> int:
    """When a process started, in clock ticks since the boot (field 22 of /proc/PID/stat)."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _alive(pid: int, start: int) -> bool:
    try:
        return _start_of(pid) == start
    except (FileNotFoundError, ProcessLookupError):
        return False
