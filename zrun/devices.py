"""What this machine offers a job, found without torch: GPUs and CPU cores; and which of them a job takes."""

from __future__ import annotations

import ctypes
import glob
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from zrun.errors import UsageError

_NVML_SUCCESS = 0


@dataclass(frozen=True)
class Gpus:
    """The GPUs that a process with this environment would see."""

    visible: tuple[str, ...]  # entries for CUDA_VISIBLE_DEVICES: indices, GPU-... or MIG-... names
    found: str  # for people: what was found, and where


@dataclass(frozen=True)
class Choice:
    """What a job trains on."""

    device: str  # cpu or cuda
    backend: str  # gloo or nccl
    slots: int
    devices: tuple[str, ...]  # one a slot; empty on the CPU
    remark: str = ""  # something the user may not expect


def find_gpus(environ: Mapping[str, str]) -> Gpus:
    """The GPUs of this machine, CUDA_VISIBLE_DEVICES in `environ` respected."""
    count = _count_gpus()
    there = f"{count} GPU{'' if count == 1 else 's'} on this machine"
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return Gpus(tuple(str(i) for i in range(count)), there)
    visible = _read_visible(named, count)
    return Gpus(visible, f"{there}, CUDA_VISIBLE_DEVICES={named!r} leaves {len(visible)}")


def _read_visible(named: str, count: int) -> tuple[str, ...]:
    """The entries that count, by CUDA's own rule: the first one that means no device ends the list."""
    visible: list[str] = []
    for entry in (part.strip() for part in named.split(",")):
        is_index = entry.isdecimal() and int(entry) < count
        is_name = count > 0 and entry.startswith(("GPU-", "MIG-"))
        if not (is_index or is_name) or entry in visible:
            break
        visible.append(entry)
    return tuple(visible)


def _count_gpus() -> int:
    if not (glob.glob("/dev/nvidia[0-9]*") or os.path.exists("/dev/dxg")):
        return 0  # without a device node the driver cannot be used, and need not be loaded
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != _NVML_SUCCESS:
            raise OSError("no NVML")
        count = ctypes.c_uint()
        status = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        nvml.nvmlShutdown()
        if status == _NVML_SUCCESS:
            return count.value
    except (OSError, AttributeError):
        pass
    return len(glob.glob("/dev/nvidia[0-9]*"))


def choose_kind(device: str, backend: str, gpus_there: bool) -> tuple[str, str]:
    """Device and backend of a job.

    Args:
        device: auto, cpu or cuda. backend: auto, gloo or nccl.

    Raises:
        UsageError: they do not go together.
    """
    if device == "cpu" and backend == "nccl":
        raise UsageError("--device cpu and --backend nccl do not go together: nccl moves data between GPUs", "use gloo")
    if device == "cuda" or backend == "nccl" or (device == "auto" and backend == "auto" and gpus_there):
        return "cuda", "gloo" if backend == "gloo" else "nccl"
    return "cpu", "gloo"


def choose(device: str, backend: str, wanted: int | None, gpus: Gpus) -> Choice:
    """What to train on, on this machine alone.

    Args:
        device: auto, cpu or cuda. backend: auto, gloo or nccl.
        wanted: number of ranks; None for one a GPU, or one on the CPU.

    Raises:
        UsageError: what was asked for is not there, or does not go together.
    """
    kind = choose_kind(device, backend, bool(gpus.visible))
    if kind[0] == "cpu":
        no_gpu = device == "auto" and backend == "auto"
        remark = f"no GPU to use ({gpus.found}): the device is the CPU, the backend gloo" if no_gpu else ""
        return Choice(*kind, wanted or 1, (), remark)
    if not gpus.visible:
        asked = "--device cuda" if device == "cuda" else "--backend nccl"
        raise UsageError(f"{asked} needs a GPU and there is none: {gpus.found}", "use --backend gloo to run on the CPU")
    slots = wanted or len(gpus.visible)
    if slots > len(gpus.visible):
        raise UsageError(
            f"--num_gpus {slots} is more than there are: {gpus.found}",
            f"ask for at most {len(gpus.visible)}, or use --device cpu",
        )
    return Choice(*kind, slots, gpus.visible[:slots])


def usable_cores() -> int:
    """CPU cores that this process may use: its affinity, and the quota of its cgroup and the ones above."""
    cores = float(len(os.sched_getaffinity(0)))
    for path in _cgroup_paths("cpu"):
        for quota in (_quota_v2(path), _quota_v1(path)):
            cores = min(cores, quota or cores)
    return max(1, math.ceil(cores))


def _cgroup_paths(controller: str) -> list[str]:
    """Directories of our cgroup for `controller` and of its parents, as both versions mount them."""
    try:
        with open("/proc/self/cgroup") as file:
            entries = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return []
    paths = []
    for _, controllers, path in entries:
        if controllers and controller not in controllers.split(","):
            continue
        base = f"/sys/fs/cgroup/{controllers}" if controllers else "/sys/fs/cgroup"
        while path not in ("", "/"):
            paths.append(base + path)
            path = os.path.dirname(path)
        paths.append(base)
    return paths


def _quota_v2(path: str) -> float | None:
    """Cores granted by cpu.max: "<quota or max> <period>"."""
    words = _read_words(os.path.join(path, "cpu.max"))
    if len(words) != 2 or not words[0].isdecimal() or not words[1].isdecimal() or not int(words[1]):
        return None
    return int(words[0]) / int(words[1])


def _quota_v1(path: str) -> float | None:
    quota = _read_words(os.path.join(path, "cpu.cfs_quota_us"))
    period = _read_words(os.path.join(path, "cpu.cfs_period_us"))
    if not quota or not period or not quota[0].isdecimal() or not period[0].isdecimal() or not int(period[0]):
        return None  # -1: no quota
    return int(quota[0]) / int(period[0])


def _read_words(path: str) -> list[str]:
    try:
        with open(path) as file:
            return file.read().split()
    except OSError:
        return []
