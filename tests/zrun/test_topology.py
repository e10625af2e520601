from __future__ import annotations

import pytest

from zrun.errors import UsageError
from zrun.hostfile import Host
from zrun.topology import assign_ranks, give_devices, rank_table


def test_ranks_follow_hosts_then_slots():
    ranks = assign_ranks([Host("a", 3, ("4", "5", "6")), Host("empty", 0), Host("b", 2)])
    assert [(r.rank, r.node_rank, r.local_rank, r.host, r.device) for r in ranks] == [
        (0, 0, 0, "a", "4"),
        (1, 0, 1, "a", "5"),
        (2, 0, 2, "a", "6"),
        (3, 1, 0, "b", "cpu"),
        (4, 1, 1, "b", "cpu"),
    ]


def test_one_name_twice_is_two_nodes():
    assert [r.node_rank for r in assign_ranks([Host("a", 1), Host("a", 1)])] == [0, 1]


@pytest.mark.parametrize("hosts", [[], [Host("a", 0)]])
def test_nothing_to_start_is_an_error(hosts):
    with pytest.raises(UsageError, match="no host has a slot"):
        assign_ranks(hosts)


def test_the_table_has_a_row_a_rank():
    lines = rank_table(assign_ranks([Host("long-name", 1), Host("b", 1)])).splitlines()
    assert lines[0].split() == ["rank", "host", "node", "local", "rank", "device"]
    assert lines[1].split() == ["0", "long-name", "0", "0", "cpu"]
    assert lines[2].index("b") == lines[1].index("long-name")


def test_a_slot_is_a_device_and_here_one_of_those_that_are_visible():
    hosts = [Host("here", 2, picked=(0, 2)), Host("there", 2, picked=(1, 3)), Host("all", 2)]
    given = give_devices(hosts, [True, False, False], ["4", "GPU-5", "MIG-6"])
    assert [host.devices for host in given] == [("4", "MIG-6"), ("1", "3"), ("0", "1")]


def test_a_slot_here_without_a_device():
    with pytest.raises(UsageError, match=r"here \(h:3:1\) .* slot 2: it has 2"):
        give_devices([Host("here", 3, where="h:3:1")], [True], ["4", "5"])
