from __future__ import annotations

import os

import pytest

from zrun import devices
from zrun.devices import Gpus, choose, find_gpus, usable_cores
from zrun.errors import UsageError

NONE = Gpus((), "0 GPUs on this machine")
FOUR = Gpus(("0", "1", "2", "3"), "4 GPUs on this machine")


@pytest.mark.parametrize(
    ("device", "backend", "wanted", "gpus", "expected"),
    [
        ("auto", "auto", None, NONE, ("cpu", "gloo", 1)),
        ("auto", "auto", 3, NONE, ("cpu", "gloo", 3)),
        ("auto", "gloo", None, FOUR, ("cpu", "gloo", 1)),
        ("auto", "gloo", 9, FOUR, ("cpu", "gloo", 9)),
        ("cpu", "auto", 2, FOUR, ("cpu", "gloo", 2)),
        ("auto", "auto", None, FOUR, ("cuda", "nccl", 4)),
        ("auto", "auto", 2, FOUR, ("cuda", "nccl", 2)),
        ("cuda", "gloo", 2, FOUR, ("cuda", "gloo", 2)),
        ("auto", "nccl", None, FOUR, ("cuda", "nccl", 4)),
    ],
)
def test_choices(device, backend, wanted, gpus, expected):
    choice = choose(device, backend, wanted, gpus)
    assert (choice.device, choice.backend, choice.slots) == expected
    assert choice.devices == (FOUR.visible[: choice.slots] if choice.device == "cuda" else ())
    assert bool(choice.remark) == (gpus is NONE and device == "auto" and backend == "auto")


@pytest.mark.parametrize(
    ("device", "backend", "wanted", "gpus", "word"),
    [
        ("cuda", "auto", None, NONE, "0 GPUs"),
        ("auto", "nccl", 1, NONE, "0 GPUs"),
        ("cpu", "nccl", None, FOUR, "nccl"),
        ("auto", "auto", 5, FOUR, "4 GPUs"),
        ("cuda", "auto", 5, FOUR, "5"),
    ],
)
def test_what_is_not_there_is_said(device, backend, wanted, gpus, word):
    with pytest.raises(UsageError, match=word):
        choose(device, backend, wanted, gpus)


@pytest.mark.parametrize(
    ("named", "visible"),
    [
        (None, ("0", "1", "2", "3")),
        ("", ()),
        ("-1", ()),
        ("2,3", ("2", "3")),
        (" 2 , 0 ", ("2", "0")),
        ("1,-1,2", ("1",)),
        ("1,9,2", ("1",)),
        ("1,1", ("1",)),
        ("NoDevFiles", ()),
        ("GPU-8932f937,GPU-1", ("GPU-8932f937", "GPU-1")),
        ("MIG-a,MIG-b", ("MIG-a", "MIG-b")),
    ],
)
def test_visible_devices_are_cudas_own_reading(monkeypatch, named, visible):
    monkeypatch.setattr(devices, "_count_gpus", lambda: 4)
    assert find_gpus({} if named is None else {"CUDA_VISIBLE_DEVICES": named}).visible == visible


def test_names_mean_nothing_without_a_gpu(monkeypatch):
    monkeypatch.setattr(devices, "_count_gpus", lambda: 0)
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "GPU-1"}).visible == ()


def test_cores_respect_affinity_and_quotas(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    group = tmp_path / "a"
    group.mkdir()
    monkeypatch.setattr(devices, "_cgroup_paths", lambda controller: [str(group), str(tmp_path)])
    assert usable_cores() == 16
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cores() == 16
    (group / "cpu.max").write_text("350000 100000\n")
    assert usable_cores() == 4
    (tmp_path / "cpu.cfs_quota_us").write_text("50000\n")
    (tmp_path / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores() == 1
    (tmp_path / "cpu.cfs_quota_us").write_text("-1\n")
    assert usable_cores() == 4
