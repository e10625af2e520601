"""The part of gpu_check.py about state off the device: are copies hidden behind the backward, and what does it cost?"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from common import Promise, progress
from implementations import zero_config
from model import GPT, Size, count, token_batches, token_loss
from torch.profiler import ProfilerActivity, profile

import zrun_runtime
from zrun_runtime.config import load_config
from zrun_runtime.model_size import activations_of, size_of
from zrun_runtime.savings import footprint_of, plan_of

Tiers = tuple[str, str]  # of the optimizer's state and of parameters: none, cpu or nvme
Interval = tuple[float, float]
OFFLOADS: list[tuple[int, Tiers]] = [
    *((stage, (tier, "none")) for tier in ("cpu", "nvme") for stage in (1, 2, 3)),
    *((3, tiers) for tiers in (("none", "cpu"), ("cpu", "cpu"), ("nvme", "nvme"))),
]
HIDDEN = 0.5  # of the time of copies, that at least runs beside kernels
USABLE = 0.85  # of the memory that is free now


@dataclass
class Clock:
    """The time of the whole, and what there was no time or room for."""

    end: float
    left_out: list[str] = field(default_factory=list)

    def affords(self, what: str, until: float) -> bool:
        """There is time left for it: in the whole, and in its part, which ends at `until`. If not, it is noted."""
        if time.monotonic() < min(until, self.end):
            return True
        self.left_out.append(f"{what} (no time)")
        return False


def name_of(stage: int, tiers: Tiers) -> str:
    """A case, for a table."""
    away = [
        f"{what} on {tier}" for what, tier in zip(("optimizer", "parameters"), tiers, strict=True) if tier != "none"
    ]
    return ", ".join([f"stage {stage}", *away])


def offload_config(stage: int, tiers: Tiers, path: str, config: dict[str, Any]) -> dict[str, Any]:
    """A config with state off the device; `path` is a directory on the disk."""
    zero: dict[str, Any] = {"stage": stage}
    for key, tier in zip(("offload_optimizer", "offload_param"), tiers, strict=True):
        if tier != "none":
            zero[key] = {"device": tier, "nvme_path": path}
    if tiers[1] == "nvme":
        zero["offload_param"]["max_in_cpu"] = 0
    return {**config, "zero_optimization": zero}


# ---- copies beside kernels


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """The same time as intervals in order that do not meet."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def length(intervals: Sequence[Interval]) -> float:
    """Of intervals that do not meet."""
    return sum(end - start for start, end in intervals)


def covered(copies: Sequence[Interval], kernels: Sequence[Interval]) -> float:
    """The share of the time of copies in which a kernel ran too; 1 if there are no copies."""
    ours, theirs = union(copies), union(kernels)
    both = length(ours) + length(theirs) - length(union([*ours, *theirs]))
    return both / length(ours) if ours else 1.0


def copies_of(events: Any) -> dict[str, list[Interval]]:
    """What ran on the device, in microseconds: copies out of it, copies into it, those of pageable memory, kernels."""
    found: dict[str, list[Interval]] = {"out": [], "in": [], "pageable": [], "kernels": []}
    for event in events:
        if event.device_type is not torch.autograd.DeviceType.CUDA:
            continue
        kind = "out" if "DtoH" in event.name else "in" if "HtoD" in event.name else "kernels"
        if event.name.startswith(("Memset", "Memcpy DtoD")):
            continue
        interval = event.time_range.start, event.time_range.end
        found[kind].append(interval)
        if kind != "kernels" and "Pageable" in event.name:
            found["pageable"].append(interval)
    return found


@dataclass(frozen=True)
class Ground:
    """What a part runs on. device: where the engine trains; until: when the part has to be over."""

    device: torch.device
    size: Size
    path: str
    clock: Clock
    until: float


def _engine(ground: Ground, stage: int, tiers: Tiers) -> tuple[Any, Any, int]:
    """An engine, batches, and how many parameters there are."""
    torch.manual_seed(0)
    with ground.device:
        model = GPT(ground.size)
    numel = count(model)
    config = offload_config(stage, tiers, ground.path, zero_config(stage, ground.size.batch, dtype="bf16"))
    engine, *_ = zrun_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine, token_batches(ground.size, 0, ground.device), numel


