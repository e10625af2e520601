"""One host as the supervisor has it: an agent started, a thread that listens to it, and commands to it."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from queue import SimpleQueue

from zrun.errors import HostLostError, ProtocolError, ZrunError
from zrun.events import MAX_LINE_BYTES, PROTOCOL, AgentAlive, Event, decode
from zrun.hostfile import Host
from zrun.job import JobSpec
from zrun.transport.base import AgentEnd, Link, Transport

MAX_NOISE_BYTES = 1024 * 1024  # that a login shell may print before the handshake
_SAID_BYTES = 200  # of the last line of it, for an error
_IN_FLIGHT = 10_000  # events of one host that may wait for the supervisor


@dataclass(frozen=True)
class Closed:
    """The link to a host has ended. `error` is None if that was the agent's own doing."""

    error: ZrunError | None


def greet(link: Link) -> str:
    """Waits for the agent's greeting, throws away what a login shell says before it.

    Returns:
        the version of its zrun.

    Raises:
        HostLostError: it did not start, or speaks another protocol.
    """
    left, said = MAX_NOISE_BYTES, ""
    while left > 0:
        line = link.receive(left)
        if not line:
            raise HostLostError(f"its agent did not start{said}")
        left -= len(line)
        if line.strip():
            words_of_shell = line[:_SAID_BYTES].decode("utf-8", "replace").strip()
            said = f"; what it said last: {words_of_shell!r}"
        words = line.split()
        if len(words) == 3 and words[0] == b"zrun-agent":
            spoken, version = (word.decode("ascii", "replace") for word in words[1:])
            if spoken != str(PROTOCOL):
                raise HostLostError(
                    f"its agent is of zrun {version} and speaks protocol {spoken}, not {PROTOCOL}",
                    "install the same version of zrun on all hosts",
                )
            return version
    raise ProtocolError(f"{MAX_NOISE_BYTES} bytes came before the agent's greeting", "is it a shell that prints a lot?")


class Connection:
    """A host, from the start of its agent to its end.

    Args:
        queue: receives (place, event), and (place, Closed) as the last one.
        place: of the host among those that the supervisor has.
    """

    def __init__(self, host: Host, spec: JobSpec, transport: Transport, queue: SimpleQueue[object], place: int) -> None:
        self.spec = spec
        self.place = place
        self.greeted = False
        self.closed = False  # set by the supervisor, when it has heard of it
        self.silent = False  # set by the supervisor: nothing will be heard of it any more
        self.heard_at = time.monotonic()
        self.spoke_at = 0.0  # a rank of this host, last, as far as its agent has told
        self._host = host
        self._transport = transport
        self._queue = queue
        self._link: Link | None = None
        self._told = False  # the agent has its job, so that commands make sense to it
        self._cancelled = False  # it was stopped before that
        self._lock = threading.Lock()
        self._room = threading.Semaphore(_IN_FLIGHT)

    def start(self) -> None:
        """Starts the agent and listens, in a thread."""
        threading.Thread(target=self._serve, name=f"host-{self.place}", daemon=True).start()

    def command(self, name: str, **values: float) -> None:
        """Sends a command. An agent that is gone will be noticed by the thread that listens to it."""
        with self._lock:
            if not self._told:
                self._cancelled = self._cancelled or name in ("stop", "kill")
                return
        try:
            if self._link is not None:
                self._link.send(json.dumps({"command": name, **values}).encode() + b"\n")
        except HostLostError:
            pass

    def flush(self, timeout: float) -> None:
        """Waits at most `timeout` seconds until commands have left."""
        if self._link is not None:
            self._link.flush(timeout)

    def taken(self) -> None:
        """The supervisor is done with one event."""
        self._room.release()

    def hang_up(self) -> None:
        """Leaves the agent to its dead man's switch."""
        if self._link is not None:
            self._link.hang_up()

    def end(self, timeout: float) -> AgentEnd:
        """Waits until the agent and its keeper are gone."""
        return self._link.end(0.0 if self.silent else timeout) if self._link is not None else AgentEnd(None, "")

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        error: ZrunError | None = None
        try:
            link = self._begin()
            if link is not None:
                self._listen(link)
        except ZrunError as problem:
            error = problem
        except (OSError, ValueError) as problem:  # the link was closed under our feet
            error = HostLostError(str(problem))
        self._queue.put((self.place, Closed(error)))

    def _begin(self) -> Link | None:
        """None if the job is over before it has begun here; the agent sees that from the end of its stdin."""
        self._link = link = self._transport.start(self._host)
        if not self._cancelled:
            link.send(self.spec.to_line())
            greet(link)
            self.heard_at = time.monotonic()
            self.greeted = True
        with self._lock:
            self._told = True
            return None if self._cancelled else link

    def _listen(self, link: Link) -> None:
        while line := link.receive(MAX_LINE_BYTES + 1):
            if not line.endswith(b"\n"):
                if len(line) > MAX_LINE_BYTES:
                    raise ProtocolError(f"its agent said a line of more than {MAX_LINE_BYTES} bytes")
                return  # killed in the middle of a line
            self.heard_at = time.monotonic()
            event = decode(line)
            if not isinstance(event, AgentAlive):
                self._put(event)
            elif event.silent is not None:
                self.spoke_at = max(self.spoke_at, self.heard_at - event.silent)

    def _put(self, event: Event) -> None:
        self._room.acquire()
        self._queue.put((self.place, event))
