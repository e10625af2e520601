"""Saving and loading beside torch.distributed.checkpoint, of the same state, by two ranks, one after the other.

State: fp32 weights and two moments each. `110m` is a GPT; `many` is 10,000 parameters of 1,000 elements. Torch's side
gets the same tensors as DTensors of one shard a rank. Both write to the same disk and sync their files; before a load
the page cache lets go of the files, as after a restart. Times are those of the slowest rank; ratios are medians over
interleaved pairs. Extra memory is the peak of the resident set during the call, less what was resident before. Ours
verifies every byte at load.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Promise, Report, base_environment, machine, main, parser, progress, run_ranks, table
from implementations import zero_config
from model import GPT, SIZES, token_batches, token_loss
from torch import Tensor, nn

import zrun_runtime

SHORT = ["--rounds", "3"]
MIB = 2**20
SMALL = {"many": 10_000, "fewer": 2_000}  # parameters
EXPORT_SHARD = 100 * 10**6  # bytes


class Many(nn.Module):
    """So many small parameters."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(torch.randn(1000)) for _ in range(count))

    def forward(self) -> Tensor:
        return torch.stack([value[0] for value in self.values]).square().mean()


# ---- in each rank


def resident(peak: bool = False) -> int:
    """Bytes of memory that this process has, or had at most since `forget_peak`."""
    word = "VmHWM" if peak else "VmRSS"
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(word))
    return int(line.split()[1]) * 1024


def forget_files(place: Path) -> None:
    """Have the page cache let go of files that were synced."""
    for path in place.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """(seconds, extra MiB) of a call, after all ranks have come to it."""
    gc.collect()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, start = resident(), time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    return seconds, (resident(peak=True) - before) / MIB


def build(kind: str) -> Any:
    """An engine that has made one step, so that there are moments."""
    model = Many(SMALL[kind]) if kind in SMALL else GPT(SIZES[kind])
    config = zero_config(1, 1)
    engine, *_ = zrun_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    if kind in SMALL:
        engine.backward(engine())
    else:
        tokens, wanted = next(iter(token_batches(SIZES[kind], rank=dist.get_rank())))
        engine.backward(token_loss(engine(tokens), wanted))
    engine.step()
    return engine


def as_dtensors(model: nn.Module) -> dict[str, Tensor]:
    """Tensors of the same sizes, three for each parameter, a shard on each rank."""
    mesh = importlib.import_module("torch.distributed.device_mesh").init_device_mesh("cpu", (dist.get_world_size(),))
    tensor = importlib.import_module("torch.distributed.tensor")
    return {
        f"{kind}.{name}": tensor.distribute_tensor(torch.randn(p.shape), mesh, [tensor.Shard(0)])
        for kind in ("weight", "exp_avg", "exp_avg_sq")
        for name, p in model.named_parameters()
    }


def measure(kind: str, rounds: int, directory: str) -> dict[str, list[tuple[float, float]]]:
    """Seconds and extra MiB of each call, by round."""
    dcp = importlib.import_module("torch.distributed.checkpoint")
    zrun_runtime.init_distributed(dist_backend="gloo")
    engine = build(kind)
    state = as_dtensors(engine.module)
    found: dict[str, list[tuple[float, float]]] = {key: [] for key in ("save", "load", "dcp save", "dcp load", "stall")}
    settings = engine.settings.checkpoint
    for number in range(-1, rounds):  # the first is not counted
        place = Path(directory, str(number))
        calls: dict[str, Callable[[], Any]] = {
            "save": lambda p=place: engine.save_checkpoint(p / "ours"),
            "dcp save": lambda p=place: dcp.save(state, checkpoint_id=p / "torch"),
            "load": lambda p=place: engine.load_checkpoint(p / "ours"),
            "dcp load": lambda p=place: dcp.load(state, checkpoint_id=p / "torch"),
        }
        for key in sorted(calls, key=lambda key: (key.split()[-1] == "load", (number + len(key)) % 2)):
            dist.barrier()
            forget_files(place)
            result = timed(calls[key])
            if number >= 0:
                found[key].append(result)
        engine._saver.settings = settings.model_copy(update={"asynchronous": True})
        result = timed(lambda p=place: engine.save_checkpoint(p / "background"))
        engine._saver.wait()
        engine._saver.settings = settings
        if number >= 0:
            found["stall"].append(result)
        dist.barrier()
        if dist.get_rank() == 0 and number < rounds - 1:
            shutil.rmtree(place)
        dist.barrier()
    return found


# ---- the report


def export_peak(directory: Path) -> float:
    """MiB at the peak of exporting a checkpoint into files of EXPORT_SHARD bytes, Python and torch included."""
    code = (
        "import sys; from zrun_runtime.commands.checkpoint import checkpoint\n"
        "checkpoint(sys.argv[1:], standalone_mode=False)\n"
        "print([line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')][0])"
    )
    output = directory / "exported"
    command = [sys.executable, "-c", code, "export", str(directory), str(output), "--max_shard_size", str(EXPORT_SHARD)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=base_environment()).stdout
    return int(said.split()[-1]) / 1024


def parse(arguments: Sequence[str]) -> Any:
    """The options."""
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=7, help="pairs of each kind")
    made.add_argument("--kinds", default="110m,many", help="110m, 33m, many, fewer")
    made.add_argument("--directory", help="on the disk that is meant; default: the temporary one")
    return made.parse_args(arguments)


def bench(arguments: Sequence[str]) -> Report:
    """Run all kinds."""
    options = parse(arguments)
    report = Report("Checkpoints", [machine(), "2 ranks; seconds of the slowest, median of rounds; MiB: the largest"])
    rows, data = [], {}
    for kind in options.kinds.split(","):
        with tempfile.TemporaryDirectory(prefix="zrun-bench-", dir=options.directory) as scratch:
            with progress(kind):
                ranks = run_ranks("checkpoint:measure", {"kind": kind, "rounds": options.rounds, "directory": scratch})
            peak = export_peak(Path(scratch, str(options.rounds - 1), "ours")) if kind not in SMALL else None
        data[kind] = ranks
        slowest = {key: [max(r[key][i][0] for r in ranks) for i in range(options.rounds)] for key in ranks[0]}
        extra = {key: max(r[key][i][1] for r in ranks for i in range(options.rounds)) for key in ranks[0]}
        for key, seconds in slowest.items():
            rows.append((f"{kind}: {key}", statistics.median(seconds), extra[key]))
        limit = 0.2 if kind in SMALL else 1.15

        def ratio(one: str, other: str, found: dict[str, list[float]] = slowest) -> float:
            return statistics.median(a / b for a, b in zip(found[one], found[other], strict=True))

        report.promises += [
            Promise(f"{kind}: save, of dcp.save's time", ratio("save", "dcp save"), limit),
            Promise(f"{kind}: load, of dcp.load's time", ratio("load", "dcp load"), limit),
            Promise(f"{kind}: stall of an async save, of the save's time", ratio("stall", "save"), 0.25),
            Promise(f"{kind}: extra MiB of a save", extra["save"], 64.0),
            Promise(f"{kind}: extra MiB of a load", extra["load"], 64.0),
        ]
        if peak is not None:
            text = f"{kind}: MiB at the peak of an export"
            report.promises.append(Promise(text, peak, (2 * EXPORT_SHARD) / MIB + 300))
    report.tables.append(table(("", "seconds", "extra MiB"), rows))
    report.data = data
    return report


if __name__ == "__main__":
    sys.exit(main(bench, parse))
