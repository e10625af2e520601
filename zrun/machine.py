"""Which of the hosts is this machine: names and addresses that mean it, found without asking the network."""

from __future__ import annotations

import getpass
import ipaddress
import os
import socket
from dataclasses import dataclass

from zrun.errors import UsageError
from zrun.hostfile import Host, is_loopback


def current_directory() -> str:
    """Where we are.

    Raises:
        UsageError: it was removed, or may not be read.
    """
    try:
        return os.getcwd()
    except OSError as error:
        raise UsageError(f"the current directory cannot be used: {error.strerror}", "cd to one that exists") from None


@dataclass(frozen=True)
class ThisMachine:
    """What this machine is called."""

    names: frozenset[str]  # in lower case
    user: str

    @classmethod
    def look(cls) -> ThisMachine:
        """Its own name, and those that /etc/hosts gives to its addresses. DNS is not asked: that may take seconds."""
        own = os.uname().nodename.lower()
        names = {own, own.partition(".")[0], *_names_of_own_addresses()}
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # no entry for it, as in a container
            user = ""
        return cls(frozenset(names), user)

    def is_host(self, host: Host) -> bool:
        """Whether workers of `host` are started here and without SSH.

        A port of its own, or another user, is asked for SSH's sake: behind it may be a container, or another account.
        """
        if host.port is not None or host.user not in ("", self.user):
            return False
        name = host.name.lower()
        return is_loopback(name) or name in self.names or _is_own_address(name)


def refuse_master_elsewhere(name: str) -> None:
    """Of a job that runs on this machine alone: rank 0 listens here, and ranks would look for it in vain elsewhere.

    Raises:
        UsageError: the name of an address that this machine does not have, or of none.
    """
    hint = "leave it out: all ranks are on this machine. --no_preflight takes it as it is"
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"--master_addr {name} cannot be found: {why}", hint) from None
    if not any(_is_own_address(str(address)) for address in found):
        raise UsageError(f"--master_addr {name} is not this machine", hint)


def _is_own_address(text: str) -> bool:
    """Whether `text` is an address, and one of this machine: only those can be bound."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if address.is_unspecified or address.is_multicast:
        return False
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            place = socket.getaddrinfo(text, 0, family, socket.SOCK_DGRAM, 0, socket.AI_NUMERICHOST)[0][4]
            probe.bind(place)
    except OSError:
        return False
    return True


def _names_of_own_addresses() -> set[str]:
    names: set[str] = set()
    try:
        with open("/etc/hosts", encoding="utf-8", errors="replace") as file:
            lines = [line.partition("#")[0].split() for line in file]
    except OSError:
        return names
    for address, *others in filter(None, lines):
        if is_loopback(address) or _is_own_address(address):
            names.update(other.lower() for other in others)
    return names
