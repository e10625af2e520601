"""An agent on another machine: started through SSH, one connection a host, whatever is run over it.

The command line is only the interpreter and the module; everything else travels on stdin, where no shell reads it and
`ps` shows none of it. Login shells differ in nearly all but `cd`, `;`, `exec` and single quotes: nothing else is used.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue

import paramiko

from zrun.errors import HostLostError, UsageError
from zrun.hostfile import Host
from zrun.transport.base import AgentEnd
from zrun.transport.ssh_config import Target
from zrun.transport.ssh_login import Session, SshLogin, text_of
from zrun.transport.ssh_options import SshOptions

_TAIL = 16 * 1024  # bytes of stderr that are kept
_SEND_SECONDS = 20.0  # for a far end that does not read
_STATUS_SECONDS = 2.0  # after the end of its output, for how it ended to arrive
_CHUNK = 64 * 1024
_SAFE_PYTHON = re.compile(r"[A-Za-z0-9_./+@%:,=-]+( [A-Za-z0-9_./+@%:,=-]+)*\Z")


class SshLink:
    """The channel to one agent."""

    def __init__(self, session: Session, channel: paramiko.Channel) -> None:
        self._session = session
        self._channel = channel
        self._lock = threading.Lock()
        self._hung_up = False
        self._unsent: SimpleQueue[bytes | threading.Event | None] = SimpleQueue()
        self._sending_failed: HostLostError | None = None
        self._lines: deque[bytes] = deque()  # received, not yet asked for
        self._rest = b""  # the beginning of the next one
        self._tail = b""
        self._listener = threading.Thread(target=self._listen, name="agent-stderr", daemon=True)
        self._listener.start()
        threading.Thread(target=self._write, name="agent-stdin", daemon=True).start()

    @property
    def peer(self) -> str:
        """The address at which the host was reached; empty if only a proxy knows."""
        return self._session.peer

    def send(self, line: bytes) -> None:
        """Never waits: a thread writes, since a connection may stand still for long before it is known to be dead."""
        with self._lock:
            if self._hung_up:
                raise HostLostError("the line to its agent is closed")
            if self._sending_failed is not None:
                raise self._sending_failed
            self._unsent.put(line)

    def flush(self, timeout: float) -> None:
        sent = threading.Event()
        self._unsent.put(sent)
        sent.wait(timeout)

    def receive(self, limit: int) -> bytes:
        while not self._lines and len(self._rest) < limit:
            try:
                data = self._channel.recv(_CHUNK)
            except TimeoutError:
                continue
            if not data:
                if not self._rest and self._was_cut():
                    raise self._lost()
                break
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._lines.extend(line + b"\n" for line in lines)
        if not self._lines:
            line, self._rest = self._rest[:limit], self._rest[limit:]
            return line
        line = self._lines.popleft()
        if len(line) > limit:
            self._lines.appendleft(line[limit:])
        return line[:limit]

    def hang_up(self) -> None:
        with self._lock:
            if not self._hung_up:
                self._hung_up = True
                self._unsent.put(None)

    def end(self, timeout: float) -> AgentEnd:
        self.hang_up()
        self._channel.status_event.wait(timeout)
        code = self._channel.exit_status if self._channel.exit_status_ready() else -1
        self._channel.close()
        self._listener.join(1.0 if code >= 0 else 0.0)
        return AgentEnd(code if code >= 0 else None, self._tail.decode("utf-8", "replace").strip())

    def _was_cut(self) -> bool:
        """Whether the connection ended, and not only the program at its other end."""
        self._channel.status_event.wait(_STATUS_SECONDS)
        if self._hung_up or self._channel.exit_status >= 0:
            return False
        self._session.transport.join(_STATUS_SECONDS)  # its thread ends with the connection
        return not self._session.transport.is_active()

    def _lost(self) -> HostLostError:
        problem = self._session.transport.get_exception()
        words = f": {problem}" if problem is not None and str(problem) else ""
        return HostLostError(f"the SSH connection to {self._session.target} was cut{words}")

    def _write(self) -> None:
        try:
            while (item := self._unsent.get()) is not None:
                if isinstance(item, threading.Event):
                    item.set()
                else:
                    self._channel.sendall(item)
            self._channel.shutdown_write()
        except TimeoutError:
            self._sending_failed = HostLostError("its agent does not read what it is told")
        except (OSError, EOFError, paramiko.SSHException):
            self._sending_failed = self._lost()

    def _listen(self) -> None:
        while True:
            try:
                data = self._channel.recv_stderr(4096)
            except TimeoutError:
                continue
            if not data:
                return
            self._tail = (self._tail + data)[-_TAIL:]


class SshTransport:
    """Starts agents through SSH. The connection to a host is made when it is first asked for, and kept.

    Args:
        hosts: all that will be asked for.

    Raises:
        UsageError: ssh_config, or a host's own line, asks for something that cannot be done.
    """

    def __init__(self, hosts: Sequence[Host], options: SshOptions) -> None:
        self._login = SshLogin(options)
        self._targets = {host: self._login.target(host) for host in hosts}
        self._commands = {host: _command(host) for host in hosts}
        self._locks = {host: threading.Lock() for host in hosts}
        self._sessions: dict[Host, Session] = {}
        self._options = options

    def target(self, host: Host) -> Target:
        """How a host is reached."""
        return self._targets[host]

    def start(self, host: Host) -> SshLink:
        session = self._session(host)
        try:
            channel = session.transport.open_session(timeout=self._options.connect_timeout)
            channel.settimeout(_SEND_SECONDS)
            channel.exec_command(self._commands[host])
        except (paramiko.SSHException, OSError, EOFError) as error:
            target = session.target
            full = isinstance(error, paramiko.ChannelException)  # the server says no to one more session
            why = "it opens no further session" if full else text_of(error)
            hint = "see MaxSessions of its sshd_config" if full else f"try: {target.command()}"
            raise HostLostError(f"{target} runs no program for us: {why}", hint) from None
        return SshLink(session, channel)

    def close(self) -> None:
        """Ends all connections."""
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()
        self._login.close()

    def _session(self, host: Host) -> Session:
        with self._locks[host]:
            session = self._sessions.get(host)
            if session is None or not session.alive:
                session = self._sessions[host] = self._login.connect(self._targets[host])
            return session


def _command(host: Host) -> str:
    python = host.python or sys.executable
    if not _SAFE_PYTHON.match(python) or python.startswith("-"):
        raise UsageError(
            f"{host.name}: the path of its Python, {python!r}, has characters that login shells treat differently",
            "give a plain one with python= in the hostfile; a link to it will do",
        )
    # Only outside of quotes does ~ mean the home directory.
    quoted = f"~/'{python[2:]}'" if python.startswith("~/") else f"'{python}'"
    # Python looks for modules where it starts, and in a home directory may lie a select.py. / has no modules.
    from_home = "/" in python and not python.startswith(("/", "~/"))
    return f"{'' if from_home else 'cd /; '}exec {quoted} -m zrun.agent"
