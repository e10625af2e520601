"""The algorithms that ssh_config leaves a connection: Ciphers, MACs and kin, which whole distributions set."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

import paramiko

from zrun.errors import HostLostError
from zrun.transport.ssh_config import Target

# Keyword -> what paramiko calls it.
_OPTIONS: Mapping[str, str] = {
    "ciphers": "ciphers",
    "macs": "digests",
    "kexalgorithms": "kex",
    "hostkeyalgorithms": "key_types",
}
_SIGNATURES = "pubkeyacceptedalgorithms"
_KNOWN_SIGNATURES = (
    *("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521"),
    *("rsa-sha2-512", "rsa-sha2-256", "ssh-rsa", "ssh-dss"),
)


def choose(known: Sequence[str], text: str) -> tuple[str, ...]:
    """What a list of ssh_config leaves of the algorithms that are known, in its order.

    A list after `-` is of those that are out. One after `+` or `^` restricts nothing.
    """
    if text.startswith(("+", "^")):
        return tuple(known)
    patterns = text.lstrip("-").split(",")
    if text.startswith("-"):
        return tuple(name for name in known if not any(fnmatch.fnmatchcase(name, p) for p in patterns))
    found = [name for pattern in patterns for name in known if fnmatch.fnmatchcase(name, pattern)]
    return tuple(dict.fromkeys(found))


def may_sign(target: Target, kind: str) -> bool:
    """Whether a key of a kind, such as ssh-rsa, may be offered."""
    text = dict(target.algorithms).get(_SIGNATURES, "*")
    names = ("rsa-sha2-512", "rsa-sha2-256", kind) if kind == "ssh-rsa" else (kind,)
    return bool(choose(names, text))


def open_transport(sock: paramiko.transport._SocketLike, target: Target) -> paramiko.Transport:
    """A transport over `sock` that speaks as `target` is to be spoken to.

    Raises:
        HostLostError: of the algorithms that it may use we know none.
    """
    wanted = dict(target.algorithms)
    signatures = choose(_KNOWN_SIGNATURES, wanted.get(_SIGNATURES, "*"))
    refused = [name for name in _KNOWN_SIGNATURES if name not in signatures]
    transport = paramiko.Transport(sock, disabled_algorithms={"pubkeys": refused})
    options = transport.get_security_options()
    for word, attribute in _OPTIONS.items():
        known = getattr(options, attribute)
        left = choose(known, wanted.get(word, "*"))
        if not left:
            transport.close()
            raise HostLostError(
                f"ssh_config restricts {word} for {target.name} to {wanted[word]}, of which zrun has none",
                f"it has {', '.join(known)}; give --ssh_config a file that allows one of them",
            )
        setattr(options, attribute, left)
    return transport
