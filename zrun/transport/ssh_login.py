"""From a target to an SSH session that is logged in: connect, verify the host's key, offer ours."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import logging
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import paramiko

from zrun.errors import HostLostError
from zrun.hostfile import Host
from zrun.transport.algorithms import may_sign, open_transport
from zrun.transport.jumps import Jumps, parse_jump
from zrun.transport.key_agent import open_agent
from zrun.transport.known_hosts import KnownHosts, add_line, known_as
from zrun.transport.ssh_config import SshConfig, Target
from zrun.transport.ssh_options import SshOptions

_MAX_JUMPS = 8
_PROXY_SECONDS = 2.0  # for a ProxyCommand to end
_FAMILIES = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}

# paramiko tells of every failure through logging as well; whoever wants that attaches a handler of their own.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class Session:
    """One SSH connection that is logged in. Several programs may be run over it."""

    def __init__(self, target: Target, transport: paramiko.Transport, peer: str, below: Way) -> None:
        self.target = target
        self.transport = transport
        self.peer = peer  # the address that was connected to; empty if only a proxy knows
        self._below = below

    @property
    def alive(self) -> bool:
        """It has not ended, as far as is known."""
        return bool(self.transport.is_active())

    def close(self) -> None:
        self.transport.close()
        self._below.close()


@dataclass
class Way:
    """What carries the bytes of a session: a socket, a program, or a channel of another session."""

    sock: socket.socket | paramiko.Channel
    peer: str = ""
    program: subprocess.Popen[bytes] | None = None
    words: BinaryIO | None = None  # what the program said on stderr

    def close(self) -> None:
        self.sock.close()
        if self.program is not None:
            self.program.terminate()
            try:
                self.program.wait(_PROXY_SECONDS)
            except subprocess.TimeoutExpired:
                self.program.kill()
                self.program.wait()
        if self.words is not None:
            self.words.close()

    def complaint(self) -> str:
        """What the program that makes the way has to say."""
        if self.words is None:
            return ""
        self.words.seek(0)
        text = self.words.read(1024).decode("utf-8", "replace").strip()
        return f": {text.splitlines()[-1]}" if text else ""


class SshLogin:
    """Logs in. One object for all hosts; its methods may be called from many threads.

    Raises:
        UsageError: ssh_config cannot be understood.
    """

    def __init__(self, options: SshOptions) -> None:
        self._options = options
        self._config = SshConfig(options.config_file)
        self._known: dict[tuple[str, ...], KnownHosts] = {}
        self._lock = threading.Lock()
        self._jumps: Jumps[Session] = Jumps()

    def target(self, host: Host) -> Target:
        """How a host is reached.

        Raises:
            UsageError: ssh_config asks for something that cannot be honoured.
        """
        return self._config.target(host, self._options)

    def connect(self, target: Target) -> Session:
        """A session with `target`, made within the time for connecting.

        Raises:
            HostLostError: it cannot be reached, is not who it should be, or does not let us in.
        """
        return self._connect(target, time.monotonic() + self._options.connect_timeout, 0)

    def close(self) -> None:
        """Ends the connections to hosts that others lie behind. The sessions are their owners'."""
        self._jumps.close()

    def _connect(self, target: Target, until: float, depth: int) -> Session:
        way = self._find_way(target, until, depth)
        try:
            transport = open_transport(way.sock, target)
            transport.daemon = True
            try:
                self._handshake(transport, target, until, way)
                self._verify(transport, target)
                _log_in(transport, target, until)
            except BaseException:
                transport.close()
                raise
        except BaseException:
            way.close()
            raise
        return Session(target, transport, way.peer, way)

    # ---- the way ---------------------------------------------------------------------------------------------------

    def _find_way(self, target: Target, until: float, depth: int) -> Way:
        if target.proxy_jump:
            return self._jump(target, until, depth)
        if target.proxy_command:
            return _run_proxy(target)
        sock = _dial(target, until)
        milliseconds = int(1000 * self._options.lease)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return Way(sock, sock.getpeername()[0])

    def _jump(self, target: Target, until: float, depth: int) -> Way:
        """Through the last of the hosts to jump over; the ones before lead to that one."""
        *before, last = target.proxy_jump.split(",")
        if depth + len(before) >= _MAX_JUMPS:
            raise HostLostError(
                f"{target}: ProxyJump leads over more than {_MAX_JUMPS} hosts", "does it go in circles?"
            )
        jump = self.target(parse_jump(last))
        if before:
            jump = dataclasses.replace(jump, proxy_jump=",".join(before))
        try:
            session = self._jumps.get(jump, until, lambda: self._connect(jump, until, depth + 1))
        except HostLostError as error:
            raise HostLostError(f"{target} lies behind {jump}: {error.message}", error.hint) from None
        try:
            place = (target.hostname, target.port)
            channel = session.transport.open_channel("direct-tcpip", place, ("127.0.0.1", 0), timeout=_left(until))
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise HostLostError(
                f"{jump} cannot connect to {target.hostname}:{target.port}: {text_of(error)}", target.command()
            ) from None
        return Way(channel)

    # ---- who is there ----------------------------------------------------------------------------------------------

    def _handshake(self, transport: paramiko.Transport, target: Target, until: float, way: Way) -> None:
        kinds = [key.kind for key in self._known_hosts(target).find(target.known_as, target.port)]
        options = transport.get_security_options()
        options.key_types = sorted(options.key_types, key=lambda kind: not _speaks_for(kind, kinds))
        transport.banner_timeout = transport.handshake_timeout = _left(until)
        try:
            transport.start_client(timeout=_left(until))
        except (paramiko.SSHException, OSError, EOFError) as error:
            words = text_of(error)
            if time.monotonic() >= until - 0.5:
                raise self._too_late(target) from None
            raise HostLostError(
                f"no SSH server answers at {target}: {words}{way.complaint()}", f"try: {target.command()}"
            ) from None
        if not transport.initial_kex_done:
            raise self._too_late(target)

    def _too_late(self, target: Target) -> HostLostError:
        return HostLostError(
            f"{target} accepts the connection but says nothing for {self._options.connect_timeout:g} s",
            f"try: {target.command()}; --connect_timeout gives it more time",
        )

    def _verify(self, transport: paramiko.Transport, target: Target) -> None:
        key = transport.get_remote_server_key()
        known = self._known_hosts(target)
        name = known_as(target.known_as, target.port)
        text, shown = key.get_base64(), fingerprint(key)
        revoked = known.revoked(text)
        if revoked is not None:
            raise HostLostError(f"the key of {target} is revoked by {revoked.where}", "do not connect to it")
        lines = known.find(target.known_as, target.port)
        if any(line.key == text for line in lines):
            return
        same = [line for line in lines if line.kind == key.get_name()] or lines
        if same:
            path = same[0].where.rpartition(":")[0]
            raise HostLostError(
                f"the host key of {target} has CHANGED: it shows {key.get_name()} {shown}, "
                f"{same[0].where} has another. The host was set up anew, or somebody sits in between",
                f"only if you know why it changed: ssh-keygen -f {path} -R '{name}', then {target.command()}",
            )
        if not self._options.accept_new and target.strict_words.lower() != "accept-new":
            raise _unknown_key(target, known, f"{key.get_name()} {shown}")
        if not target.known_hosts:
            raise HostLostError(f"there is no file to keep the key of {target} in", "see UserKnownHostsFile")
        with self._lock:
            added = add_line(target.known_hosts[0], target.known_as, target.port, key.get_name(), text)
        if not added and not any(
            line.key == text for line in KnownHosts(target.known_hosts).find(target.known_as, target.port)
        ):
            raise HostLostError(f"the key of {target} became known while it showed another: {shown}", target.command())

    def _known_hosts(self, target: Target) -> KnownHosts:
        with self._lock:
            if target.known_hosts not in self._known:
                self._known[target.known_hosts] = KnownHosts(target.known_hosts)
            return self._known[target.known_hosts]


