"""Where ranks meet: an address of rank 0 that all hosts can reach, and the interface of each that leads there. Pure."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from zrun.fitness import Witness
from zrun.interfaces import IFNAMES
from zrun.prepare import Job


@dataclass(frozen=True)
class Meeting:
    """What was found out."""

    address: str
    port: int
    interfaces: tuple[str, ...]  # one a host; empty where it has no name


def candidates(witnesses: Sequence[Witness], peer: str, here: Sequence[bool]) -> list[str]:
    """Addresses of the first host, the likeliest first.

    Args:
        witnesses: of all hosts.
        peer: the address at which the first host was connected to; empty if that is not known.
        here: of each host, whether it is this machine.
    """
    if all(here):
        return ["127.0.0.1"]
    first = witnesses[0]
    if here[0]:
        found = [witness.facts.reached_from for witness, is_here in zip(witnesses, here, strict=True) if not is_here]
    else:
        found = [first.facts.reached_at, peer]
    found += [address for _, address in addresses_of(first)]
    one_machine = all(
        is_loopback(w.facts.reached_at) for w, is_here in zip(witnesses, here, strict=True) if not is_here
    )
    usable = [address for address in found if address and (one_machine or not is_loopback(address))]
    return [address for address in dict.fromkeys(usable) if not is_link_local(address)]


def addresses_of(witness: Witness) -> list[tuple[str, str]]:
    """Interface and address of all that a host has, IPv4 first."""
    pairs = [(name, address) for name, _, address in (text.partition("=") for text in witness.facts.addresses)]
    return sorted(pairs, key=lambda pair: ":" in pair[1])


def is_loopback(address: str) -> bool:
    """Whether an address means the machine that uses it."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def is_link_local(address: str) -> bool:
    """Whether an address means something only together with an interface."""
    try:
        return ipaddress.ip_address(address).is_link_local
    except ValueError:
        return False


def with_meeting(job: Job, meeting: Meeting, kind: tuple[str, str], witnesses: Sequence[Witness]) -> Job:
    """The job with what was found out about its hosts.

    Args:
        kind: device and backend.
        witnesses: of all hosts.
    """
    device, backend = kind
    specs = []
    for host, spec, witness, interface in zip(job.hosts, job.specs, witnesses, meeting.interfaces, strict=True):
        told = {name: interface for name in IFNAMES if interface and name not in spec.environment}
        devices = tuple(witness.facts.gpus[slot] for slot in host.slot_numbers) if device == "cuda" else ()
        is_python = bool(host.python) and spec.command[0] == host.python
        specs.append(
            dataclasses.replace(
                spec,
                master_addr=meeting.address,
                master_port=meeting.port,
                device=device,
                backend=backend,
                devices=devices,
                command=(witness.facts.executable, *spec.command[1:]) if is_python else spec.command,
                environment={**spec.environment, **told},
            )
        )
    place = f"[{meeting.address}]" if ":" in meeting.address else meeting.address
    view = dataclasses.replace(job.view, master=f"{place}:{meeting.port}", device=device, backend=backend)
    skews = tuple(witness.skew for witness in witnesses)
    return dataclasses.replace(job, specs=tuple(specs), view=view, skews=skews)
