"""The offloaded update beside what the machine can do: a disk's plain loop, a copy of the same bytes, DeepSpeed's.

- NVMe: a step of AdamW on bf16 weights whose fp32 masters and moments are on the disk moves 24 bytes a parameter.
  Beside it a plain loop reads and writes files of the same sizes, direct, in requests of 8 MiB, and computes nothing.
- Host: the same step with the state in memory, gradients of bf16 cast and clipped, weights shown in bf16. Beside it a
  loop copies 14 bytes a parameter to 14 others, which is the 28 that AdamW must read and write.
- DeepSpeed's CPU Adam with the same casts and clip, in processes of its own that take turns with ours (if peers.sh made
  its environment).

In turn, the peer at once after ours; the median of the pairs, as disks and shared machines drift.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import PEERS_PYTHON, BenchmarkError, Promise, Report, machine, main, parser, progress, run_ranks, table
from torch import nn

import zrun_runtime

SHORT = ["--millions", "16", "--pairs", "3", "--rounds", "3"]
MIB = 2**20
BYTES_MOVED = 24  # on a disk, a parameter: masters and two moments, read and written
BYTES_COPIED = 28  # in memory, a parameter


class Pile(nn.Module):
    """Weights in layers of a million; only their update is measured."""

    def __init__(self, millions: int) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.full((1024, 1024), 0.5)) for _ in range(millions))


def engine_with(millions: int, tier: str, path: str) -> Any:
    """An engine over a pile, its first two steps made."""
    offload = {"device": tier, **({"nvme_path": path} if tier == "nvme" else {})}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2, "offload_optimizer": offload},
    }
    model = Pile(millions)
    engine, *_ = zrun_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(2):
        update(engine)
    return engine


def update(engine: Any, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of an update alone: gradients are there, and nothing has to be sent."""
    for parameter in engine.module.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    verdict = engine.zero.vote([], 1.0)
    start = clock()
    engine.zero.update(verdict)
    seconds = clock() - start
    engine.zero.end_step()
    return seconds


# ---- what the machine can do


