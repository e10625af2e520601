"""A cable that is slow and loses packets, as a program: frames of one interface wait or vanish before they reach the
other, in both directions. It does what `tc netem` does, on kernels that lack that.

    python bad_cable.py WIRE TAP DELAY LOSS

WIRE: an interface of this network namespace, the end of a cable. TAP: the name of the one to make in its place.
DELAY: seconds in each direction. LOSS: the part of the frames that is lost. Says `ready`, and runs until it is ended.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import select
import socket
import struct
import sys
import time

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x2, 0x1000, 0x4000
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_OUTGOING = 263, 15, 4
_EVERY_PROTOCOL = 3
_FRAME = 128 * 1024  # bytes; the kernel hands over segments that it has not cut yet


def open_tap(name: str) -> int:
    """A new interface whose frames are read and written here, each behind what the kernel notes about its checksum."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    return descriptor


def open_wire(name: str) -> socket.socket:
    """All frames of an interface, with the same notes."""
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    wire.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    wire.bind((name, _EVERY_PROTOCOL))
    wire.setblocking(False)
    return wire


def run(wire: socket.socket, tap: int, delay: float, loss: float) -> None:
    """Passes frames on for ever. What the far side does not take at once is lost, as on a real cable."""
    dice, order = random.Random(1), itertools.count()
    flying: list[tuple[float, int, bool, bytes]] = []  # due, order, whether for the tap, frame
    while True:
        wait = max(0.0, flying[0][0] - time.monotonic()) if flying else None
        ready = select.select([wire, tap], [], [], wait)[0]
        now = time.monotonic()
        for source in ready:
            if source is wire:
                frame, (*_, kind, _, _) = wire.recvfrom(_FRAME)
                if kind == _PACKET_OUTGOING:  # our own
                    continue
            else:
                frame = os.read(tap, _FRAME)
            if dice.random() >= loss:
                heapq.heappush(flying, (now + delay, next(order), source is wire, frame))
        while flying and flying[0][0] <= now:
            *_, for_tap, frame = heapq.heappop(flying)
            try:
                os.write(tap, frame) if for_tap else wire.send(frame)
            except OSError:
                pass


if __name__ == "__main__":
    ends = open_wire(sys.argv[1]), open_tap(sys.argv[2])
    print("ready", flush=True)
    run(*ends, float(sys.argv[3]), float(sys.argv[4]))
