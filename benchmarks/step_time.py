"""One GPT, one job, two ranks: milliseconds, CPU time and memory of a step under DDP, FSDP2, DeepSpeed and ZeRO 0-3.

Runs are paired: a sweep runs every implementation once, in fresh processes, and the next sweep runs them in reverse.
Ratios are medians of the ratios within a sweep, so a slow phase of the machine counts for both sides. Where all cores
are busy the CPU time of a step is the steadier number.
"""

from __future__ import annotations

import gc
import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from common import (
    PEERS_PYTHON,
    BenchmarkError,
    Promise,
    Report,
    machine,
    main,
    parser,
    progress,
    run_ranks,
    table,
    words,
)
from implementations import IMPLEMENTATIONS, Trainer, build, load
from model import GPT, SIZES, count, token_batches, token_loss

DEFAULT = "ddp,ddp_zero,fsdp2_keep,fsdp2,plain,zrun0,zrun1,zrun2,zrun3"
SHORT = ["--size", "33m", "--impl", "ddp,fsdp2,zrun0,zrun1,zrun2,zrun3", "--sweeps", "3", "--steps", "4"]
LOSS_TOLERANCE = 2e-5
# (implementation, peer, wall time at most this many times the peer's)
BARS = (("zrun1", "ddp", 0.95), ("zrun2", "ddp", 0.95), ("zrun3", "ddp", 1.10), ("zrun3", "fsdp2", 0.65))


# ---- in each rank


def measure(implementation: str, size: str, steps: int, warmup: int) -> dict[str, Any]:
    """Train, and say what a step took on this rank: times in ms, memory in bytes a parameter."""
    load(implementation)
    dist.init_process_group("gloo")
    sizes, rank = SIZES[size], dist.get_rank()
    _touch_code()
    rss, pss = psutil.Process().memory_info().rss, _kib("/proc/self/smaps_rollup", "Pss:")
    torch.manual_seed(0)
    model = GPT(sizes)
    numel = count(model)
    trainer = build(implementation, model, sizes.batch)
    data = token_batches(sizes, rank)
    losses = [_timed_step(trainer, *next(data))[1] for _ in range(warmup)]
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of the timed steps
    before, walls = resource.getrusage(resource.RUSAGE_SELF), []
    for _ in range(steps):
        wall, loss = _timed_step(trainer, *next(data))
        walls.append(1e3 * wall)
        losses.append(loss)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "wall_ms": statistics.median(walls),
        "cpu_ms": 1e3 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / steps,
        "faults": (after.ru_minflt - before.ru_minflt) / steps,
        "rest": (psutil.Process().memory_info().rss - rss) / numel,
        "peak": (_kib("/proc/self/status", "VmHWM:") - rss) / numel,
        "pss": (_kib("/proc/self/smaps_rollup", "Pss:") - pss) / numel,
        "losses": [losses[0], losses[-1]],
        "parameters": numel,
    }


def _touch_code() -> None:
    """Train something tiny, so that the pages of torch's own code are there before memory is compared."""
    size = SIZES["tiny"]
    model = GPT(size)
    inputs, targets = next(token_batches(size, 0))
    token_loss(model(inputs), targets).backward()
    torch.optim.AdamW(model.parameters(), fused=True).step()
    del model
    gc.collect()


