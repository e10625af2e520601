"""What every transport offers. Nothing above it knows whether a host is this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from zrun.hostfile import Host


@dataclass(frozen=True)
class AgentEnd:
    """How the far end of a link ended."""

    returncode: int | None  # None: it is still there, or nobody can tell
    last_words: str  # the end of its stderr


class Link(Protocol):
    """The line to one agent. `receive` belongs to one thread, everything else may be called from any."""

    @property
    def peer(self) -> str:
        """The address at which its host was reached; empty if that is not known, or it is this machine."""

    def send(self, line: bytes) -> None:
        """Sends one whole line.

        Raises:
            HostLostError: nobody is there any more.
        """

    def flush(self, timeout: float) -> None:
        """Waits at most `timeout` seconds until what was sent has left this machine's hands."""

    def receive(self, limit: int) -> bytes:
        """The next line with its newline; without one if it is longer than `limit` or the link ended; empty at the end.

        Waits as long as it takes.
        """

    def hang_up(self) -> None:
        """Ends the line in this direction. An agent that lives takes it as the end of its launcher."""

    def end(self, timeout: float) -> AgentEnd:
        """Waits at most `timeout` seconds until the far end has ended, and lets go of the link."""


class Transport(Protocol):
    """Starts agents."""

    def start(self, host: Host) -> Link:
        """Starts the agent of `host`.

        Raises:
            HostLostError: it cannot be started.
        """
