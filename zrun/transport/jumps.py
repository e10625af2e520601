"""Hosts that others lie behind: logged in to once, however many of them there are.

A server drops logins that come all at once (sshd's MaxStartups), so those who need the same host wait for one of them
to log in and then share its connection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from zrun.errors import HostLostError
from zrun.hostfile import Host, read_ipv6
from zrun.transport.ssh_config import Target


class Connected(Protocol):
    """A connection that may end by itself."""

    @property
    def alive(self) -> bool:
        """It has not ended."""

    def close(self) -> None:
        """Ends it."""


S = TypeVar("S", bound=Connected)


@dataclass
class _Jump(Generic[S]):
    lock: threading.RLock = field(default_factory=threading.RLock)
    session: S | None = None
    error: HostLostError | None = None
    failed_at: float = 0.0  # on the monotonic clock


class Jumps(Generic[S]):
    """Their connections. Methods may be called from many threads."""

    def __init__(self) -> None:
        self._jumps: dict[Target, _Jump[S]] = {}
        self._lock = threading.Lock()

    def get(self, target: Target, until: float, connect: Callable[[], S]) -> S:
        """The connection to `target`; made with `connect` if there is none, or it has ended.

        Raises:
            HostLostError: it cannot be made, or not until `until`. Who waited for another's attempt shares its error.
        """
        asked = time.monotonic()
        with self._lock:
            jump = self._jumps.setdefault(target, _Jump())
        if not jump.lock.acquire(timeout=max(0.05, until - asked)):
            raise HostLostError(f"{target} is not reached in time", "does ProxyJump go in circles?")
        try:
            if jump.error is not None and jump.failed_at >= asked:
                raise jump.error
            if jump.session is None or not jump.session.alive:
                jump.session = connect()
            return jump.session
        except HostLostError as error:
            jump.error, jump.failed_at = error, time.monotonic()
            raise
        finally:
            jump.lock.release()

    def close(self) -> None:
        """Ends all."""
        with self._lock:
            sessions = [jump.session for jump in self._jumps.values() if jump.session is not None]
            self._jumps.clear()
        for session in sessions:
            session.close()


def parse_jump(text: str) -> Host:
    """`[user@]host[:port]`, or the same as ssh://."""
    rest = text.strip().removeprefix("ssh://")
    user, _, place = rest.rpartition("@")
    if place.startswith("["):
        name, _, port = place[1:].partition("]")
    elif read_ipv6(place):
        name, port = place, ""
    else:
        name, _, port = place.partition(":")
    port = port.removeprefix(":")
    return Host(name, 0, user=user, port=int(port) if port.isdecimal() else None)
