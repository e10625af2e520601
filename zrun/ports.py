"""The master port: one that is free, and that no other job of this machine takes before rank 0 binds it."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

from zrun.errors import UsageError

_FIRST, _LAST = 10_240, 60_999
_EPHEMERAL = (32_768, 60_999)  # Linux's default, where it cannot be read
_LISTENING = "0A"


class ClaimedPort:
    """A TCP port that no other zrun on this machine can claim while this object lives.

    The claim is an abstract Unix socket named after the port: it lives in the same network namespace as the port, and
    the kernel ends it with the process, whatever ends that.
    """

    def __init__(self, number: int, claim: socket.socket) -> None:
        self.number = number
        self._claim = claim

    def release(self) -> None:
        """Lets others have it."""
        self._claim.close()


def claim_free_port() -> ClaimedPort:
    """A random free port outside of the range from which the kernel hands out ports of its own.

    Raises:
        UsageError: there is none.
    """
    for number in _candidates():
        port = _claim(number)
        if port is not None:
            if _bind_error(number, reuse=False) is None:
                return port
            port.release()
    raise UsageError("no free TCP port was found for the master", "give one with --master_port")


def claim_port(number: int) -> ClaimedPort:
    """This very port.

    Raises:
        UsageError: it is taken; by whom, if that can be seen.
    """
    port = _claim(number)
    hint = "leave --master_port out to get a free one"
    if port is None:
        raise UsageError(f"--master_port {number} is taken by another zrun job on this machine", hint)
    error = _bind_error(number, reuse=True)  # what lingers of an earlier job is no obstacle to rank 0 either
    if error is None:
        return port
    port.release()
    if error == errno.EADDRINUSE:
        owner = _owner_of(number)
        by = f" by process {owner[0]} ({owner[1]})" if owner else ""
        raise UsageError(f"--master_port {number} is taken{by}", hint)
    raise UsageError(f"--master_port {number} cannot be used: {os.strerror(error)}", hint)


def _candidates() -> Iterator[int]:
    low, high = _ephemeral_range()
    fitting = [n for n in range(_FIRST, _LAST + 1) if not low <= n <= high] or list(range(_FIRST, _LAST + 1))
    for _ in range(2 * len(fitting)):
        yield fitting[int.from_bytes(os.urandom(4), "little") % len(fitting)]


def _ephemeral_range() -> tuple[int, int]:
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            low, high = file.read().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return _EPHEMERAL


def _claim(number: int) -> ClaimedPort | None:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(f"\0zrun-port-{number}")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            claim.close()
            return None  # anything else: a sandbox without such names, and so without claims
    return ClaimedPort(number, claim)


def _bind_error(number: int, reuse: bool) -> int | None:
    """The errno of binding the port on every address of this machine; None if it can be bound."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                if reuse:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address, number))
                if reuse:
                    probe.listen(1)  # with the option, only this shows a port that somebody listens on
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):  # no IPv6 here
                return error.errno
    return None


def _owner_of(number: int) -> tuple[int, str] | None:
    """Pid and name of the process that listens on a port, if this user may see it."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as file:
                rows = [line.split() for line in file.readlines()[1:]]
        except OSError:
            continue
        inodes |= {r[9] for r in rows if r[3] == _LISTENING and int(r[1].rpartition(":")[2], 16) == number}
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        try:
            if any(os.readlink(entry.path) in wanted for entry in os.scandir(f"/proc/{pid}/fd")):
                with open(f"/proc/{pid}/comm") as file:
                    return pid, file.read().strip()
        except OSError:
            continue  # gone, or of another user
    return None
