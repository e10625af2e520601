"""Where a host is reached, and how: its line in the hostfile, the options of zrun, ssh_config, in that order.

paramiko reads ssh_config but leaves most of it to its user. What is not done here, though it would change who is
reached or how, is an error that names it: a setting that is silently ignored is worse than none.
"""

from __future__ import annotations

import getpass
import glob
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import paramiko

from zrun.errors import UsageError
from zrun.hostfile import Host, show_name
from zrun.transport.ssh_options import SshOptions

_KEY_NAMES = ("id_ed25519", "id_ecdsa", "id_rsa")
_MAX_INCLUDES = 16  # deep
_SYSTEM_FILE = "/etc/ssh/ssh_config"
_USER_FILE = "~/.ssh/config"
# Keyword -> values that change nothing here. With any other value it is refused.
_REFUSED: Mapping[str, tuple[str, ...]] = {
    "bindaddress": (),
    "bindinterface": ("none",),
    "certificatefile": ("none",),
    "knownhostscommand": ("none",),
    "pkcs11provider": ("none",),
    "proxyusefdpass": ("no",),
    "remotecommand": ("none",),
    "requesttty": ("no", "auto"),
    "securitykeyprovider": ("none", "internal"),
    "sessiontype": ("default",),
    "tunnel": ("no",),
}
# What a connection may use (zrun.transport.algorithms), by all names of it.
_ALGORITHMS: Mapping[str, str] = {
    "ciphers": "ciphers",
    "macs": "macs",
    "kexalgorithms": "kexalgorithms",
    "hostkeyalgorithms": "hostkeyalgorithms",
    "pubkeyacceptedkeytypes": "pubkeyacceptedalgorithms",
    "pubkeyacceptedalgorithms": "pubkeyacceptedalgorithms",
}
_SAFE_HOST = re.compile(r"[A-Za-z0-9_.:%][A-Za-z0-9_.:%-]*\Z")  # it goes into a user's ProxyCommand
_SAFE_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\+$-]*\Z")
_MATCH_EXEC = re.compile(r"(?i)\s*match\s(.*\s)?!?exec\s")
_EVERY_HOST: tuple[list[str], ...] = (
    [],
    ["host", "*"],
    ["match", "all"],
)  # the words of blocks in which an Include is as outside of blocks
_LINE = re.compile(r"\s*(?P<word>[A-Za-z0-9]+)\s*(?:=|\s)\s*(?P<rest>.*?)\s*\Z")


@dataclass(frozen=True)
class Target:
    """How one host is reached."""

    name: str  # as the hostfile calls it
    hostname: str  # where it is: a name or an address
    port: int
    user: str
    known_as: str  # in known_hosts
    known_hosts: tuple[str, ...]  # files; new keys go into the first one
    identity_files: tuple[str, ...]
    only_these: bool  # no other keys of the agent
    agent: str  # IdentityAgent; empty: the one of the environment
    proxy_command: str
    proxy_jump: str  # hosts, separated by commas
    family: str  # any, inet or inet6
    strict_words: str  # what ssh_config says about unknown keys, for an error that mentions it
    algorithms: tuple[tuple[str, str], ...] = ()  # keyword and list, as ssh_config has them
    config_file: str = ""  # of --ssh_config; empty: those that ssh reads by itself

    def command(self) -> str:
        """What a person types to see the same."""
        config = ("-F", self.config_file) if self.config_file else ()
        return shlex.join(["ssh", *config, "-p", str(self.port), f"{self.user}@{self.name}", "true"])

    def __str__(self) -> str:
        where = f"[{self.hostname}]" if ":" in self.hostname else self.hostname
        return f"{self.user}@{where}:{self.port}"


