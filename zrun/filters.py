"""Which hosts and slots take part: --include, --exclude, --num_nodes, --num_gpus. Pure.

`--include` and `--exclude` take `HOST[:SLOTS]`, joined with `@`: `worker-1:0,2@worker-2`. Further: ranges of slots
(`worker-1:0-3`), many hosts at once (`node-[1-4]`, `node-*`), and IPv6 addresses, in brackets before slots (`[::1]:0`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zrun.errors import UsageError
from zrun.hostfile import Host, read_ipv6
from zrun.hostlist import PatternError, expand, format_numbers, parse_numbers


@dataclass(frozen=True)
class Limits:
    """What the user asked for. Empty and None: everything."""

    include: str = ""
    exclude: str = ""
    num_nodes: int | None = None  # the first ones
    num_gpus: int | None = None  # the first slots of each host

    def __post_init__(self) -> None:
        """Raises UsageError for options that do not go together."""
        counts = {"--num_nodes": self.num_nodes, "--num_gpus": self.num_gpus}
        if self.include and self.exclude:
            raise UsageError("--include and --exclude do not go together", "name what shall take part, or what not")
        for option, text in (("--include", self.include), ("--exclude", self.exclude)):
            count = next((name for name, value in counts.items() if text and value is not None), None)
            if count is not None:
                hint = f"say it all with {option}, or leave it out"
                raise UsageError(f"{option} and {count} do not go together: both say what takes part", hint)


def limit_hosts(hosts: Sequence[Host], limits: Limits) -> tuple[Host, ...]:
    """The hosts that take part, in their order, with the slots that do.

    Raises:
        UsageError: naming the host and slot that are not there, and what is; or nothing is left.
    """
    if limits.include:
        return _include(hosts, limits.include)
    if limits.exclude:
        return _exclude(hosts, limits.exclude)
    left = tuple(host for host in hosts if host.slots > 0)
    if limits.num_nodes is not None:
        if limits.num_nodes > len(left):
            have = "hosts have" if len(left) > 1 else "host has"
            what = f"--num_nodes {limits.num_nodes}: only {len(left)} {have} slots"
            raise UsageError(what, f"with slots: {_name_all(left)}")
        left = left[: limits.num_nodes]
    if limits.num_gpus is not None:
        for host in left:
            if limits.num_gpus > host.slots:
                where = f" ({host.where})" if host.where else ""
                what = f"--num_gpus {limits.num_gpus} is more than {host.name} offers: slots={host.slots}{where}"
                raise UsageError(what, "ask for less, or name hosts and slots with --include")
        left = tuple(replace(host, slots=limits.num_gpus) for host in left)
    return left


def _include(hosts: Sequence[Host], text: str) -> tuple[Host, ...]:
    named = _read(hosts, text, "--include")
    wanted: dict[int, set[int]] = {}  # by place in `hosts`; empty: all
    for at, slots in named:
        wanted.setdefault(at, set()).update(slots)
    chosen = [_pick(host, wanted[at] or set(host.slot_numbers)) for at, host in enumerate(hosts) if at in wanted]
    return _refuse_nothing(chosen, f"--include {text}")


def _exclude(hosts: Sequence[Host], text: str) -> tuple[Host, ...]:
    left = {at: set(host.slot_numbers) for at, host in enumerate(hosts)}
    for at, slots in _read(hosts, text, "--exclude"):
        left[at] -= slots or left[at]
    return _refuse_nothing([_pick(host, left[at]) for at, host in enumerate(hosts)], f"--exclude {text}")


def _pick(host: Host, slots: set[int]) -> Host:
    return replace(host, slots=len(slots), picked=tuple(sorted(slots)))


def _refuse_nothing(hosts: Sequence[Host], option: str) -> tuple[Host, ...]:
    left = tuple(host for host in hosts if host.slots > 0)
    if not left:
        raise UsageError(f"{option} leaves no slot to start a worker on", f"the hosts are {_name_all(hosts)}")
    return left


def _read(hosts: Sequence[Host], text: str, option: str) -> Iterator[tuple[int, set[int]]]:
    """Place in `hosts` and slots (none: all of them) of everything that a filter names."""
    for item in text.split("@"):
        name, slots_text = _split(item.strip(), hosts, f"{option} {text}")
        try:
            slots = set(parse_numbers(slots_text)) if slots_text is not None else set()
            names = [name] if read_ipv6(name) else expand(name)
        except PatternError as error:
            raise UsageError(f"{option} {text}: {item!r}: {error.message}", "write host:0,2-3") from None
        for one in names:
            for at in _find(hosts, one, f"{option} {text}"):
                _check_slots(hosts[at], slots, f"{option} {text}")
                yield at, slots


def _split(item: str, hosts: Sequence[Host], option: str) -> tuple[str, str | None]:
    """Host and slots of one item; None for no slots."""
    if not item:
        raise UsageError(f"{option}: nothing stands before or behind an @", "write host:0,2@host2")
    bare = read_ipv6(item)
    if bare and (item.startswith("[") or any(host.name == bare for host in hosts)):
        return bare, None
    name, colon, slots = item.rpartition(":")
    if not colon:
        return item, None
    if not name:
        raise UsageError(f"{option}: {item!r} names no host", "write host:0,2")
    if ":" in name and not name.startswith("["):
        raise UsageError(f"{option}: {item!r}: where does the address end?", "write [::1]:0,2")
    return read_ipv6(name) or name, slots


def _find(hosts: Sequence[Host], name: str, option: str) -> list[int]:
    """Places of the hosts that a name or a pattern with `*` and `?` means."""
    pattern = re.escape(name).replace(r"\*", ".*").replace(r"\?", ".")
    found = [at for at, host in enumerate(hosts) if re.fullmatch(pattern, host.name, re.IGNORECASE)]
    if not found:
        near = difflib.get_close_matches(name, [host.name for host in hosts], n=1)
        user = next((host for host in hosts if host.user == name), None)
        if user is not None:
            hint = f"leave the user out, @ stands between hosts: {user.name}"
        else:
            hint = f"did you mean {near[0]}?" if near else f"the hosts are {_name_all(hosts)}"
        raise UsageError(f"{option}: there is no host {name!r}", hint)
    return found


def _check_slots(host: Host, slots: set[int], option: str) -> None:
    there = host.slot_numbers
    missing = sorted(slots.difference(there))
    if missing:
        where = f" ({host.where})" if host.where else ""
        what = f"{option}: {host.name} has no slot {format_numbers(missing)}"
        count = "1 slot" if host.slots == 1 else f"{host.slots} slots"
        raise UsageError(what, f"{host.name} has {count}{where}: {format_numbers(list(there)) or 'none'}")


def _name_all(hosts: Sequence[Host]) -> str:
    names = [host.name for host in hosts]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more
