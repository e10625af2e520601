"""Which CPU cores each rank of a host gets, for --bind_cores_to_rank."""

from __future__ import annotations

import functools
import glob
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from zrun.devices import usable_cores


@dataclass(frozen=True, order=True)
class Core:
    """One physical core, in the order in which neighbours share most."""

    node: int  # of memory (NUMA)
    package: int
    number: int  # in its package
    cpus: tuple[int, ...] = ()  # its hardware threads that may be used


@dataclass(frozen=True)
class Share:
    """What one rank is bound to."""

    cpus: frozenset[int]
    cores: int  # physical ones among them, at least 1


def plan_cores(cores: Sequence[Core], ranks: int) -> tuple[Share, ...]:
    """A share of the cores for each rank: neighbours, as equal as can be, hardware threads of a core together.

    With fewer cores than ranks, their hardware threads are dealt out, and with fewer of those the ranks take turns.
    """
    ordered = sorted(cores)
    if len(ordered) >= ranks:
        cuts = [len(ordered) * rank // ranks for rank in range(ranks + 1)]
        parts = [ordered[low:high] for low, high in itertools.pairwise(cuts)]
        return tuple(Share(frozenset(cpu for core in part for cpu in core.cpus), len(part)) for part in parts)
    cpus = [cpu for core in ordered for cpu in core.cpus]
    if len(cpus) >= ranks:
        cuts = [len(cpus) * rank // ranks for rank in range(ranks + 1)]
        return tuple(Share(frozenset(cpus[low:high]), 1) for low, high in itertools.pairwise(cuts))
    return tuple(Share(frozenset([cpus[rank % len(cpus)]]), 1) for rank in range(ranks))


@contextmanager
def bound(local_rank: int, ranks: int) -> Iterator[int]:
    """Binds this thread, and so what it starts, to the share of one rank of this host.

    Yields:
        the threads that a rank can use: its cores, or its part of the quota of our cgroup if that is less.
    """
    before, quota = os.sched_getaffinity(0), usable_cores() // ranks
    share = plan_cores(find_cores(frozenset(before)), ranks)[local_rank]
    os.sched_setaffinity(0, share.cpus)
    try:
        yield max(1, min(share.cores, quota))
    finally:
        os.sched_setaffinity(0, before)


@functools.lru_cache(maxsize=1)
def find_cores(usable: frozenset[int]) -> tuple[Core, ...]:
    """The cores that have at least one of the hardware threads in `usable`."""
    cpus: dict[tuple[int, int, int], list[int]] = {}
    for cpu in sorted(usable):
        base = f"/sys/devices/system/cpu/cpu{cpu}"
        nodes = glob.glob(f"{base}/node[0-9]*")
        node = int(os.path.basename(nodes[0])[4:]) if nodes else 0
        package = _read(f"{base}/topology/physical_package_id", 0)
        number = _read(f"{base}/topology/core_id", cpu)
        cpus.setdefault((node, package, number), []).append(cpu)
    return tuple(Core(*place, tuple(threads)) for place, threads in sorted(cpus.items()))


def _read(path: str, default: int) -> int:
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):
        return default
