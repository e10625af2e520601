from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zrun.cores import Core, Share, bound, find_cores, plan_cores

# Two memory nodes of four cores with two hardware threads, numbered as Linux does: the second threads come last.
MACHINE = [Core(node, node, core, (4 * node + core, 8 + 4 * node + core)) for node in (0, 1) for core in range(4)]


@pytest.mark.parametrize(
    ("ranks", "cpus", "cores"),
    [
        (1, [set(range(16))], [8]),
        (2, [{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}], [4, 4]),
        (3, [{0, 1, 8, 9}, {2, 3, 4, 10, 11, 12}, {5, 6, 7, 13, 14, 15}], [2, 3, 3]),
        (8, [{core, core + 8} for core in range(8)], [1] * 8),
        (16, [{cpu} for core in range(8) for cpu in (core, core + 8)], [1] * 16),
        (17, [{cpu} for core in range(8) for cpu in (core, core + 8)] + [{0}], [1] * 17),
    ],
)
def test_neighbours_stay_together(ranks, cpus, cores):
    assert plan_cores(MACHINE, ranks) == tuple(Share(frozenset(c), n) for c, n in zip(cpus, cores, strict=True))
    assert plan_cores(MACHINE[::-1], ranks) == plan_cores(MACHINE, ranks)


@given(st.lists(st.integers(1, 2), min_size=1, max_size=9), st.integers(1, 24))
def test_nobody_shares_while_there_is_enough_for_all(threads, ranks):
    cores = [Core(0, 0, n, tuple(range(10 * n, 10 * n + count))) for n, count in enumerate(threads)]
    shares = plan_cores(cores, ranks)
    assert len(shares) == ranks and all(share.cpus for share in shares)
    everything = {cpu for core in cores for cpu in core.cpus}
    if len(everything) >= ranks:
        dealt = [cpu for share in shares for cpu in share.cpus]
        assert sorted(dealt) == sorted(everything)
    if len(cores) >= ranks:
        assert max(s.cores for s in shares) - min(s.cores for s in shares) <= 1


def test_cores_of_this_machine():
    mine = frozenset(os.sched_getaffinity(0))
    assert {cpu for core in find_cores(mine) for cpu in core.cpus} == mine
    one = frozenset([min(mine)])
    assert [core.cpus for core in find_cores(one)] == [tuple(one)]


def test_a_binding_ends():
    before = os.sched_getaffinity(0)
    with pytest.raises(KeyError), bound(0, 2) as threads:
        assert threads >= 1 and os.sched_getaffinity(0) <= before
        raise KeyError
    assert os.sched_getaffinity(0) == before
