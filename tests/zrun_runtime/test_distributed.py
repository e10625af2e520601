"""From an environment to a process group: what is a world, and what is told instead of waiting for nobody."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import zrun_runtime
from zrun_runtime.errors import DistributedError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ZRUN_BACKEND", "ZRUN_DEVICE")
OTHERS = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher around, and no group left behind, by other tests either."""
    for name in (*NAMES, *OTHERS):
        monkeypatch.delenv(name, raising=False)
    _end_group()
    yield
    _end_group()


def _end_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2, but RANK is not set"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK=5 does not fit WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "all"}, "WORLD_SIZE='all' is not a number"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "WORLD_SIZE=4, but RANK is not set"),
    ],
)
def test_half_an_environment_is_told_at_once(
    environ: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DistributedError, match=said):
        zrun_runtime.init_distributed()


@pytest.mark.parametrize("environ", [{}, {"SLURM_NTASKS": "8"}, {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}])
def test_a_shell_of_an_allocation_is_a_world_of_one(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    zrun_runtime.init_distributed()
    assert dist.get_world_size() == 1


def test_a_step_of_slurm_has_its_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", "2")
    with pytest.raises(DistributedError, match="RANK=2 does not fit WORLD_SIZE=2"):
        zrun_runtime.init_distributed()


def test_nccl_without_a_gpu_is_gloo_and_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    zrun_runtime.init_distributed(dist_backend="nccl")
    assert dist.get_backend() == "gloo"
    assert "nccl needs a GPU" in capsys.readouterr().err


def test_a_backend_that_there_is_not() -> None:
    with pytest.raises(DistributedError, match="no backend nickel here"):
        zrun_runtime.init_distributed(dist_backend="nickel")
