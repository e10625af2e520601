"""An agent on this machine: a subprocess in a session of its own, so that a terminal's Ctrl-C reaches it through us."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

import zrun
from zrun.errors import HostLostError
from zrun.hostfile import Host
from zrun.transport.base import AgentEnd

_TAIL = 16 * 1024  # bytes of stderr that are kept
_SEND_SECONDS = 20.0  # for an agent that does not read; a line is far smaller than a pipe


class LocalLink:
    """The pipes of one local agent."""

    peer = ""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._stdin = process.stdin.fileno() if process.stdin is not None else -1
        os.set_blocking(self._stdin, False)
        self._sending = threading.Lock()
        self._tail = b""
        self._listener = threading.Thread(target=self._listen, name="agent-stderr", daemon=True)
        self._listener.start()

    def send(self, line: bytes) -> None:
        until = time.monotonic() + _SEND_SECONDS
        with self._sending:
            if self._stdin < 0:
                raise HostLostError("the line to its agent is closed")
            while line:
                try:
                    line = line[os.write(self._stdin, line) :]
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise HostLostError("its agent does not read what it is told") from None
                    select.select([], [self._stdin], [], 1.0)
                except OSError as error:
                    raise HostLostError(f"its agent does not listen any more: {error.strerror}") from None

    def flush(self, timeout: float) -> None:
        """Nothing is ever kept back here."""

    def receive(self, limit: int) -> bytes:
        stdout = self._process.stdout
        if stdout is None or stdout.closed:
            return b""
        line = stdout.readline(limit)
        if not line:
            stdout.close()
        return line

    def hang_up(self) -> None:
        with self._sending:
            if self._stdin >= 0 and self._process.stdin is not None:
                self._process.stdin.close()
                self._stdin = -1
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGCONT)  # an agent that was stopped could not see the end

    def end(self, timeout: float) -> AgentEnd:
        self.hang_up()
        try:
            code: int | None = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        self._listener.join(1.0 if code is not None else 0.0)
        return AgentEnd(code, self._tail.decode("utf-8", "replace").strip())

    def _listen(self) -> None:
        stderr = self._process.stderr
        while stderr is not None and (data := os.read(stderr.fileno(), 4096)):
            self._tail = (self._tail + data)[-_TAIL:]
        if stderr is not None:
            stderr.close()


class LocalTransport:
    """Starts agents on this machine.

    Args:
        environ: the environment of the agents, and through them the base of the workers'.
        python: the interpreter.
    """

    def __init__(self, environ: Mapping[str, str], python: str = sys.executable) -> None:
        # The mark of a job that this one runs inside of stays with our launcher: the agent must outlive it long enough
        # to end its own workers.
        self._environ = {name: value for name, value in environ.items() if name != "ZRUN_JOB_ID"}
        self._python = python

    def start(self, host: Host) -> LocalLink:
        try:
            process = subprocess.Popen(
                [self._python, "-m", "zrun.agent"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environ,
                cwd=_start_directory(),
                start_new_session=True,
            )
        except OSError as error:
            raise HostLostError(f"cannot start the agent on {host.name} with {self._python}: {error}") from None
        return LocalLink(process)


def _start_directory() -> str:
    """A directory in which `-m zrun.agent` finds this zrun and nothing that hides a module of the standard library.

    `-m` searches the current directory first. Of an installed zrun none is needed for that, and / has no modules.
    """
    parent = os.path.dirname(os.path.dirname(os.path.abspath(zrun.__file__)))
    return "/" if os.path.basename(parent) in ("site-packages", "dist-packages") else parent
