"""The network interfaces of this host and their addresses, by the C library: Python's own does not tell."""

from __future__ import annotations

import ctypes
import ipaddress
import socket

from zrun.errors import UsageError

IFNAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # variables that tell gloo and NCCL which one to use


class _Entry(ctypes.Structure):
    """struct ifaddrs, as far as it is read."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]
_IFF_UP = 1
_IPV4_AT, _IPV6_AT = 4, 8  # of the address in struct sockaddr_in and sockaddr_in6


def list_addresses() -> list[tuple[str, str]]:
    """Interface and address of every interface that is up, in the kernel's order."""
    library = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Entry)()
    if library.getifaddrs(ctypes.byref(first)) != 0:
        return []
    found = []
    try:
        entry = first
        while entry:
            one = entry.contents
            if one.address and one.flags & _IFF_UP:
                address = _read(one.address)
                if address:
                    found.append((one.name.decode("utf-8", "replace"), address))
            entry = one.next
    finally:
        library.freeifaddrs(first)
    return found


def interface_of(address: str) -> str:
    """The interface that has an address; empty if none has."""
    plain = plain_address(address)
    return next((name for name, has in list_addresses() if has == plain), "")


def interface_to(name: str) -> str:
    """The interface by which this host sends to a name or address; empty if that cannot be told. Sends nothing.

    Raises:
        UsageError: nobody knows the name.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
    except (OSError, UnicodeError) as error:  # the latter: a part of it is too long for a name
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{name}, where rank 0 will be, is not known here: {why}", "give its address with --master_addr"
        ) from None
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(place)
            return interface_of(probe.getsockname()[0])
        except OSError:
            return ""


def plain_address(address: str) -> str:
    """An address as `list_addresses` writes it: without a zone, IPv4 not disguised as IPv6."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)


def _read(place: int) -> str:
    family = ctypes.c_ushort.from_address(place).value
    if family == socket.AF_INET:
        return str(ipaddress.ip_address(ctypes.string_at(place + _IPV4_AT, 4)))
    if family == socket.AF_INET6:
        return str(ipaddress.ip_address(ctypes.string_at(place + _IPV6_AT, 16)))
    return ""
