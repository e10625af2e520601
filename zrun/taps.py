"""What one worker says: its stdout and stderr (spooled, then shown as far as possible) and its events."""

from __future__ import annotations

import os
import re
import time

from zrun.channel import Outbox
from zrun.errors import ProtocolError
from zrun.events import (
    MAX_LINE_BYTES,
    WORKER_KINDS,
    Event,
    Notice,
    OutputDropped,
    WorkerOutput,
    decode,
)
from zrun.outputs import Allowance, Line, LineSplitter
from zrun.spool import SpoolFile

_CHUNK = 256 * 1024
_TAIL = 64 * 1024  # bytes of the end of a stream that are kept for its last words
_BURST = 20_000.0  # lines that may be shown at once; also of a short table that a script prints
_RATE = 4_000.0  # lines a second that all streams of a host may go on with
_TROUBLE = re.compile(rb"Traceback \(most recent call last\)|^(?:\[rank\d+\]: )?zrun_runtime: \w+: ", re.MULTILINE)
_ONE_TROUBLE = 1.0  # seconds in which several tracebacks are one, with its chain
_DRAIN_LIMIT = 16 * 1024 * 1024  # bytes; more than a pipe holds comes from a child that still writes
_EVENT_LIMIT = MAX_LINE_BYTES // 2  # bytes of a line; passed on it may become a little longer
_EVENT_BURST, _EVENT_RATE = 5_000.0, 1_000.0


class Tap:
    """The reading end of one pipe from a worker; made non-blocking."""

    def __init__(self, fd: int, rank: int) -> None:
        self.fd = fd  # -1 when closed
        self.rank = rank
        os.set_blocking(fd, False)

    def read(self, outbox: Outbox, now: float) -> int | None:
        """Takes one chunk from the pipe, if there is one.

        Returns:
            bytes taken; 0 at the end of the stream, None if there is nothing now.
        """
        raise NotImplementedError

    def tick(self, outbox: Outbox, now: float) -> None:
        """Says what has waited for its time."""

    def flush(self, outbox: Outbox) -> None:
        """Says all that waits: the worker is gone."""

    def close(self) -> None:
        """Lets go of the pipe."""
        os.close(self.fd)
        self.fd = -1


class OutputTap(Tap):
    """One stream of a worker: kept in its spool file, shown as lines as far as the console keeps up.

    Args:
        streams: how many there are on this host; they share the steady rate.
    """

    def __init__(self, fd: int, rank: int, stream: str, spool: SpoolFile, streams: int) -> None:
        super().__init__(fd, rank)
        self.stream = stream
        self.tail = b""
        self.left_out = False  # some lines are only in the file
        self.trouble_at = 0.0  # when the last traceback began; seconds since the epoch
        self._spool = spool
        self._splitter = LineSplitter()
        self._allowance = Allowance(_BURST, max(100.0, _RATE / streams))
        self._dropped = 0

    def read(self, outbox: Outbox, now: float) -> int | None:
        data = _read(self.fd, _CHUNK)
        if not data:
            return None if data is None else self._at_end(outbox)
        said = self._spool.write(data)
        if said:
            outbox.put(Notice(self.rank, "warning", said))
        self.tail = data[-_TAIL:] if len(data) >= _TAIL else (self.tail + data)[-_TAIL:]
        if _TROUBLE.search(data) and time.time() - self.trouble_at > _ONE_TROUBLE:
            self.trouble_at = time.time()
        if outbox.crowded:
            self._allowance.close()
        if self._allowance.is_open(now):
            self._show(self._splitter.feed(data, now), outbox)
        else:
            self._drop(self._splitter.skip(data))
        return len(data)

    def tick(self, outbox: Outbox, now: float) -> None:
        if not outbox.crowded and self._allowance.is_open(now):
            self._show(self._splitter.tick(now), outbox)

    def flush(self, outbox: Outbox) -> None:
        self._say_dropped(outbox)
        for line in self._splitter.end():
            outbox.put(WorkerOutput(self.rank, self.stream, line.text, line.partial))

    def _show(self, lines: list[Line], outbox: Outbox) -> None:
        self._say_dropped(outbox)
        for at, line in enumerate(lines):
            if not self._allowance.take(len(line.text)):
                self._drop(len(lines) - at)
                return
            outbox.put(WorkerOutput(self.rank, self.stream, line.text, line.partial, line.transient))

    def _drop(self, lines: int) -> None:
        self._dropped += lines
        self.left_out = self.left_out or lines > 0

    def _say_dropped(self, outbox: Outbox) -> None:
        if self._dropped:
            where = self._spool.path if self._spool.takes else ""
            outbox.put(OutputDropped(self.rank, self.stream, self._dropped, where))
            self._dropped = 0

    def _at_end(self, outbox: Outbox) -> int:
        self.flush(outbox)
        return 0


class EventTap(Tap):
    """The events of a worker. Whatever is not one is counted and left out; it never hurts the job."""

    def __init__(self, fd: int, rank: int) -> None:
        super().__init__(fd, rank)
        self.refused = 0
        self._rest = b""
        self._too_long = False
        self._allowance = Allowance(_EVENT_BURST, _EVENT_RATE)

    def read(self, outbox: Outbox, now: float) -> int | None:
        data = _read(self.fd, _CHUNK)
        if not data:
            return None if data is None else 0
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if self._too_long and lines:
            lines[0] = b""
            self._too_long = False
        if len(self._rest) > _EVENT_LIMIT:
            self._refuse(outbox, f"a line of more than {_EVENT_LIMIT} bytes")
            self._rest, self._too_long = b"", True
        for line in lines:
            if len(line) > _EVENT_LIMIT:
                self._refuse(outbox, f"a line of more than {_EVENT_LIMIT} bytes")
            elif line:
                self._pass_on(line, outbox, now)
        return len(data)

    def _pass_on(self, line: bytes, outbox: Outbox, now: float) -> None:
        if outbox.crowded or not self._allowance.is_open(now) or not self._allowance.take(0):
            return
        try:
            event = decode(line)
        except ProtocolError as error:
            self._refuse(outbox, error.message)
            return
        if event.kind not in WORKER_KINDS or getattr(event, "rank", None) != self.rank:
            self._refuse(outbox, f"a worker may not say {event.kind!r} for {_whose(event)}")
            return
        outbox.put(event)

    def _refuse(self, outbox: Outbox, why: str) -> None:
        self.refused += 1
        if self.refused == 1:
            text = f"something else than events came over ZRUN_EVENT_FD and is ignored: {why[:200]}"
            outbox.put(Notice(self.rank, "warning", text))


def _whose(event: Event) -> str:
    rank = getattr(event, "rank", None)
    return "its agent" if rank is None else f"rank {rank}"


def _read(fd: int, size: int) -> bytes | None:
    """b"" at the end, None if there is nothing at the moment."""
    try:
        return os.read(fd, size)
    except BlockingIOError:
        return None


def drain(taps: list[Tap], outbox: Outbox) -> None:
    """Reads what a worker that is gone has left in its pipes."""
    for tap in taps:
        taken = 0
        while tap.fd >= 0 and taken < _DRAIN_LIMIT and (size := tap.read(outbox, time.monotonic())):
            taken += size
        tap.flush(outbox)
