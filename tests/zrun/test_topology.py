from __future__ import annotations

import pytest

from zrun.errors import UsageError
from zrun.hostfile import Host
from zrun.topology import assign_ranks, rank_table


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
