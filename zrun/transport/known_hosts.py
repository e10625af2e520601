"""The keys by which SSH hosts are known: read as OpenSSH reads them, extended by a line at a time, never rewritten."""

from __future__ import annotations

import base64
import fcntl
import fnmatch
import hashlib
import hmac
import os
from collections.abc import Iterable
from dataclasses import dataclass

from zrun.errors import UsageError

_DEFAULT_PORT = 22


@dataclass(frozen=True)
class HostKey:
    """One line of a known_hosts file."""

    marker: str  # "", "@revoked" or "@cert-authority"
    names: str  # comma-separated patterns, or one hashed name
    kind: str  # ssh-ed25519, ssh-rsa, ...
    key: str  # base64
    where: str  # file:line


class KnownHosts:
    """What some known_hosts files say.

    Args:
        paths: files; those that do not exist say nothing.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._keys = [key for path in paths for key in _read(path)]

    def find(self, host: str, port: int) -> list[HostKey]:
        """The keys of a host, those of authorities and revoked ones not among them."""
        found = [key for key in self._keys if not key.marker and matches(key.names, known_as(host, port))]
        return found or [key for key in self._keys if not key.marker and matches(key.names, host)]

    def revoked(self, key: str) -> HostKey | None:
        """The line that revokes a key, if there is one."""
        return next((k for k in self._keys if k.marker == "@revoked" and k.key == key), None)

    def authority(self, host: str, port: int) -> HostKey | None:
        """A line that trusts whatever an authority has signed for this host."""
        marked = (k for k in self._keys if k.marker == "@cert-authority")
        return next((k for k in marked if matches(k.names, known_as(host, port))), None)


def known_as(host: str, port: int) -> str:
    """The name under which a host stands in known_hosts."""
    return host if port == _DEFAULT_PORT else f"[{host}]:{port}"


def matches(names: str, name: str) -> bool:
    """Whether the first field of a line means `name`."""
    if names.startswith("|1|"):
        return _matches_hash(names, name)
    found = False
    for pattern in names.lower().split(","):
        negated = pattern.startswith("!")
        # Brackets are part of a name here and no set of characters.
        if fnmatch.fnmatchcase(name.lower(), pattern.lstrip("!").replace("[", "[[]")):
            if negated:
                return False
            found = True
    return found


def _matches_hash(names: str, name: str) -> bool:
    try:
        salt, digest = (base64.b64decode(part) for part in names.split("|")[2:4])
    except ValueError:
        return False
    return hmac.compare_digest(hmac.new(salt, name.lower().encode(), hashlib.sha1).digest(), digest)


def add_line(path: str, host: str, port: int, kind: str, key: str) -> bool:
    """Appends a key, unless the host has come to be known in the meantime.

    Returns:
        False if the host is known by now, whatever its key.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        if os.path.dirname(path):
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with open(path, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if path != os.devnull and KnownHosts([path]).find(host, port):
                return False
            if file.tell() and os.fstat(file.fileno()).st_size:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(f"{known_as(host, port)} {kind} {key}\n".encode())
    except OSError as error:
        raise UsageError(f"--host_key accept-new cannot write {path}: {error.strerror}") from None
    return True


def _read(path: str) -> list[HostKey]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read().split("\n")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UsageError(f"the file of known SSH hosts {path} cannot be read: {error.strerror}") from None
    keys = []
    for number, line in enumerate(lines, 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        marker = fields.pop(0) if fields[0].startswith("@") else ""
        if len(fields) >= 3:
            keys.append(HostKey(marker, fields[0], fields[1], fields[2], f"{path}:{number}"))
    return keys
