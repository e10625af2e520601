from __future__ import annotations

import os

import pytest

from zrun.hostfile import Host
from zrun.machine import ThisMachine

MACHINE = ThisMachine(frozenset({"node-a.cluster.org", "node-a"}), "me")


@pytest.mark.parametrize(
    ("host", "here"),
    [
        (Host("localhost", 1), True),
        (Host("127.0.0.1", 1), True),
        (Host("127.8.0.1", 1), True),
        (Host("::1", 1), True),
        (Host("node-a", 1), True),
        (Host("Node-A.cluster.org", 1), True),
        (Host("node-a.other.org", 1), False),
        (Host("node-b", 1), False),
        (Host("192.0.2.1", 1), False),
        (Host("2001:db8::1", 1), False),
        (Host("0.0.0.0", 1), False),
        (Host("localhost", 1, user="me"), True),
        (Host("localhost", 1, user="you"), False),
        (Host("localhost", 1, port=22), False),
        (Host("localhost", 1, python="/opt/py", addr="10.0.0.1"), True),
    ],
)
def test_what_means_this_machine(host, here):
    assert MACHINE.is_host(host) == here


def test_its_own_name():
    machine = ThisMachine.look()
    assert machine.is_host(Host(os.uname().nodename, 1))
    assert not machine.is_host(Host("surely-no-name-of-this-machine.invalid", 1))
