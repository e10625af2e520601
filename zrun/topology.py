"""Hosts -> the ranks of a job, in order: hosts as given, then slots. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zrun.errors import UsageError
from zrun.hostfile import Host


@dataclass(frozen=True)
class RankAssignment:
    """Where one rank runs."""

    rank: int
    node_rank: int
    local_rank: int
    host: str
    device: str  # an entry for CUDA_VISIBLE_DEVICES, or "cpu"


def assign_ranks(hosts: Sequence[Host]) -> tuple[RankAssignment, ...]:
    """Every rank of a job on `hosts`. A host without slots takes part in nothing.

    Raises:
        UsageError: no host has a slot.
    """
    places = [
        (node_rank, local_rank, host)
        for node_rank, host in enumerate(used_hosts(hosts))
        for local_rank in range(host.slots)
    ]
    return tuple(
        RankAssignment(rank, node_rank, local_rank, host.name, host.devices[local_rank] if host.devices else "cpu")
        for rank, (node_rank, local_rank, host) in enumerate(places)
    )


def used_hosts(hosts: Sequence[Host]) -> tuple[Host, ...]:
    """The hosts with at least one slot, in order.

    Raises:
        UsageError: there is none.
    """
    used = tuple(host for host in hosts if host.slots > 0)
    if not used:
        raise UsageError("no host has a slot, so there is nothing to start", "give at least one host slots=1 or more")
    return used


def give_devices(hosts: Sequence[Host], here: Sequence[bool], visible: Sequence[str]) -> tuple[Host, ...]:
    """The hosts with a device for each slot. Slot N is device N; of this machine, the one in place N of `visible`.

    Args:
        here: of each host, whether it is this machine.
        visible: entries for CUDA_VISIBLE_DEVICES that this machine has to offer.

    Raises:
        UsageError: this machine has fewer than it has slots.
    """
    given = []
    for host, is_here in zip(hosts, here, strict=True):
        slots = host.slot_numbers
        missing = [slot for slot in slots if is_here and slot >= len(visible)]
        if missing:
            where = f" ({host.where})" if host.where else ""
            raise UsageError(
                f"{host.name}{where} is this machine, and there is no GPU for its slot {missing[0]}: "
                f"it has {len(visible)} to offer",
                "say fewer slots, or use --device cpu; CUDA_VISIBLE_DEVICES counts too",
            )
        devices = tuple(visible[slot] if is_here else str(slot) for slot in slots)
        given.append(replace(host, devices=devices))
    return tuple(given)


def rank_table(ranks: Sequence[RankAssignment]) -> str:
    """The ranks as a table of plain text, for --dry_run."""
    head = ("rank", "host", "node", "local rank", "device")
    rows = [head] + [(str(r.rank), r.host, str(r.node_rank), str(r.local_rank), r.device) for r in ranks]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
