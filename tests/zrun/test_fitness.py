"""From facts to a judgement."""

from __future__ import annotations

import dataclasses

import pytest

from zrun.fitness import Wanted, Witness, judge, uses_gpus
from zrun.hostfile import Host
from zrun.meeting import candidates
from zrun.probe import Facts

GIB = 1 << 30
FACTS = Facts(
    python="3.11.2",
    executable="/usr/bin/python3",
    zrun="1",
    runtime="1",
    torch="2.10.0",
    cwd_problem="",
    script_problem="",
    script_hash="aa",
    gpus=("0", "1"),
    gpus_found="2 GPUs on this machine",
    cores=8,
    clock=0.0,
    shm_free=8 * GIB,
    temp_free=8 * GIB,
    temp_problem="",
    reached_at="10.0.0.1",
    reached_from="10.0.0.9",
    addresses=("lo=127.0.0.1", "eth0=10.0.0.1", "eth0=fe80::1", "ib0=10.1.0.1"),
)


def witness(name="a", slots=2, skew=0.0, **changed):
    return Witness(Host(name, slots), dataclasses.replace(FACTS, **changed), skew, 0.01)


def second(wanted=None, skew=0.0, **changed):
    """What is said of a second host that differs from the first."""
    first, found = judge([witness(), witness("b", skew=skew, **changed)], wanted or Wanted("train.py", "aa"))
    assert first == []
    return found


def test_hosts_that_are_alike_are_fit():
    assert second() == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"python": "3.12.1"}, "its Python is 3.12.1, that of a 3.11.2"),
        ({"runtime": "2"}, "it has zrun_runtime 2, a has 1"),
        ({"runtime": ""}, "it has no zrun_runtime"),
        ({"torch": "2.11.0"}, "it has torch 2.11.0, a has 2.10.0"),
        ({"torch": ""}, "it has no torch"),
        ({"cwd_problem": "there is no directory /w", "script_problem": "x"}, "there is no directory /w"),
        ({"script_problem": "the script cannot be read"}, "the script cannot be read"),
        ({"script_hash": "bb"}, "its train.py is not the same as here"),
        ({"gpus": ("0",), "gpus_found": "1 GPU"}, "slot 1 is asked for: 1 GPU"),
        ({"temp_free": 1000}, "no room for temporary files"),
        ({"temp_problem": "nothing can be written to /tmp"}, "nothing can be written"),
        ({"shm_free": -1}, "there is no /dev/shm"),
        ({"left": 3}, "3 processes of the last attempt"),
    ],
)
def test_what_makes_a_host_unfit(changed, words):
    (problem,) = second(**changed)
    assert words in problem.what and problem.fatal


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"skew": 5.0}, "its clock is 5 s ahead"),
        ({"shm_free": 64 << 20}, "/dev/shm has only 64 MiB free"),
        ({"temp_free": 100 << 20}, "little room"),
    ],
)
def test_what_is_only_said(changed, words):
    (problem,) = second(**changed)
    assert words in problem.what and not problem.fatal


def test_a_clock_that_is_far_off():
    (problem,) = second(skew=-4000.0)
    assert problem.fatal and "4000 s behind" in problem.what
    assert second(python="3.11.9") == []


def test_the_first_host_decides_about_a_script_that_is_not_here():
    (problem,) = second(Wanted("train.py", ""), script_hash="bb")
    assert "not the same" in problem.what


def test_gpus_count_only_for_jobs_that_use_them():
    few = [witness(gpus=()), witness("b", gpus=())]
    assert uses_gpus([witness()], Wanted()) and not uses_gpus(few, Wanted())
    assert uses_gpus(few, Wanted(device="cuda")) and uses_gpus(few, Wanted(backend="nccl"))
    assert not uses_gpus([witness()], Wanted(backend="gloo")) and not uses_gpus([witness()], Wanted(device="cpu"))
    assert judge(few, Wanted(script_hash="aa")) == [[], []]


@pytest.mark.parametrize(
    ("reached", "here", "peer", "found"),
    [
        (("10.0.0.1", "10.0.0.2"), (False, False), "10.0.0.1", ["10.0.0.1", "10.1.0.1"]),
        (("10.0.0.1", "10.0.0.2"), (False, False), "1.2.3.4", ["10.0.0.1", "1.2.3.4", "10.1.0.1"]),
        (("", "10.0.0.2"), (True, False), "", ["10.0.0.9", "10.0.0.1", "10.1.0.1"]),
        (("127.0.0.2", "127.0.0.3"), (False, False), "127.0.0.2", ["127.0.0.2", "127.0.0.1", "10.0.0.1", "10.1.0.1"]),
        (("127.0.0.1", "10.0.0.2"), (False, False), "", ["10.0.0.1", "10.1.0.1"]),
        (("", ""), (True, True), "", ["127.0.0.1"]),
    ],
)
def test_where_ranks_may_meet(reached, here, peer, found):
    witnesses = [witness(reached_at=address) for address in reached]
    assert candidates(witnesses, peer, here) == found
