"""Hosts and what each offers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """One machine of a job. Two hosts of the same name are two agents on that machine."""

    name: str
    slots: int  # ranks to start there
    devices: tuple[str, ...] = ()  # entries for CUDA_VISIBLE_DEVICES, one a slot; empty on the CPU
    user: str = ""  # empty: as ssh_config says, else the user here
    port: int | None = None  # of its SSH server; None: as --ssh_port or ssh_config says, else 22
    python: str = ""  # its interpreter; empty: the path of ours
    addr: str = ""  # where rank 0 listens, should it be the first host; empty: found out
