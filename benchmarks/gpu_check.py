"""One command for a machine with one NVIDIA GPU, at most eight minutes: is ZeRO right on it, how fast, how large?

    python benchmarks/gpu_check.py              --dry_run: tiny sizes on the CPU, to see that it runs

NCCL refuses two ranks on one GPU, so the world is 1: every stage, its groups, hooks and update, every offload with its
copies, but no communication. Each part has its share of the time; what there was no time or room for is said.
Exit status 1 if a check fails. It needs zrun_runtime's own requirements and downloads nothing.
"""

from __future__ import annotations

import gc
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from common import BenchmarkError, Promise, Report, machine, main, parser, progress, table
from gpu_offload import OFFLOADS, Clock, Ground, Tiers, name_of, offload_config, overlap, throughput
from implementations import ADAMW, CLIP, zero_config
from model import GPT, SIZES, Size, count, token_batches, token_loss
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import zrun_runtime

SHORT: list[str] = []
MINUTES = 8
SHARES = {"parity": 0.35, "overlap": 0.12, "throughput": 0.25}  # of the time; the rest is for speed, which comes last
MARGIN = 20  # seconds in which what began last has to end
ACCUMULATION = 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Whole-model error against naive training. In bf16 a master that differs in its last bit may round the other way.
PARITY = {"fp32": 1e-5, "bf16": 1e-3}
SYNCHRONISING = ("cudaStreamSynchronize", "cudaEventSynchronize")
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Scope:
    """What a run measures on, and how much."""

    device: torch.device
    parity: Size
    speed: Size
    large: Size
    parity_steps: int
    timed_steps: int
    passes: int

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def new_model(self, size: Size) -> GPT:
        """The same values every time."""
        torch.manual_seed(0)
        with self.device:
            return GPT(size)


# ---- is it right


