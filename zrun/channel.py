"""The agent's two ends of the line to its launcher: commands in, events out. Neither is ever waited for."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass

from zrun.errors import ProtocolError
from zrun.events import Event, encode

CROWDED_BYTES = 4 * 1024 * 1024  # that wait to be written: from here on, what can be left out is left out
_CHUNK = 64 * 1024
_COMMAND_LIMIT = 64 * 1024  # bytes of one line


@dataclass(frozen=True)
class Command:
    """One line of the launcher: docs/protocol.md, section 1."""

    name: str
    number: int = 0  # of a signal
    grace: float = 0.0

    @classmethod
    def from_line(cls, line: bytes) -> Command:
        """The command on a line. Unknown fields mean nothing, unknown commands are left to the reader.

        Raises:
            ProtocolError: it is none.
        """
        try:
            data = json.loads(line)
            return cls(str(data["command"]), int(data.get("number", 0)), float(data.get("grace", 0.0)))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ProtocolError(f"not a command: {line[:80]!r}") from None


class Inbox:
    """The launcher's commands, and how long it has been silent.

    Args:
        fd: the agent's stdin; made non-blocking.
        begun: what was read of it already.
        lease: seconds of silence after which the launcher counts as gone.
    """

    def __init__(self, fd: int, begun: bytes, lease: float) -> None:
        self.fd = fd
        self.ended = False  # the launcher has closed its end
        self._rest = begun
        self._lease = lease
        self._last = time.monotonic()
        self._held = False
        os.set_blocking(fd, False)

    def read(self) -> list[Command]:
        """The commands that have come.

        Raises:
            ProtocolError: a line that is not a command.
        """
        try:
            data = os.read(self.fd, _CHUNK)
            self.ended = not data
        except BlockingIOError:
            data = b""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > _COMMAND_LIMIT:
            raise ProtocolError(f"a command of more than {_COMMAND_LIMIT} bytes")
        commands = [Command.from_line(line) for line in lines]
        if commands:
            self._last = time.monotonic()
            self._held = commands[-1].name == "hold"
        return commands

    @property
    def expired(self) -> bool:
        """The launcher has been silent for longer than the lease."""
        return not self._held and time.monotonic() - self._last > self._lease


class Outbox:
    """Events on their way out, in order. When the launcher is gone everything is dropped in silence.

    Args:
        fd: the agent's stdout; made non-blocking.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.broken = False  # nobody reads any more
        self._waiting = bytearray()
        os.set_blocking(fd, False)

    def put(self, event: Event) -> None:
        """Takes an event. Whoever says what can be left out looks at `crowded` first."""
        if not self.broken:
            self._waiting += encode(event)

    @property
    def waiting(self) -> bool:
        """Something has not been written yet."""
        return bool(self._waiting)

    @property
    def crowded(self) -> bool:
        """The launcher does not keep up."""
        return len(self._waiting) >= CROWDED_BYTES

    def flush(self) -> None:
        """Writes what fits into the pipe."""
        try:
            while self._waiting:
                done = os.write(self.fd, self._waiting[:_CHUNK])
                del self._waiting[:done]
        except BlockingIOError:
            return
        except OSError:
            self.broken = True
            self._waiting.clear()