class SshConfig:
    """ssh_config as `ssh` would read it.

    Args:
        file: in place of the user's and the system's, as `ssh -F`.

    Raises:
        UsageError: it cannot be read or understood.
    """

    def __init__(self, file: str = "") -> None:
        self._file = file or _USER_FILE
        paths = [file] if file else [os.path.expanduser(_USER_FILE), _SYSTEM_FILE]
        if file and not os.path.isfile(file):
            raise UsageError(f"--ssh_config {file}: there is no such file")
        lines: list[str] = []
        for path in paths:
            if lines:
                lines.append("Match all")  # whatever block the first file ended in
            lines += _read(path, os.path.dirname(path), 0)
        lines = _finals_last(lines)
        executed = next((line.strip() for line in lines if _MATCH_EXEC.match(line)), None)
        if executed is not None:  # paramiko would do it, and take our stdin for it
            raise UsageError(
                f"ssh_config ({self._file}): zrun cannot do `{executed}`", "give --ssh_config a file without it"
            )
        try:
            self._config = paramiko.SSHConfig.from_text("\n".join(lines))
        except paramiko.ConfigParseError as error:
            raise UsageError(f"ssh_config ({self._file}): {error}") from None

    def target(self, host: Host, options: SshOptions) -> Target:
        """How `host` is reached.

        Raises:
            UsageError: a setting for it that cannot be honoured.
        """
        if not _SAFE_HOST.match(host.name) or (host.user and not _SAFE_USER.match(host.user)):
            raise UsageError(f"{show_name(host)!r} cannot be the name of a host or user for SSH")
        found = self._lookup(host.name)
        self._refuse(host.name, found)
        hostname = found.get("hostname", host.name)
        user = host.user or found.get("user", "") or getpass.getuser()
        port = host.port or options.port or self._port(host.name, found)
        own_files = _paths(found.get("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2"))
        all_files = _paths(found.get("globalknownhostsfile", "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"))
        jump = found.get("proxyjump", "none")
        return Target(
            name=host.name,
            hostname=hostname,
            port=port,
            user=user,
            known_as=found.get("hostkeyalias", hostname),
            known_hosts=(*own_files, *all_files),
            identity_files=_identities(found),
            only_these=found.get("identitiesonly", "no").lower() in ("yes", "true"),
            agent=found.get("identityagent", ""),
            proxy_command=self._proxy_command(found, hostname, port, user),
            proxy_jump="" if jump.lower() == "none" else jump,
            family=found.get("addressfamily", "any").lower(),
            strict_words=found.get("stricthostkeychecking", ""),
            algorithms=tuple((known, found[word]) for word, known in _ALGORITHMS.items() if word in found),
            config_file="" if self._file == _USER_FILE else self._file,
        )

    def _lookup(self, name: str) -> paramiko.SSHConfigDict:
        try:
            return self._config.lookup(name)
        except (paramiko.SSHException, KeyError, ValueError) as error:
            raise UsageError(f"ssh_config for {name}: {error}") from None

    def _port(self, name: str, found: Mapping[str, str]) -> int:
        text = found.get("port", "22")
        if not text.isdecimal() or not 0 < int(text) < 65536:
            raise UsageError(f"ssh_config for {name}: {text!r} is not a port")
        return int(text)

    def _refuse(self, name: str, found: Mapping[str, str]) -> None:
        for word, harmless in _REFUSED.items():
            value = found.get(word)
            if value is not None and value.lower() not in harmless:
                raise UsageError(
                    f"ssh_config ({self._file}) for {name}: zrun cannot do {word} {value}",
                    f"give --ssh_config a file without it; it may `Include {self._file}` after a Host {name} block",
                )

    def _proxy_command(self, found: Mapping[str, str], hostname: str, port: int, user: str) -> str:
        """The user's command; paramiko has put in what it knows, but not the port that zrun was told."""
        command = found.get("proxycommand") or ""
        for token, value in (("%h", hostname), ("%p", str(port)), ("%r", shlex.quote(user))):
            command = command.replace(token, value)
        return command


def _identities(found: Mapping[str, object]) -> tuple[str, ...]:
    named = found.get("identityfile")
    if isinstance(named, list):
        return tuple(os.path.expanduser(path) for path in named if path.lower() != "none")
    return tuple(os.path.expanduser(f"~/.ssh/{name}") for name in _KEY_NAMES)


def _paths(text: str) -> tuple[str, ...]:
    return tuple(os.path.expanduser(path) for path in text.split() if path.lower() != "none")


def _read(path: str, base: str, depth: int) -> list[str]:
    """The lines of a file, with what it includes in place."""
    if depth > _MAX_INCLUDES:
        raise UsageError(f"{path}: files include each other more than {_MAX_INCLUDES} deep")
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UsageError(f"ssh_config {path} cannot be read: {error.strerror}") from None
    lines: list[str] = []
    block = ""
    for line in text.splitlines():
        match = _LINE.match(line)
        word = match["word"].lower() if match else ""
        if word in ("host", "match"):
            block = line
        if match is None or word != "include":
            lines.append(line)
            continue
        for included in _included(match["rest"], base):
            inner = _read(included, base, depth + 1)
            if block.lower().split() not in _EVERY_HOST and any(
                m["word"].lower() in ("host", "match") for m in map(_LINE.match, inner) if m
            ):
                raise UsageError(f"{path}: zrun cannot include {included}, which has blocks, inside of a block")
            lines += [*inner, block or "Match all"]
    return lines


def _finals_last(lines: Sequence[str]) -> list[str]:
    """The lines with `Match final` blocks at the end, where ssh comes to them, as blocks that paramiko knows."""
    rest: list[str] = []
    last: list[str] = []
    into = rest
    for line in lines:
        match = _LINE.match(line)
        if match and match["word"].lower() in ("host", "match"):
            words = match["rest"].split()
            is_final = match["word"].lower() == "match" and "final" in map(str.lower, words)
            into = last if is_final else rest
            if is_final:
                others = [word for word in words if word.lower() != "final"]
                line = f"Match {' '.join(others) or 'all'}"
        into.append(line)
    return rest + last


def _included(text: str, base: str) -> list[str]:
    try:
        patterns = shlex.split(text)
    except ValueError:
        raise UsageError(f"ssh_config: Include {text}: an open quote") from None
    places = [os.path.join(base, os.path.expanduser(pattern)) for pattern in patterns]
    return [path for place in places for path in sorted(glob.glob(place))]