def parity(ground: Ground, scope: Scope) -> tuple[list[list[Any]], list[Promise]]:
    """Rows and promises: each stage and offload against naive training of the same model on the same batches."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    rows, promises = [], []
    cases = [*((stage, ("none", "none")) for stage in range(4)), *OFFLOADS]
    expected = {}
    for dtype in PARITY:
        with progress(f"naive training, {dtype}"):
            expected[dtype] = naive(scope, dtype)
    for stage, tiers in cases:
        for dtype, limit in PARITY.items():
            name = f"{name_of(stage, tiers)}, {dtype}"
            if not ground.clock.affords(f"parity, {name}", ground.until):
                continue
            with progress(name):
                values, losses = under_zero(ground, scope, (stage, tiers), dtype)
            wanted, wanted_losses = expected[dtype]
            error = (distance(values, wanted) / distance(wanted, [torch.zeros_like(v) for v in wanted])).item()
            off = max(abs(a - b) for a, b in zip(losses, wanted_losses, strict=True))
            rows.append([name, f"{error:.1e}", f"{off:.1e}", losses[0], losses[-1]])
            promises.append(Promise(f"{name}: weights differ from naive training", error, limit))
    torch.use_deterministic_algorithms(False)
    return rows, promises


def distance(values: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """L2 over all tensors, in fp64."""
    squares = [(a.double() - b.double()).square().sum() for a, b in zip(values, others, strict=True)]
    return torch.stack(squares).sum().sqrt()


def naive(scope: Scope, dtype: str) -> tuple[list[Tensor], list[float]]:
    """Plain training without zrun: fp32 weights, or bf16 weights with fp32 masters. (fp32 weights, losses)"""
    model = scope.new_model(scope.parity).to(DTYPES[dtype])
    parameters = list(model.parameters())
    masters = [p.detach().float().clone() for p in parameters]
    optimizer = torch.optim.AdamW(masters, fused=True, **ADAMW)
    data, losses = token_batches(scope.parity, 0, scope.device), []
    for _ in range(scope.parity_steps):
        gradients = [torch.zeros_like(master) for master in masters]
        total = 0.0
        for _ in range(ACCUMULATION):
            inputs, targets = next(data)
            loss = token_loss(model(inputs), targets)
            (loss / ACCUMULATION).backward()
            total += loss.item() / ACCUMULATION
            for gradient, parameter in zip(gradients, parameters, strict=True):
                if parameter.grad is not None:
                    gradient.add_(parameter.grad)
                    parameter.grad = None
        losses.append(total)
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        for parameter, master in zip(parameters, masters, strict=True):
            parameter.data.copy_(master)
    return masters, losses


def under_zero(ground: Ground, scope: Scope, case: tuple[int, Tiers], dtype: str) -> tuple[list[Tensor], list[float]]:
    """The same with an engine. (fp32 weights, losses)"""
    model, (stage, tiers) = scope.new_model(scope.parity), case
    config = offload_config(stage, tiers, ground.path, zero_config(stage, scope.parity.batch, ACCUMULATION, dtype))
    engine, *_ = zrun_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    data, losses = token_batches(scope.parity, 0, scope.device), []
    for _ in range(scope.parity_steps):
        for _ in range(ACCUMULATION):
            inputs, targets = next(data)
            engine.backward(token_loss(engine(inputs), targets))
            engine.step()
        losses.append(engine.mean_loss())
    values = [zrun_runtime.safe_get_full_fp32_param(p) for p in model.parameters()]
    engine.destroy()
    return [value.detach().clone() for value in values if value is not None], losses


# ---- how fast, how large, how often does the host wait

Step = Callable[[Batch], None]


def torch_step(scope: Scope, dtype: str) -> Step:
    """torch alone: weights, gradients and optimizer state all in one dtype."""
    model = scope.new_model(scope.speed).to(DTYPES[dtype])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(batch: Batch) -> None:
        token_loss(model(batch[0]), batch[1]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def zero_step(scope: Scope, stage: int, dtype: str) -> Step:
    """An engine at a stage; in bf16 with fp32 masters and moments."""
    model = scope.new_model(scope.speed)
    config = zero_config(stage, scope.speed.batch, dtype=dtype)
    engine, *_ = zrun_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(batch: Batch) -> None:
        engine.backward(token_loss(engine(batch[0]), batch[1]))
        engine.step()

    return step


def contestants(scope: Scope) -> dict[str, Callable[[], Step]]:
    """name -> how to build it. Each is built, measured and dropped before the next."""
    named: dict[str, Callable[[], Step]] = {}
    for dtype in ("bf16", "fp32"):
        named[f"torch {dtype}, AdamW in {dtype}"] = lambda dtype=dtype: torch_step(scope, dtype)  # type: ignore[misc]
        for stage in range(4):
            named[f"zrun stage {stage}, {dtype}"] = lambda s=stage, d=dtype: zero_step(scope, s, d)  # type: ignore[misc]
    return named


def measure(scope: Scope, build: Callable[[], Step], profiled: bool) -> dict[str, float]:
    """ms a step, bytes at rest and at most, and per step what the host waited for."""
    gc.collect()
    if scope.is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if scope.is_cuda else 0
    step, data = build(), token_batches(scope.speed, 0, scope.device)
    for _ in range(3):
        step(next(data))
    batches = [next(data) for _ in range(scope.timed_steps)]
    scope.synchronize()
    start = time.perf_counter()
    for batch in batches:
        step(batch)
    scope.synchronize()
    found = {"ms": 1e3 * (time.perf_counter() - start) / len(batches)}
    if scope.is_cuda:
        found["rest"] = torch.cuda.memory_allocated() - before
        found["peak"] = torch.cuda.max_memory_allocated() - before
    return {**found, **(host_waits(scope, step, batches[:2]) if profiled else {})}


def host_waits(scope: Scope, step: Step, batches: Sequence[Batch]) -> dict[str, float]:
    """Per step: waits of the host for the device, scalars read (those of host tensors too), and kernels launched."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * scope.is_cuda
    with profile(activities=activities) as seen:
        for batch in batches:
            step(batch)
    counts = {entry.key: entry.count for entry in seen.key_averages()}
    launches = sum(n for key, n in counts.items() if key.startswith(("cudaLaunchKernel", "cuLaunchKernel")))
    return {
        "waits": sum(counts.get(key, 0) for key in SYNCHRONISING) / len(batches),
        "reads": counts.get("aten::_local_scalar_dense", 0) / len(batches),
        "launches": launches / len(batches),
    }


def speed(clock: Clock, scope: Scope) -> tuple[list[list[Any]], list[Promise], dict[str, Any]]:
    """Rows, promises and all figures; the second pass runs backwards."""
    named = contestants(scope)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in named}
    for number in range(scope.passes):
        for name in list(named) if number % 2 == 0 else list(named)[::-1]:
            if not clock.affords(f"speed, pass {number + 1}, {name}", clock.end):
                continue
            with progress(f"pass {number + 1} of {scope.passes}: {name}"):
                found[name].append(measure(scope, named[name], profiled=number == 0))
    rows, promises = [], []
    numel = count(scope.new_model(scope.speed))
    found = {name: runs for name, runs in found.items() if runs}
    milliseconds = {name: statistics.median(run["ms"] for run in runs) for name, runs in found.items()}
    for name, runs in found.items():
        peer = next(other for other in named if other.startswith("torch") and other[6:10] in name)
        first = runs[0]
        memory = [first[key] / numel if key in first else None for key in ("rest", "peak")]
        times = milliseconds[name] / milliseconds[peer] if peer in found else None
        rows.append([name, milliseconds[name], times, *memory,
                     first["waits"] if scope.is_cuda else None, first["reads"], first["launches"] or None])  # fmt: skip
        if scope.is_cuda and name.startswith("zrun"):
            promises.append(Promise(f"{name}: waits of the host for the device, a step", first["waits"], 1))
    return rows, promises, found


