"""Hosts and what each offers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """One machine of a job. Two hosts of the same name are two agents on that machine."""

    name: str
    slots: int  # ranks to start there
    devices: tuple[str, ...] = ()  # entries for CUDA_VISIBLE_DEVICES, one a slot; empty on the CPU
