from __future__ import annotations

import pytest

from zrun.errors import UsageError
from zrun.slurm import hosts_of_allocation

NODES = {"SLURM_JOB_NODELIST": "tux[08-09,11],big"}


def found(environ, on_gpu=True, num_gpus=None):
    return [(host.name, host.slots) for host in hosts_of_allocation(environ, on_gpu, num_gpus)]


def all_with(slots):
    return [(name, slots) for name in ("tux08", "tux09", "tux11", "big")]


@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_ID": "3"}, {"SLURM_JOB_NODELIST": ""}])
def test_outside_of_an_allocation(environ):
    assert found(environ) == []


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, all_with(1)),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_NTASKS_PER_NODE": "2"}, all_with(8)),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, all_with(4)),
        ({"SLURM_GPUS_PER_NODE": "gpu:a100:4(S:0-1)"}, all_with(4)),
        ({"SLURM_NTASKS_PER_NODE": "2"}, all_with(2)),
        ({"SLURM_TASKS_PER_NODE": "2(x3),1"}, [("tux08", 2), ("tux09", 2), ("tux11", 2), ("big", 1)]),
        ({"SLURM_TASKS_PER_NODE": "5"}, all_with(1)),  # of another step
    ],
)
def test_slots(more, expected):
    assert found(NODES | more) == expected


def test_on_the_cpu_tasks_count_and_are_only_a_wish():
    environ = NODES | {"SLURM_GPUS_ON_NODE": "8", "SLURM_NTASKS_PER_NODE": "2"}
    assert found(environ, on_gpu=False) == all_with(2)
    assert found(environ, on_gpu=False, num_gpus=5) == all_with(5)
    assert found(environ, num_gpus=5) == all_with(8)  # what is more than that is refused later


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_NODELIST": "tux[1-"},
        NODES | {"SLURM_GPUS_ON_NODE": "many"},
        NODES | {"SLURM_NTASKS_PER_NODE": "x"},
        NODES | {"SLURM_TASKS_PER_NODE": "2(y3)"},
        NODES | {"SLURM_STEP_NUM_TASKS": "4"},
    ],
)
def test_variables_that_cannot_be_right(environ):
    with pytest.raises(UsageError) as caught:
        found(environ)
    assert "--hostfile" in caught.value.hint


def test_one_task_of_a_step_is_fine():
    assert found(NODES | {"SLURM_STEP_NUM_TASKS": "1"}) == all_with(1)