# ---- all of it


def scope_of(dry_run: bool) -> Scope:
    """The GPU, or for a dry run tiny sizes on the CPU.

    Raises:
        BenchmarkError: there is no GPU.
    """
    if dry_run:
        os.environ["ZRUN_DEVICE"] = "cpu"
        return Scope(
            torch.device("cpu"), SIZES["tiny"], SIZES["tiny"], SIZES["tiny"], parity_steps=4, timed_steps=2, passes=1
        )
    if not torch.cuda.is_available():
        raise BenchmarkError("gpu_check: torch sees no CUDA device; --dry_run runs tiny sizes on the CPU")
    return Scope(
        torch.device("cuda"), SIZES["33m"], SIZES["370m"], SIZES["1.3b"], parity_steps=10, timed_steps=8, passes=2
    )


def describe(scope: Scope) -> Iterator[str]:
    """The environment, a line each."""
    yield machine()
    world = zrun_runtime.distributed.current_world()
    yield f"backend {world.backend}, world {world.size}, device {world.device}; TF32 off"
    if scope.is_cuda:
        properties = torch.cuda.get_device_properties(0)
        yield f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"


def bench(arguments: Sequence[str]) -> Report:
    """See the top of the file."""
    options = parse(arguments)
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(60 * MINUTES)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic products need
    torch.set_float32_matmul_precision("highest")
    scope = scope_of(options.dry_run)
    zrun_runtime.init_distributed()
    notes = list(describe(scope))
    clock = Clock(time.monotonic() + 60 * MINUTES - MARGIN)
    with tempfile.TemporaryDirectory(dir=options.nvme_path) as path:
        grounds = {
            part: Ground(scope.device, size, path, clock, time.monotonic() + 60 * MINUTES * share)
            for part, size, share in _shares(scope)
        }
        parity_rows, kept = parity(grounds["parity"], scope)
        overlap_rows, hidden = overlap(grounds["overlap"])
        large_rows = throughput(grounds["throughput"], scope.timed_steps)
    speed_rows, quick, figures = speed(clock, scope)
    signal.alarm(0)
    size = scope.speed
    numel = count(scope.new_model(size))
    notes.append(f"speed, overlap: GPT of {numel / 1e6:.1f}M parameters, batch {size.batch} x {size.context} tokens")
    notes += [f"left out: {what}" for what in clock.left_out]
    return Report(
        "One GPU" if scope.is_cuda else "One GPU: dry run on the CPU",
        notes,
        [
            table(("", "weights off", "losses off", "first loss", "last loss"), parity_rows),
            table(("forward and backward", "device busy, ms", "to the host, ms", "to the device, ms", "pageable, ms",
                   "out beside kernels", "in beside kernels"), overlap_rows),
            table(("", "billion parameters", "tokens a second", "ms a step", "GiB at most"), large_rows),
            table(("", "ms a step", "x torch", "B/param rest", "peak", "host waits", "scalars read", "launches"),
                  speed_rows),
        ],
        [*kept, *hidden, *quick],
        {"parity": parity_rows, "overlap": overlap_rows, "large": large_rows, "speed": figures,
         "left_out": clock.left_out},
    )  # fmt: skip


def _shares(scope: Scope) -> Iterator[tuple[str, Size, float]]:
    """By part: its model, and the share of all time after which it has to be over."""
    over = 0.0
    for part, size in (("parity", scope.parity), ("overlap", scope.speed), ("throughput", scope.large)):
        over += SHARES[part]
        yield part, size, over


def _out_of_time(*_: Any) -> None:
    raise BenchmarkError(f"gpu_check: not done in {MINUTES} minutes")


def parse(arguments: Sequence[str]) -> Any:
    """The options of a run."""
    made = parser(__doc__)
    made.add_argument("--nvme_path", help="a directory on the disk; default: that of temporary files")
    made.add_argument("--dry_run", action="store_true", help="tiny sizes on the CPU")
    return made.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(bench, parse))