def plain_loop(path: str, sizes: Sequence[int]) -> Callable[[], float]:
    """Read and write files of these sizes, one buffer, direct, in requests of 8 MiB; seconds."""
    buffer = torch.empty(8 * MIB + 4096, dtype=torch.uint8)
    start = -buffer.data_ptr() % 4096
    view = buffer[start : start + 8 * MIB].fill_(1).numpy().data
    files = []
    for number, size in enumerate(sizes):
        file = os.open(Path(path, f"plain-{number}"), os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(file, 0, size)
        files.append((file, size))

    def run() -> float:
        begun = time.perf_counter()
        for file, size in files:
            for offset in range(0, size, 8 * MIB):
                part = view[: min(8 * MIB, size - offset)]
                os.preadv(file, [part], offset)
                os.pwritev(file, [part], offset)
        return time.perf_counter() - begun

    run()  # so that every block was written once
    return run


def copy_loop(numel: int) -> Callable[[], float]:
    """Copy half of the bytes that AdamW reads and writes to the other half; CPU seconds."""
    source = torch.ones(numel * BYTES_COPIED // 2, dtype=torch.uint8)
    target = torch.empty_like(source)

    def run() -> float:
        begun = time.process_time()
        target.copy_(source)
        return time.process_time() - begun

    run()
    return run


# ---- in a process of its own


def nvme(millions: int, pairs: int, path: str) -> dict[str, Any]:
    """Seconds of updates and of plain loops, in turn."""
    engine = engine_with(millions, "nvme", path)
    stores = engine.updater.homes.stores.values()
    loop = plain_loop(path, [store.nbytes for store in stores])
    found: dict[str, Any] = {"ours": [], "plain": [], "bytes": 2 * sum(store.nbytes for store in stores)}
    for _ in range(pairs):
        found["ours"].append(update(engine))
        found["plain"].append(loop())
    engine.destroy()
    return found


def host(millions: int, pairs: int) -> dict[str, list[float]]:
    """CPU seconds of updates and of copies, in turn (one thread each, so that others on the machine count less)."""
    found: dict[str, list[float]] = {"ours": [], "copy": []}
    engine, copies = engine_with(millions, "cpu", ""), copy_loop(millions * MIB)
    for _ in range(pairs):
        found["ours"].append(update(engine, time.process_time))
        found["copy"].append(copies())
    engine.destroy()
    return found


def deepspeed(millions: int, pairs: int) -> list[float]:
    """CPU seconds of DeepSpeed's update: gradients to fp32, clipped, its kernel, weights to bf16."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # which our ranks have not

    master = nn.Parameter(torch.full((millions * MIB,), 0.5))
    shown, grad = master.detach().bfloat16(), torch.full((millions * MIB,), 0.01).bfloat16()
    optimizer = DeepSpeedCPUAdam([master], lr=1e-3, weight_decay=0.01)
    master.grad = wide = torch.empty_like(master)
    taken = []
    for _ in range(2 + pairs):
        begun = time.process_time()
        wide.copy_(grad)
        wide.mul_(0.5)
        optimizer.step()
        shown.copy_(master.detach())
        taken.append(time.process_time() - begun)
    return taken[2:]


# ---- all of it


def ratio(some: Sequence[float], others: Sequence[float]) -> float:
    """The median of the pairs' ratios."""
    return statistics.median(a / b for a, b in zip(some, others, strict=True))


def beside_deepspeed(how: dict[str, int], rounds: int) -> tuple[dict[str, list[float]], list[str]]:
    """Ours (with the copies) and DeepSpeed's, `rounds` processes of each in turn: medians of each process; and why
    DeepSpeed's are missing, if they are."""
    found: dict[str, list[float]] = {"ours": [], "copy": [], "slower": [], "deepspeed": []}
    why = [] if PEERS_PYTHON.exists() else [f"DeepSpeed: not measured, {PEERS_PYTHON} is not there (peers.sh makes it)"]
    for number in range(rounds):
        with progress(f"host, round {number + 1} of {rounds}"):
            memory = run_ranks("offload:host", how, world=1)[0]
        found["slower"].append(ratio(memory["ours"], memory["copy"]))
        for name in ("ours", "copy"):
            found[name].append(statistics.median(memory[name]))
        if why:
            continue
        try:
            with progress("DeepSpeed's (compiles first, once, for minutes)"):
                peer = run_ranks("offload:deepspeed", how, world=1, python=str(PEERS_PYTHON))[0]
            found["deepspeed"].append(statistics.median(peer))
        except BenchmarkError as error:
            why.append(f"DeepSpeed: not measured, its update does not run here: {str(error).splitlines()[-1]}")
    return found, why


def bench(arguments: Sequence[str]) -> Report:
    """See the top of the file."""
    options = parse(arguments)
    notes = [machine(), f"{options.millions} x 2^20 parameters, {options.pairs} pairs, one thread"]
    how = {"millions": options.millions, "pairs": options.pairs}
    with tempfile.TemporaryDirectory(prefix="zrun-bench-", dir=options.path) as path, progress("nvme"):
        disk = run_ranks("offload:nvme", {**how, "path": path}, world=1)[0]
    memory, why = beside_deepspeed(how, options.rounds)
    speed = ratio(disk["plain"], disk["ours"])
    slower = statistics.median(memory["slower"])
    gigabytes = [disk["bytes"] / 1e9 / statistics.median(disk[name]) for name in ("ours", "plain")]
    rows = [
        ["NVMe step", 1e3 * statistics.median(disk["ours"]), gigabytes[0], None],
        ["plain loop of the same bytes", 1e3 * statistics.median(disk["plain"]), gigabytes[1], speed],
        ["host step", 1e3 * statistics.median(memory["ours"]), None, None],
        ["copy of 28 bytes a parameter", 1e3 * statistics.median(memory["copy"]), None, slower],
    ]
    promises = [
        Promise("time of the plain loop over that of the NVMe step, the other way round", 1 / speed, 1 / 0.85),
        Promise("time of the host step over that of the copy", slower, 1.3),
    ]
    if not why:
        peers = ratio(memory["ours"], memory["deepspeed"])
        rows.append(["DeepSpeed's host step", 1e3 * statistics.median(memory["deepspeed"]), None, peers])
        promises.append(Promise("time of the host step over that of DeepSpeed's", peers, 1 / 1.2))
    data = {"nvme": disk, "host": memory}
    return Report("Offload", notes + why, [table(("", "ms", "GB/s", "ratio"), rows)], promises, data)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a run."""
    made = parser(__doc__)
    made.add_argument("--millions", type=int, default=64, help="parameters, in 2^20")
    made.add_argument("--pairs", type=int, default=7)
    made.add_argument("--rounds", type=int, default=3, help="processes of each, for the host step")
    made.add_argument("--path", default=tempfile.gettempdir(), help="a directory on the disk")
    return made.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(bench, parse))
