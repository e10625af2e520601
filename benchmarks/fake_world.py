"""One process plays one rank of a world of up to 4096: the real engine's layout, bytes held and bytes sent.

Over torch's fake process group and on the meta device, where tensors have shapes and no values, `initialize`, forward,
backward and step run as they are. Bytes held are those of all live storages, found without asking the engine, and
compared with the formula of `zrun plan`; bytes sent are what the runtime counts. Each case is a fresh process.
"""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from common import Promise, Report, machine, main, numbers, parser, progress, run_ranks, table, words
from implementations import zero_config
from memory import Watch, live_bytes
from model import GPT, Size, count, token_loss

import zrun_runtime
from zrun_runtime.memory import Widths, footprint, sent_bytes
from zrun_runtime.model_size import size_of
from zrun_runtime.plan import StatePlan

SHORT = ["--worlds", "1024", "--stages", "1,3"]
GIB = 2**30
MODELS = {
    "7b": Size(width=4096, layers=32, heads=32, vocabulary=32000, context=512, batch=1),
    "70b": Size(width=8192, layers=86, heads=64, vocabulary=32000, context=512, batch=1),
}
DTYPE, ACCUMULATION, STEPS = "bf16", 2, 2


# ---- in the process


def measure(name: str, world: int, stage: int) -> dict[str, Any]:
    """What rank `world // 3` of such a world holds and sends."""
    dist.init_process_group("cpu:fake,meta:fake", rank=world // 3, world_size=world, store=dist.HashStore())
    sizes = MODELS[name]
    gc.collect()
    gc.freeze()
    before = live_bytes()
    with torch.device("meta"):
        model = GPT(sizes)
    predicted = _predict(model, world, stage)
    engine, *_ = zrun_runtime.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=zero_config(stage, sizes.batch, ACCUMULATION, DTYPE),
    )
    ids = torch.zeros(sizes.batch, sizes.context, dtype=torch.int64, device="meta")
    within = 0
    for _ in range(STEPS):
        engine.traffic()
        for micro in range(ACCUMULATION):
            engine.backward(token_loss(engine(ids), ids))
            within = _held(before) if micro == 0 else within
            engine.step()
    sent = engine.traffic()
    watch = Watch(engine.module)
    engine.backward(token_loss(engine(ids), ids))
    watch.remove()
    engine.zero_grad()
    found = {
        "parameters": count(model),
        "groups": len(engine.zero.groups),
        "largest": max(group.layout.padded_numel for group in engine.zero.groups),
        "held": _held(before),
        "within": within,
        "told": sum(engine.state_bytes().values()),
        "sent": sent["reduce_scatter"] + sent["all_gather"],
        "other": sent["other"],
        "full": watch.most,
        "seconds": time.process_time(),
        "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        **predicted,
    }
    dist.destroy_process_group()
    return found


def _held(before: int) -> int:
    """Bytes of the storages that live since then."""
    gc.collect()
    return live_bytes() - before


def _predict(model: GPT, world: int, stage: int) -> dict[str, int]:
    """By the formula."""
    size, plan = size_of(model), StatePlan.of_stage(stage)
    widths = Widths(weight=2, moments=8, grad=4, wire=4, accumulates=True)
    held = footprint(size, widths, plan, world).device
    return {
        "formula_held": held.resident,
        "formula_within": held.resident + held.grads,
        "formula_full": 2 * size.two_largest if plan.shards_params else 0,
        "formula_sent": sum(sent_bytes(size, widths, plan, world, ACCUMULATION)),
    }


# ---- around it


def bench(arguments: Sequence[str]) -> Report:
    """See the top of the file."""
    options = parse(arguments)
    where, rows, promises, found = machine(), [], [], {}
    for name in options.models:
        for world in options.worlds:
            for stage in options.stages:
                title = f"{name}, world {world:,}, stage {stage}"
                with progress(title):
                    (got,) = run_ranks(
                        "fake_world:measure", {"name": name, "world": world, "stage": stage}, 1, timeout=600
                    )
                found[title] = got
                rows.append((
                    title, got["groups"], got["largest"], got["formula_held"] / GIB, got["held"] / got["formula_held"],
                    got["within"] / got["formula_within"],
                    got["full"] / GIB, got["formula_sent"] / GIB,
                    got["sent"] / got["formula_sent"], got["seconds"], got["rss"] / GIB,
                ))  # fmt: skip
                promises += _promises(title, world, got)
    headers = (
        "", "groups", "largest group", "formula, GiB held", "held / formula", "with gradients / formula",
        "GiB of whole weights in a step",         "formula, GiB sent", "sent / formula", "CPU s", "GiB of the process",
    )  # fmt: skip
    about = f"{DTYPE}, AdamW, {ACCUMULATION} micro-batches accumulated in fp32, second step of one rank"
    return Report(
        "A rank of a large world, played by one process on the meta device",
        [where, about],
        [table(headers, [[f"{v:.4f}" if i in (4, 5, 8) else v for i, v in enumerate(row)] for row in rows])],
        promises,
        found,
    )


def _promises(title: str, world: int, got: dict[str, Any]) -> list[Promise]:
    kept = []
    for what, key in (("held", "held"), ("held with gradients", "within"), ("sent", "sent")):
        kept.append(Promise(f"{title}: |{what} / formula - 1|", abs(got[key] / got[f"formula_{key}"] - 1), 0.01))
    if got["formula_full"]:
        kept.append(Promise(f"{title}: whole weights / two groups", got["full"] / got["formula_full"], 1.01))
    if world == 1024:
        kept.append(Promise(f"{title}: CPU seconds, imports included", got["seconds"], 60))
    return [*kept, Promise(f"{title}: GiB resident in the process", got["rss"] / GIB, 2)]


def parse(arguments: Sequence[str]) -> Any:
    """The options of a run."""
    made = parser(__doc__)
    made.add_argument("--models", type=words, default=list(MODELS))
    made.add_argument("--worlds", type=numbers, default=[8, 64, 1024, 4096])
    made.add_argument("--stages", type=numbers, default=[0, 1, 2, 3])
    return made.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(bench, parse))