def _unknown_key(target: Target, known: KnownHosts, shown: str) -> HostLostError:
    files = " or ".join(target.known_hosts[:2]) or "any file"
    authority = known.authority(target.known_as, target.port)
    if authority is not None:
        return HostLostError(
            f"the host key of {target} ({shown}) is not in {files}; zrun cannot use the authority in {authority.where}",
            f"add the key itself: {target.command()} shows it, or --host_key accept-new takes it",
        )
    why = f" (StrictHostKeyChecking {target.strict_words} is not honoured)" if target.strict_words == "no" else ""
    return HostLostError(
        f"the host key of {target} is not known: {shown} is not in {files}{why}",
        f"{target.command()} asks and keeps it, or --host_key accept-new takes it",
    )


def _speaks_for(algorithm: str, kinds: list[str]) -> bool:
    """Whether an algorithm would show a key of a kind that we know the host by."""
    return algorithm in kinds or (algorithm.startswith("rsa-sha2-") and "ssh-rsa" in kinds)


def fingerprint(key: paramiko.PKey) -> str:
    """As ssh-keygen -l shows it."""
    digest = hashlib.sha256(key.asbytes()).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


# ---- the login -----------------------------------------------------------------------------------------------------


def _log_in(transport: paramiko.Transport, target: Target, until: float) -> None:
    tried: list[str] = []
    try:
        for name, key in _keys(target, tried):
            if not may_sign(target, key.get_name()):
                tried.append(f"not {name} (PubkeyAcceptedAlgorithms)")
                continue
            transport.auth_timeout = _left(until)
            tried.append(name)
            try:
                more = transport.auth_publickey(target.user, key)
            except paramiko.BadAuthenticationType as error:
                kinds = ", ".join(error.allowed_types)
                raise HostLostError(
                    f"{target} takes no keys, only: {kinds}", f"zrun logs in with keys; try: {target.command()}"
                ) from None
            except paramiko.AuthenticationException as error:
                if time.monotonic() >= until - 0.5:
                    raise HostLostError(f"{target} does not answer the login: {error}", target.command()) from None
                continue
            if transport.is_authenticated():
                return
            raise HostLostError(
                f"{target} wants more than a key: {', '.join(more)}", f"zrun cannot do that; try: {target.command()}"
            )
    except (paramiko.SSHException, OSError, EOFError) as error:
        tried.append(f"then it hung up ({text_of(error)})")
    keys = "; ".join(tried) or "no key was found"
    raise HostLostError(f"{target} refuses the login. Tried: {keys}", f"try: {target.command()}")


