"""What the user said about SSH for all hosts. Apart from what uses it, which takes long to load."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SshOptions:
    """Options of zrun that concern SSH."""

    port: int | None = None
    config_file: str = ""  # empty: the user's and the system's
    accept_new: bool = False  # unknown host keys are taken and kept
    connect_timeout: float = 20.0  # seconds, for all of: name, TCP, keys, login
    lease: float = 30.0  # seconds without an acknowledgement after which a connection is dead
