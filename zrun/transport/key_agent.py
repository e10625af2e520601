"""The SSH agent that holds keys: that of SSH_AUTH_SOCK, or the one that IdentityAgent names."""

from __future__ import annotations

import os
import socket

import paramiko
from paramiko.agent import AgentSSH

NONE = "none"


class _AgentAt(AgentSSH):
    """The agent behind a socket. Without one that answers it holds no keys, as paramiko's own."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._sock = socket.socket(socket.AF_UNIX)
        try:
            self._sock.connect(path)
        except OSError:
            self._sock.close()
        else:
            self._connect(self._sock)  # type: ignore[attr-defined]  # the stubs leave it out

    def close(self) -> None:
        """Ends the connection."""
        self._close()  # type: ignore[attr-defined]  # the same
        self._sock.close()


def open_agent(place: str) -> paramiko.Agent | _AgentAt | None:
    """The agent at `place`, a value of IdentityAgent; empty for that of the environment. None if none is to be used."""
    if place.lower() == NONE:
        return None
    if place.startswith("$"):
        place = os.environ.get(place.strip("${}"), "")
    if place in ("", "SSH_AUTH_SOCK"):
        return paramiko.Agent()
    return _AgentAt(os.path.expanduser(place))
