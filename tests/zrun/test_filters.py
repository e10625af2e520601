from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zrun.errors import UsageError
from zrun.filters import Limits, limit_hosts
from zrun.hostfile import Host, parse_hostfile
from zrun.hostlist import format_numbers

LINES = ["w0 slots=4", "w1 slots=4", "node-1 slots=2", "node-2 slots=1", "::1 slots=2", "fe80::2 slots=2", "z slots=0"]
POOL = parse_hostfile("\n".join(LINES), "h")


def limited(pool=POOL.hosts, **limits) -> dict[str, list[int]]:
    hosts = limit_hosts(pool, Limits(**limits))
    assert all(host.slots == len(host.slot_numbers) for host in hosts)
    return {host.name: list(host.slot_numbers) for host in hosts}


@pytest.mark.parametrize(
    ("include", "left"),
    [
        ("w0", {"w0": [0, 1, 2, 3]}),
        ("w0:1", {"w0": [1]}),
        ("w0:1,1", {"w0": [1]}),
        ("w0:1@w0:0,1", {"w0": [0, 1]}),
        ("w0:3,0", {"w0": [0, 3]}),
        ("w0: 1 , 2", {"w0": [1, 2]}),
        ("w0@w0:1", {"w0": [1]}),
        ("w0:1@w0", {"w0": [1]}),
        ("w1@w0", {"w0": [0, 1, 2, 3], "w1": [0, 1, 2, 3]}),
        ("w0:0-2", {"w0": [0, 1, 2]}),
        ("w0:0,2-3", {"w0": [0, 2, 3]}),
        ("node-*", {"node-1": [0, 1], "node-2": [0]}),
        ("*:0@w0:1", {"w0": [0, 1]} | {name: [0] for name in ("w1", "node-1", "node-2", "::1", "fe80::2")}),
        ("w?:3", {"w0": [3], "w1": [3]}),
        ("node-[1-2]:0", {"node-1": [0], "node-2": [0]}),
        ("W0:0", {"w0": [0]}),
        ("::1", {"::1": [0, 1]}),
        ("[::1]", {"::1": [0, 1]}),
        ("[::1]:1@fe80::2", {"::1": [1], "fe80::2": [0, 1]}),
        ("z@w0", {"w0": [0, 1, 2, 3]}),
    ],
)
def test_include(include, left):
    pool = [host for host in POOL.hosts if host.slots] if include.startswith("*") else POOL.hosts
    found = limited(pool, include=include)
    assert found == left
    assert list(found) == [host.name for host in POOL.hosts if host.name in left]


@pytest.mark.parametrize(
    ("exclude", "gone"),
    [
        ("w0", {"w0": []}),
        ("w0:0,0", {"w0": [1, 2, 3]}),
        ("w0:0-2", {"w0": [3]}),
        ("w0:0@w0", {"w0": []}),
        ("w0@w0:0", {"w0": []}),
        ("w*@node-1:1", {"w0": [], "w1": [], "node-1": [0]}),
        ("[fe80::2]:0@::1", {"fe80::2": [1], "::1": []}),
    ],
)
def test_exclude(exclude, gone):
    everything = {host.name: list(host.slot_numbers) for host in POOL.hosts}
    assert limited(exclude=exclude) == {name: slots for name, slots in (everything | gone).items() if slots}


def test_numbers_of_hosts_and_slots():
    assert limited() == limited(num_nodes=6)
    assert limited(num_nodes=2) == {"w0": [0, 1, 2, 3], "w1": [0, 1, 2, 3]}
    assert limited(num_nodes=2, num_gpus=3) == {"w0": [0, 1, 2], "w1": [0, 1, 2]}
    assert limited(num_gpus=1) == {name: [0] for name in ("w0", "w1", "node-1", "node-2", "::1", "fe80::2")}


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"include": "w0:2,9"}, ["w0", "no slot 9", "h:1", "0-3"]),
        ({"include": "node-*:1"}, ["node-2", "no slot 1", "h:4", ": 0"]),
        ({"include": "z:0"}, ["z", "none"]),
        ({"exclude": "w0:4-6"}, ["no slot 4-6", "0-3"]),
        ({"include": "node2"}, ["'node2'", "did you mean node-2?"]),
        ({"include": "elsewhere"}, ["'elsewhere'", "w0, w1, node-1"]),
        ({"include": "node-[1-3]"}, ["'node-3'"]),
        ({"include": "x*"}, ["'x*'"]),
        ({"include": "w0:"}, ["w0:"]),
        ({"include": "w0:x"}, ["'x'"]),
        ({"include": "w0:2-1"}, ["backwards"]),
        ({"include": "w0:-1"}, ["-1"]),
        ({"include": "w0@"}, ["@"]),
        ({"include": "@w0"}, ["@"]),
        ({"include": "w0@@w1"}, ["@"]),
        ({"include": "w1@w0:1@5"}, ["'5'"]),
        ({"include": ":0"}, ["no host"]),
        ({"include": "::2:0"}, ["[::1]:0"]),
        ({"include": "[::3]:0"}, ["'::3'"]),
        ({"include": "z"}, ["no slot"]),
        ({"exclude": "*"}, ["--exclude *", "no slot"]),
        ({"num_nodes": 7}, ["--num_nodes 7", "6 hosts"]),
        ({"num_gpus": 2}, ["--num_gpus 2", "node-2", "slots=1", "h:4"]),
        ({"include": "w0", "exclude": "w1"}, ["--include", "--exclude"]),
        ({"include": "w0", "num_nodes": 1}, ["--include", "--num_nodes"]),
        ({"include": "w0", "num_gpus": 1}, ["--include", "--num_gpus"]),
        ({"exclude": "w0", "num_nodes": 1}, ["--exclude", "--num_nodes"]),
        ({"exclude": "w0", "num_gpus": 1}, ["--exclude", "--num_gpus"]),
    ],
)
def test_errors_name_what_is_not_there_and_what_is(limits, words):
    with pytest.raises(UsageError) as caught:
        limited(**limits)
    said = f"{caught.value.message} -> {caught.value.hint}"
    assert all(word in said for word in words), said


def test_a_user_is_no_host():
    with pytest.raises(UsageError) as caught:
        limited([Host("h", 1, user="me")], include="me@h:0")
    assert caught.value.hint.endswith(": h")


@given(st.dictionaries(st.sampled_from("abcdef"), st.sets(st.integers(0, 7), min_size=1), min_size=1), st.randoms())
def test_include_and_exclude_complement_each_other(wanted, random):
    pool = [Host(name, 8) for name in "fbdace"]
    items = [f"{name}:{format_numbers(sorted(slots))}" for name, slots in wanted.items()]
    random.shuffle(items)
    kept = limited(pool, include="@".join(items))
    assert kept == {name: sorted(wanted[name]) for name in "fbdace" if name in wanted}
    if sum(map(len, kept.values())) < 48:
        left = limited(pool, exclude="@".join(items))
        assert all(sorted(kept.get(n, []) + left.get(n, [])) == list(range(8)) for n in "abcdef")


@given(st.text(alphabet="w01:@,-*?[] ", max_size=15))
def test_any_text_is_hosts_or_an_error_of_the_user(text):
    try:
        limited(include=text)
    except UsageError as error:
        assert text in error.message or not text