def _timed_step(trainer: Trainer, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
    """(seconds from all ranks ready to all ranks done, this rank's loss)"""
    dist.barrier()
    start = time.perf_counter()
    loss = token_loss(trainer.forward(inputs), targets)
    trainer.backward(loss)
    trainer.update()
    dist.barrier()
    return time.perf_counter() - start, loss.item()


def _kib(path: str, key: str) -> int:
    """A figure of a /proc file that counts in KiB, in bytes."""
    return 1024 * next(int(line.split()[1]) for line in Path(path).read_text().splitlines() if line.startswith(key))


# ---- around them


def run_once(implementation: str, options: Any) -> dict[str, Any]:
    """One run in fresh processes, ranks put together: means, the worst rank's memory, the mean loss."""
    arguments = {
        "implementation": implementation, "size": options.size, "steps": options.steps, "warmup": options.warmup
    }  # fmt: skip
    python = str(PEERS_PYTHON) if implementation.startswith("deepspeed") else sys.executable
    ranks = run_ranks("step_time:measure", arguments, options.world, python)
    means = ("wall_ms", "cpu_ms", "faults", "pss", "parameters")
    merged: dict[str, Any] = {key: statistics.fmean(rank[key] for rank in ranks) for key in means}
    merged |= {key: max(rank[key] for rank in ranks) for key in ("rest", "peak")}
    merged["losses"] = [statistics.fmean(rank["losses"][index] for rank in ranks) for index in (0, 1)]
    return merged


def sweep_all(names: Sequence[str], options: Any) -> list[dict[str, dict[str, Any]]]:
    """Each sweep's results by implementation; every second sweep runs backwards."""
    sweeps = []
    for number in range(options.sweeps):
        order = names if number % 2 == 0 else names[::-1]
        results = {}
        for name in order:
            with progress(f"sweep {number + 1} of {options.sweeps}: {name}"):
                results[name] = run_once(name, options)
        sweeps.append({name: results[name] for name in names})
    return sweeps


def ratio(sweeps: Sequence[dict[str, Any]], name: str, peer: str, key: str) -> list[float] | None:
    """[median, least, most] of the ratio to `peer` within each sweep; None if the peer did not run."""
    if peer not in sweeps[0]:
        return None
    ratios = sorted(sweep[name][key] / sweep[peer][key] for sweep in sweeps)
    return [statistics.median(ratios), ratios[0], ratios[-1]]


def loss_gap(sweeps: Sequence[dict[str, Any]], name: str) -> float | None:
    """The most that first and last loss differ from DDP's; None where they should (nothing is exchanged)."""
    if name == "plain" or "ddp" not in sweeps[0]:
        return None
    pairs = [zip(s[name]["losses"], s["ddp"]["losses"], strict=True) for s in sweeps]
    return max(abs(mine - peers) for pair in pairs for mine, peers in pair)


def summarise(names: Sequence[str], sweeps: Sequence[dict[str, Any]]) -> list[str]:
    """Two tables: times with their ratios, and memory with losses."""

    def median(name: str, key: str) -> float:
        return statistics.median(sweep[name][key] for sweep in sweeps)

    def times(name: str, peer: str, key: str) -> str | None:
        found = ratio(sweeps, name, peer, key)
        return f"{found[0]:.2f} [{found[1]:.2f}-{found[2]:.2f}]" if found else None

    time_rows = [
        (name, median(name, "wall_ms"), times(name, "ddp", "wall_ms"), times(name, "fsdp2", "wall_ms"),
         median(name, "cpu_ms"), times(name, "ddp", "cpu_ms"), times(name, "fsdp2", "cpu_ms"))
        for name in names
    ]  # fmt: skip
    memory_rows = []
    for name in names:
        first, last = (statistics.median(s[name]["losses"][i] for s in sweeps) for i in (0, 1))
        gap = loss_gap(sweeps, name)
        memory_rows.append(
            (name, median(name, "rest"), median(name, "peak"), median(name, "pss"), f"{median(name, 'faults'):,.0f}",
             f"{first:.5f}", f"{last:.5f}", None if gap is None else f"{gap:.1e}")
        )  # fmt: skip
    return [
        table(("", "ms a step", "x ddp", "x fsdp2", "CPU ms", "x ddp", "x fsdp2"), time_rows),
        table(("", "B/param rest", "peak", "PSS", "faults a step", "first loss", "last", "off ddp's"), memory_rows),
    ]


def promises(names: Sequence[str], sweeps: Sequence[dict[str, Any]], size: str) -> list[Promise]:
    """Equal losses first, then the bars on time."""
    found = []
    gaps = {name: loss_gap(sweeps, name) for name in names if name != "ddp"}
    for name, gap in gaps.items():
        if gap is not None:
            found.append(Promise(f"{name}: losses differ from ddp's", gap, LOSS_TOLERANCE))
    for name, peer, limit in BARS:
        measured = ratio(sweeps, name, peer, "wall_ms") if name in names else None
        if measured:
            found.append(Promise(f"{name}: wall time of a step, x {peer}, {size}", measured[0], limit))
    return found


def bench(arguments: Sequence[str]) -> Report:
    """See the top of the file."""
    options = parse(arguments)
    names = words(options.impl)
    for name in names:
        if name not in IMPLEMENTATIONS:
            raise BenchmarkError(f"--impl: {name!r} is not one of {', '.join(IMPLEMENTATIONS)}")
        if name.startswith("deepspeed") and not os.access(PEERS_PYTHON, os.X_OK):
            raise BenchmarkError(f"--impl: {name} needs {PEERS_PYTHON.parent.parent}; benchmarks/peers.sh makes it")
    where = machine()
    sweeps = sweep_all(names, options)
    parameters = sweeps[0][names[0]]["parameters"]
    return Report(
        f"Step time, GPT of {parameters / 1e6:.1f}M parameters, {options.world} ranks, one thread each, fp32",
        [where, f"{options.sweeps} paired sweeps, each a fresh run of {options.warmup} + {options.steps} steps; "
         "median, and in brackets the range of the sweeps' ratios; CPU: user + system, a rank"],
        summarise(names, sweeps),
        promises(names, sweeps, options.size),
        {"options": vars(options), "sweeps": sweeps},
    )  # fmt: skip


def parse(arguments: Sequence[str]) -> Any:
    """The options of a run."""
    made = parser(__doc__)
    made.add_argument("--size", choices=sorted(SIZES), default="110m")
    made.add_argument("--impl", default=DEFAULT, help=f"of {', '.join(IMPLEMENTATIONS)} (default: {DEFAULT})")
    made.add_argument("--sweeps", type=int, default=3)
    made.add_argument("--steps", type=int, default=5, help="timed steps of a run")
    made.add_argument("--warmup", type=int, default=2, help="steps before those")
    made.add_argument("--world", type=int, default=2)
    return made.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(bench, parse))