def overlap(ground: Ground) -> tuple[list[list[Any]], list[Promise]]:
    """Rows and promises: forward and backward of one step, and what of its copies ran beside kernels."""
    rows, promises = [], []
    for stage, tiers in ((2, ("none", "none")), (2, ("cpu", "none")), (3, ("cpu", "cpu"))):
        name = name_of(stage, tiers)
        if not ground.clock.affords(f"overlap, {name}", ground.until):
            continue
        with progress(f"overlap, {name}"):
            engine, data, _ = _engine(ground, stage, tiers)
            for _ in range(3):
                _forward_and_backward(engine, next(data))
                engine.step()
            on_cuda = ground.device.type == "cuda"
            with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_cuda) as seen:
                _forward_and_backward(engine, next(data))
                if on_cuda:
                    torch.cuda.synchronize()
            engine.step()
            engine.destroy()
        found = copies_of(seen.events())
        busy = length(union([*found["kernels"], *found["in"], *found["out"]]))
        shares = {kind: covered(found[kind], found["kernels"]) for kind in ("out", "in") if found[kind]}
        rows.append([
            name, busy / 1e3, *(length(union(found[kind])) / 1e3 for kind in ("out", "in", "pageable")),
            shares.get("out"), shares.get("in"),
        ])  # fmt: skip
        if on_cuda and tiers[0] != "none":
            promises.append(
                Promise(
                    f"{name}: share of copies to the host that no kernel hides", 1 - shares.get("out", 0.0), 1 - HIDDEN
                )
            )
    return rows, promises


def _forward_and_backward(engine: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    engine.backward(token_loss(engine(batch[0]), batch[1]))


# ---- what it costs


def lacking(ground: Ground, stage: int, tiers: Tiers) -> str:
    """Which memory a case does not fit into by the formula; empty if it fits."""
    with torch.device("meta"):
        model = GPT(ground.size)
    config = zero_config(stage, ground.size.batch, dtype="bf16")
    settings = load_config(offload_config(stage, tiers, ground.path, config), world_size=1)
    held = footprint_of(settings, size_of(model), plan_of(settings), one_memory=ground.device.type == "cpu")
    kept = activations_of(model.to(torch.bfloat16), ground.size.batch, ground.size.context).plain
    if ground.device.type == "cuda" and held.device.peak + kept > USABLE * torch.cuda.mem_get_info()[0]:
        return "the device's memory"
    # Page-locked memory is rounded up to powers of two.
    host = held.host.resident + 2 * held.host.grads + held.host.working
    return "the host's memory" if host > USABLE * psutil.virtual_memory().available else ""


def throughput(ground: Ground, steps: int) -> list[list[Any]]:
    """Rows: a model of more than a billion parameters without and with offload, in tokens a second."""
    rows: list[list[Any]] = []
    for stage, tiers in ((2, ("none", "none")), (2, ("cpu", "none")), (3, ("cpu", "cpu")), (2, ("nvme", "none"))):
        name = f"large model, {name_of(stage, tiers)}"
        if not ground.clock.affords(name, ground.until):
            continue
        if lack := lacking(ground, stage, tiers):
            ground.clock.left_out.append(f"{name} ({lack})")
            continue
        with progress(name):
            rows.append(_measured(ground, stage, tiers, steps))
    return rows


def _measured(ground: Ground, stage: int, tiers: Tiers, steps: int) -> list[Any]:
    on_cuda = ground.device.type == "cuda"
    synchronize: Callable[[], None] = torch.cuda.synchronize if on_cuda else lambda: None
    gc.collect()
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_cuda else 0
    engine, data, numel = _engine(ground, stage, tiers)
    seconds: list[float] = []
    for number in range(steps + 1):
        batch = next(data)
        synchronize()
        start = time.monotonic()
        _forward_and_backward(engine, batch)
        engine.step()
        synchronize()
        if number:  # the first makes the optimizer's state
            seconds.append(time.monotonic() - start)
        if len(seconds) > 1 and time.monotonic() > ground.until:
            break
    engine.destroy()
    each = sorted(seconds)[len(seconds) // 2]
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if on_cuda else None
    return [name_of(stage, tiers), numel / 1e9, ground.size.batch * ground.size.context / each, 1e3 * each, peak]
