"""Bytes of model state that ranks hold, under every stage and offload, against what `zrun plan` says before.

Live torch storages of each rank between steps, found without asking the engine, and the files on the disk; on a machine
without a GPU the device and the host are one memory, so both are compared together.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import Promise, Report, machine, main, parser, progress, run_ranks, table, words
from implementations import zero_config
from memory import live_bytes
from model import GPT, SIZES, count, token_batches, token_loss

import zrun_runtime
from zrun_runtime.config import load_config
from zrun_runtime.model_size import size_of
from zrun_runtime.savings import footprint_of, plan_of

SHORT = ["--sizes", "33m"]
MIB = 2**20
CASES = [
    *((stage, "none", "none") for stage in range(4)),
    *((stage, tier, "none") for tier in ("cpu", "nvme") for stage in (1, 2, 3)),
    (3, "cpu", "cpu"), (3, "nvme", "cpu"), (3, "nvme", "nvme"),
]  # fmt: skip


def measure(size: str, dtype: str, cases: list[list[Any]], path: str) -> list[dict[str, int]]:
    """For each case what this rank holds after two steps, in memory and on disk, and what was predicted for both."""
    gc.collect()
    gc.freeze()
    return [_measure(size, dtype, case, path) for case in cases]


def _measure(size: str, dtype: str, case: list[Any], path: str) -> dict[str, int]:
    stage, optimizer, params = case
    config = zero_config(stage, SIZES[size].batch, dtype=dtype)
    for key, device in (("offload_optimizer", optimizer), ("offload_param", params)):
        if device != "none":
            config["zero_optimization"][key] = {"device": device, "nvme_path": path}
    if params == "nvme":
        config["zero_optimization"]["offload_param"]["max_in_cpu"] = 0
    gc.collect()
    before = live_bytes()
    model = GPT(SIZES[size])
    settings = load_config(config, world_size=int(os.environ["WORLD_SIZE"]))
    predicted = footprint_of(settings, size_of(model), plan_of(settings), one_memory=True)
    engine, *_ = zrun_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    data = token_batches(SIZES[size], engine.world.rank)
    for _ in range(2):
        inputs, targets = next(data)
        engine.backward(token_loss(engine(inputs), targets))
        engine.step()
    gc.collect()
    torch.distributed.barrier()
    on_disk = sum(file.stat().st_blocks * 512 for file in Path(path).rglob("*") if file.is_file())
    found = {
        "parameters": count(engine.module),
        "held": live_bytes() - before,
        "formula_held": predicted.device.resident + predicted.host.resident + predicted.host.working,
        "disk": on_disk // engine.world.size,
        "formula_disk": predicted.disk.resident,
    }
    torch.distributed.barrier()  # nobody takes its files away before they were counted
    engine.destroy()
    del engine, model
    return found


def bench(arguments: Sequence[str]) -> Report:
    """See the top of the file."""
    options = parse(arguments)
    where, rows, promises, found = machine(), [], [], {}
    cases = [case for case in CASES if options.params or case[2] == "none"]
    for size in options.sizes:
        with progress(f"{size}, {len(cases)} cases"), tempfile.TemporaryDirectory(dir=options.nvme_path) as path:
            keywords = {"size": size, "dtype": options.dtype, "cases": cases, "path": path}
            found[size] = run_ranks("plan_memory:measure", keywords, options.world)
        for (stage, optimizer, params), ranks in zip(cases, zip(*found[size], strict=True), strict=True):
            title = f"{size}, ZeRO {stage}, optimizer {optimizer}, parameters {params}"
            worst = max(ranks, key=lambda rank: abs(rank["held"] / rank["formula_held"] - 1))
            share = worst["held"] / worst["formula_held"]
            disk = worst["disk"] / worst["formula_disk"] if worst["formula_disk"] else None
            rows.append((title, worst["formula_held"] / MIB, share, worst["formula_disk"] / MIB or None, disk))
            promises.append(Promise(f"{title}: |held / plan - 1|", abs(share - 1), 0.05))
            if disk is not None:
                promises.append(Promise(f"{title}: |on disk / plan - 1|", abs(disk - 1), 0.05))
    return Report(
        "Model state of a rank between steps, against what zrun plan says",
        [where, f"{options.dtype}, AdamW, {options.world} ranks; MiB; the rank that differs most"],
        [table(("", "plan, memory", "held / plan", "plan, disk", "on disk / plan"), rows)],
        promises,
        found,
    )


def parse(arguments: Sequence[str]) -> Any:
    """The options of a run."""
    made = parser(__doc__)
    made.add_argument("--sizes", type=words, default=["33m", "110m"])
    made.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    made.add_argument("--world", type=int, default=2)
    made.add_argument("--nvme_path", help="a directory on the disk; default: that of temporary files")
    made.add_argument("--params", action="store_true", help="with offloaded parameters too")
    return made.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(bench, parse))
