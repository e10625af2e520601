"""How ranks are called: before their lines, and in sentences. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zrun.console.sanitize import clean_line
from zrun.hostlist import format_numbers
from zrun.job import JobView

WIDEST = 32  # columns of a prefix of several ranks; a longer one leaves out what it can


def short_names(hosts: tuple[str, ...]) -> dict[str, str]:
    """Each host's name without its domain, where the names stay different and none of them is an address."""
    short = {host: clean_line(host).split(".")[0] for host in hosts}
    plain = all(name and not name.isdigit() for name in short.values())
    return short if plain and len(set(short.values())) == len(hosts) else {host: clean_line(host) for host in hosts}


class Names:
    """The names of a job's ranks. Without a job there is one rank, of which nothing has to be said."""

    def __init__(self, job: JobView | None = None) -> None:
        self._world_size = job.world_size if job is not None else 1
        self._short = short_names(job.hosts if job is not None else ())
        self.width = max((len(self.prefix({host: [self._world_size - 1]})) for host in self._short), default=0)
        """Columns of the widest prefix of one rank."""

    def of(self, host: str, rank: int) -> str:
        """rank 3, or rank 3 on node-2 where there are several hosts."""
        return f"rank {rank} on {host}" if len(self._short) > 1 else f"rank {rank}"

    def prefix(self, ranks: Mapping[str, Sequence[int]]) -> str:
        """What stands before a line of these ranks, by host: nothing for the only rank of the job.

        [0-3,5] on one host, [node-1:0-3 node-2:4] on several. Where that is long the ranks alone, which say enough;
        where that is long too, how many.
        """
        if self._world_size == 1:
            return ""
        everyone = sorted(rank for of_host in ranks.values() for rank in of_host)
        numbers = format_numbers(everyone)
        if len(self._short) > 1:
            by_host = {host: sorted(of_host) for host, of_host in ranks.items()}
            parts = sorted(by_host, key=lambda host: by_host[host])
            named = " ".join(f"{self._short.get(host, host)}:{format_numbers(by_host[host])}" for host in parts)
            if len(everyone) == 1 or len(named) <= WIDEST:
                return f"[{named}]"
        return f"[{numbers}]" if len(numbers) <= WIDEST else f"[{len(everyone)} of {self._world_size} ranks]"
