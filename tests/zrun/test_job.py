from __future__ import annotations

import dataclasses
import json

import pytest

from zrun.errors import ProtocolError
from zrun.job import JobSpec

SPEC = JobSpec(
    job_id="abc",
    host="h",
    node_rank=0,
    node_count=1,
    world_size=2,
    first_rank=0,
    local_world_size=2,
    master_addr="::1",
    master_port=1,
    device="cuda",
    backend="nccl",
    command=("python", "a b", "", "new\nline", "ü\udcff"),
    cwd="/",
    environment={"A": "1\n2"},
    devices=("0", "MIG-x"),
    log_dir="/logs",
)


def test_a_spec_survives_its_line():
    line = SPEC.to_line()
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert JobSpec.from_line(line) == SPEC


@pytest.mark.parametrize(
    "change",
    [
        {"job_id": 1},
        {"world_size": "2"},
        {"world_size": True},
        {"command": "python"},
        {"command": [1]},
        {"environment": {"A": 1}},
        {"environment": []},
        {"grace": "30"},
        {"grace": None},
    ],
)
def test_wrong_types_are_refused(change):
    with pytest.raises(ProtocolError, match=next(iter(change))):
        JobSpec.from_line(json.dumps({**dataclasses.asdict(SPEC), **change}).encode())


@pytest.mark.parametrize("line", [b"", b"x", b"[]", b"1", b"[" * 100_000, b"{}", b"\xff"])
def test_what_is_no_job_is_refused(line):
    with pytest.raises(ProtocolError):
        JobSpec.from_line(line)
