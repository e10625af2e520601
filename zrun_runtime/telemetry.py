"""What a worker tells the launcher, or a person when there is no launcher.

The wire format is docs/protocol.md: one JSON line an event, written to the pipe that ZRUN_EVENT_FD names. Saying
something never blocks training and never raises: when the pipe is full, events that are said often are dropped.
"""

from __future__ import annotations

import errno
import json
import math
import os
import select
import sys
import threading
from typing import Any

MAX_LINE_BYTES = 64 * 1024  # a write of up to PIPE_BUF is atomic; longer lines are still whole, as only we write here
_IMPATIENT = ("step", "memory", "position")  # said often: dropped if there is no room for them
_WAIT_SECONDS = 1.0  # the longest a run_started or notice may wait for room in the pipe


class Telemetry:
    """The worker's end of the event pipe. One per process; forks of the process stay silent."""

    def __init__(self, fd: int | None) -> None:
        self.fd = fd
        self.pid = os.getpid()
        self._lock = threading.RLock()  # the watch speaks from a thread of its own
        if fd is not None:
            os.set_blocking(fd, False)
            os.set_inheritable(fd, False)

    @classmethod
    def from_environment(cls) -> Telemetry:
        """The pipe of ZRUN_EVENT_FD (`<fd>:<inode>`), if that descriptor is open and is that pipe."""
        named = os.environ.get("ZRUN_EVENT_FD", "")
        try:
            fd, inode = (int(part) for part in named.split(":"))
            if os.fstat(fd).st_ino == inode:
                return cls(fd)
        except (ValueError, OSError):
            pass  # no launcher, or a child that inherited the variable but not the descriptor
        return cls(None)

    @property
    def connected(self) -> bool:
        """A launcher listens to this very process."""
        return self.fd is not None and os.getpid() == self.pid

    def emit(self, kind: str, **fields: Any) -> bool:
        """Say one event. Returns whether it was said. Non-finite numbers travel as null."""
        if not self.connected:
            return False
        clean = {key: _finite(value) for key, value in fields.items()}
        line = json.dumps({"event": kind, **clean}, separators=(",", ":"), default=str).encode() + b"\n"
        with self._lock:
            return len(line) <= MAX_LINE_BYTES and self._write(line, patient=kind not in _IMPATIENT)

    def _write(self, line: bytes, patient: bool) -> bool:
        """Write the whole line or nothing; a line once begun is always finished."""
        fd, done = self.fd, 0
        if fd is None:
            return False
        while done < len(line):
            try:
                done += os.write(fd, line[done:])
            except OSError as error:
                if error.errno != errno.EAGAIN:
                    self.fd = None  # the launcher is gone; its agent will end us
                    return False
                if not done and not patient:
                    return False
                if not select.select([], [fd], [], _WAIT_SECONDS)[1] and not done:
                    return False
        return True


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


_telemetry: Telemetry | None = None


def telemetry() -> Telemetry:
    """The process's one Telemetry, opened at the first use."""
    global _telemetry
    if _telemetry is None:
        _telemetry = Telemetry.from_environment()
    return _telemetry


def notice(level: str, text: str, rank: int = 0, from_watch: bool = False) -> None:
    """Tell the person at the console: through the launcher, else on stderr.

    Args:
        level: info, warning or error.
        from_watch: it tells of silence, so it is no sign that the program goes on.
    """
    if not telemetry().emit("notice", rank=rank, level=level, text=text, from_watch=from_watch):
        sys.stderr.write(f"[zrun rank {rank}] {level}: {text}\n")