def _keys(target: Target, tried: list[str]) -> Iterator[tuple[str, paramiko.PKey]]:
    """Keys to offer, with names for people. What cannot be offered is added to `tried`."""
    files = [(path, key) for path in target.identity_files if (key := _load(path, tried)) is not None]
    agent = open_agent(target.agent)
    try:
        held = list(agent.get_keys()) if agent is not None else []
        named = {_public_of(path) for path in target.identity_files} - {""}
        for key in held:
            if key.get_base64() in named:
                yield f"{fingerprint(key)} of the agent", key
        yield from files
        for key in held:
            if not target.only_these and key.get_base64() not in named:
                yield f"{fingerprint(key)} of the agent", key
    except paramiko.SSHException as error:
        tried.append(f"the agent ({error})")
    finally:
        if agent is not None:
            agent.close()


def _load(path: str, tried: list[str]) -> paramiko.PKey | None:
    if not os.path.exists(path):
        return None
    try:
        return paramiko.PKey.from_path(path)
    except paramiko.PasswordRequiredException:
        tried.append(f"{path} (needs its passphrase: ssh-add {path})")
    except TypeError:  # how cryptography says the same of some formats
        tried.append(f"{path} (needs its passphrase: ssh-add {path})")
    except (paramiko.SSHException, OSError, ValueError, paramiko.pkey.UnknownKeyType) as error:
        tried.append(f"{path} ({text_of(error)})")
    return None


def _public_of(path: str) -> str:
    """The public half beside a private key, so that its twin in the agent is recognised."""
    try:
        with open(path + ".pub", encoding="utf-8", errors="replace") as file:
            fields = file.read(64 * 1024).split()
    except OSError:
        return ""
    return fields[1] if len(fields) > 1 else ""


# ---- sockets -------------------------------------------------------------------------------------------------------


def _dial(target: Target, until: float) -> socket.socket:
    family = _FAMILIES.get(target.family, socket.AF_UNSPEC)
    try:
        places = socket.getaddrinfo(target.hostname, target.port, family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise HostLostError(
            f"there is no host {target.hostname}: {why}", "is it spelt right? An address works without DNS"
        ) from None
    problem = "no address"
    for kind, _, _, _, place in places:
        sock = socket.socket(kind, socket.SOCK_STREAM)
        sock.settimeout(_left(until))
        try:
            sock.connect(place)
        except OSError as error:
            problem = "no answer in time" if isinstance(error, TimeoutError) else error.strerror or str(error)
            sock.close()
        else:
            sock.settimeout(None)
            return sock
    raise HostLostError(f"{target} cannot be reached: {problem}", f"try: {target.command()}")


def _run_proxy(target: Target) -> Way:
    """ProxyCommand, run by a shell as ssh does, with a socket as its stdin and stdout."""
    ours, its = socket.socketpair()
    words: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the way
    with its:
        program = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {target.proxy_command}"],
            stdin=its.fileno(),
            stdout=its.fileno(),
            stderr=words,
            start_new_session=True,
        )
    return Way(ours, program=program, words=words)


def _left(until: float) -> float:
    """Seconds that are left, and a little if none are: a timeout of 0 would mean not to wait at all."""
    return max(0.05, until - time.monotonic())


def text_of(error: BaseException) -> str:
    """What went wrong with a connection, in words; many of these errors have none."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, EOFError) or not str(error):
        return "the connection was closed"
    return getattr(error, "strerror", None) or str(error)
