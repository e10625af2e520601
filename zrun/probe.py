"""What an agent can say about its host before there is a job: questions on stdin, one answer a line. Standard library
only, and nothing is started or kept: when the questions end, everything is as it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import signal
import socket
import sys
import time
from dataclasses import dataclass
from importlib import metadata, util

import zrun
from zrun.devices import find_gpus, usable_cores
from zrun.errors import ProtocolError, UsageError
from zrun.interfaces import interface_of, list_addresses, plain_address
from zrun.ports import ClaimedPort, claim_free_port, claim_port
from zrun.wire import QUESTION, from_line, to_line

_ALONE_SECONDS = 120  # without a question; the launcher is gone then
_BACKLOG = 4096


@dataclass(frozen=True)
class Look:
    """What is there?"""

    probe: str = "look"
    cwd: str = "/"  # where the workers will run
    script: str = ""  # a file seen from there; empty: none
    program: str = ""  # a program, looked for on PATH; empty: none
    on_gpu: bool = False
    before: str = ""  # id of a job that should have ended


@dataclass(frozen=True)
class Facts:
    """What is there. Sizes in bytes, -1 for what is not there; versions are empty for what is not installed."""

    python: str  # version
    executable: str  # its path
    zrun: str
    runtime: str
    torch: str
    cwd_problem: str
    script_problem: str
    script_hash: str  # SHA-256
    gpus: tuple[str, ...]
    gpus_found: str
    cores: int
    clock: float  # seconds since the epoch
    shm_free: int
    temp_free: int
    temp_problem: str
    reached_at: str  # the address of this host that the SSH connection goes to; empty if there is none
    reached_from: str  # and the one it comes from
    addresses: tuple[str, ...]  # interface=address
    left: int = 0  # processes of the job that should have ended


@dataclass(frozen=True)
class Listen:
    """Take the master port."""

    probe: str = "listen"
    port: int = 0  # 0: one that is free


@dataclass(frozen=True)
class Listening:
    """It is taken, until the next question but `Reach`; or why not."""

    port: int
    problem: str = ""


@dataclass(frozen=True)
class LetGo:
    """Leave the master port to others."""

    probe: str = "let_go"


@dataclass(frozen=True)
class Reach:
    """Can the master port be reached?"""

    probe: str = "reach"
    address: str = ""
    port: int = 0
    seconds: float = 5.0


@dataclass(frozen=True)
class Reached:
    """From this interface; or why not."""

    interface: str
    address: str
    problem: str = ""


class Probe:
    """Answers questions."""

    def __init__(self) -> None:
        self._claim: ClaimedPort | None = None
        self._listeners: list[socket.socket] = []

    def answer(self, line: bytes) -> bytes:
        """The answer to one question.

        Raises:
            ProtocolError: it is none.
        """
        kind = json.loads(line).get("probe")
        if kind == "reach":
            return to_line(_reach(from_line(Reach, line, "the question")))
        self.close()
        if kind == "look":
            return to_line(_look(from_line(Look, line, "the question")))
        if kind == "listen":
            return to_line(self._listen(from_line(Listen, line, "the question")))
        if kind == "let_go":
            return to_line(Listening(0))
        raise ProtocolError(f"not a question of this zrun: {kind!r}")

    def close(self) -> None:
        """Lets go of the port."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    def _listen(self, question: Listen) -> Listening:
        try:
            self._claim = claim_port(question.port) if question.port else claim_free_port()
        except UsageError as error:
            return Listening(question.port, error.message)
        number = self._claim.number
        for family, anywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
            try:
                listener = socket.socket(family, socket.SOCK_STREAM)
                self._listeners.append(listener)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind((anywhere, number))
                listener.listen(_BACKLOG)
            except OSError as error:
                if family == socket.AF_INET:
                    return Listening(number, f"port {number} cannot be used: {error.strerror}")
        return Listening(number)


def serve(line: bytes, begun: bytes) -> tuple[bytes, bytes]:
    """Answers a first question and those that follow.

    Returns:
        the first line that is no question, and what was read after it; nothing if stdin ends before.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    probe, rest = Probe(), begun
    while line.startswith(QUESTION):
        signal.alarm(_ALONE_SECONDS)  # ends this process, should the launcher be gone without a word
        answer = probe.answer(line)
        while answer:
            answer = answer[os.write(1, answer) :]
        while b"\n" not in rest:
            more = os.read(0, 64 * 1024)
            if not more:
                return b"", b""
            rest += more
        line, _, rest = rest.partition(b"\n")
    signal.alarm(0)
    probe.close()
    return line, rest


def _look(question: Look) -> Facts:
    gpus = find_gpus(os.environ) if question.on_gpu else None
    script_hash, script_problem = _script(question)
    temp_free, temp_problem = _temp()
    return Facts(
        python=platform.python_version(),
        executable=sys.executable,
        zrun=zrun.__version__,
        runtime=_runtime_version(),
        torch=_version("torch"),
        cwd_problem=_directory(question.cwd),
        script_problem=script_problem,
        script_hash=script_hash,
        gpus=gpus.visible if gpus is not None else (),
        gpus_found=gpus.found if gpus is not None else "",
        cores=usable_cores(),
        clock=time.time(),
        shm_free=_free("/dev/shm"),
        temp_free=temp_free,
        temp_problem=temp_problem,
        reached_at=_ssh_connection(2),
        reached_from=_ssh_connection(0),
        addresses=tuple(f"{name}={address}" for name, address in list_addresses()),
        left=_count_left(question.before),
    )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _runtime_version() -> str:
    """Of zrun_runtime, which comes with zrun. Without importing it: that would load torch."""
    if util.find_spec("zrun_runtime") is None:
        return ""
    return _version("zrun") or zrun.__version__  # the latter: run from its sources


def _directory(path: str) -> str:
    if not os.path.isdir(path):
        return f"there is no directory {path}"
    return "" if os.access(path, os.R_OK | os.X_OK) else f"the directory {path} cannot be entered"


def _script(question: Look) -> tuple[str, str]:
    """Hash, and what is wrong."""
    if question.program:
        found = shutil.which(
            os.path.join(question.cwd, question.program) if "/" in question.program else question.program
        )
        return "", "" if found else f"there is no program {question.program}"
    if not question.script:
        return "", ""
    path = os.path.join(question.cwd, question.script)
    if os.path.isdir(path):
        path = os.path.join(path, "__main__.py")
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest(), ""
    except OSError as error:
        return "", f"the script {path} cannot be read: {error.strerror}"


def _free(path: str) -> int:
    try:
        state = os.statvfs(path)
    except OSError:
        return -1
    return state.f_bavail * state.f_frsize


def _temp() -> tuple[int, str]:
    """Free space for temporary files, and what is wrong."""
    path = next((os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)), "/tmp")
    if not os.access(path, os.W_OK | os.X_OK):
        return -1, f"nothing can be written to {path}"
    return _free(path), ""


def _ssh_connection(at: int) -> str:
    words = os.environ.get("SSH_CONNECTION", "").split()
    return plain_address(words[at]) if len(words) == 4 else ""


def _count_left(job_id: str) -> int:
    """Processes that carry the mark of a job."""
    if not job_id:
        return 0
    mark, count = f"ZRUN_JOB_ID={job_id}".encode(), 0
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
                count += mark in file.readall().split(b"\0")
        except OSError:
            continue  # gone, or of another user
    return count


def _reach(question: Reach) -> Reached:
    try:
        with socket.create_connection((question.address, question.port), timeout=question.seconds) as sock:
            own = plain_address(sock.getsockname()[0])
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return Reached("", "", why)
    return Reached(interface_of(own), own)
