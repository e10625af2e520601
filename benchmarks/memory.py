"""Bytes of model state that a rank holds, found by walking live torch storages, against the formula of ZeRO.

Between steps, in bytes a parameter, N ranks: weights 4 in fp32 and 2 in bf16, divided by N in stage 3; optimizer
state 8 (two fp32 moments) and for bf16 4 more (fp32 masters), divided by N from stage 1 on. Gradients are not held. In
stage 3 the full weights that exist at any moment of a step are at most those of the two largest groups (of a block, an
embedding or the head), with a twentieth and 2^18 elements more for a small third. A buffer of full weights is a storage
that is empty between steps; its size is read at every module's start and end, in forward and backward, and at every
gradient.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Any

import torch
from common import Promise, Report, machine, main, numbers, parser, progress, run_ranks, table
from implementations import zero_config
from model import GPT, SIZES, Block, count, token_batches, token_loss
from torch import Tensor, nn

import zrun_runtime

SHORT = ["--worlds", "1,2"]
MIB = 2**20


def formula(stage: int, world: int, dtype: str) -> float:
    """Bytes a parameter between steps."""
    weight, optimizer = (4, 8) if dtype == "fp32" else (2, 12)
    return weight / (world if stage == 3 else 1) + optimizer / (world if stage >= 1 else 1)


# ---- in each rank


def live_storages() -> dict[int, torch.UntypedStorage]:
    """Every storage that some Python object refers to, each once, by its address."""
    found: dict[int, torch.UntypedStorage] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor):
                storage = thing.untyped_storage()
                found[storage._cdata] = storage
    return found


def live_bytes() -> int:
    """Bytes of all live storages."""
    return sum(storage.nbytes() for storage in live_storages().values())


def measure(cases: list[list[Any]], size: str) -> list[dict[str, Any]]:
    """For each (stage, dtype): what this rank holds between steps, and what full weights it holds within one."""
    gc.collect()
    gc.freeze()  # what is there now is not walked again
    return [_measure(size, *case) for case in cases]


def _measure(size: str, stage: int, dtype: str) -> dict[str, Any]:
    sizes = SIZES[size]
    torch.manual_seed(0)
    gc.collect()
    before = live_bytes()
    model = GPT(sizes)
    groups = [count(m) for m in model.modules() if isinstance(m, (Block, nn.Embedding))] + [count(model.head)]
    numel = count(model)
    engine, *_ = zrun_runtime.initialize(
        model=model, model_parameters=model.parameters(), config=zero_config(stage, sizes.batch, dtype=dtype)
    )
    data = token_batches(sizes, engine.world.rank)
    for _ in range(2):
        _step(engine, *next(data))
    gc.collect()
    held = live_bytes() - before
    watch = Watch(engine.module)
    _step(engine, *next(data))
    watch.remove()
    told = sum(engine.state_bytes().values())
    engine.destroy()
    del engine, model
    return {
        "parameters": numel,
        "held": held,
        "told": told,
        "full": watch.most,
        "two_groups": sum(sorted(groups)[-2:]) * (4 if dtype == "fp32" else 2),
    }


def _step(engine: Any, inputs: Tensor, targets: Tensor) -> None:
    engine.backward(token_loss(engine(inputs), targets))
    engine.step()


class Watch:
    """Follows the storages that are empty now; `most` is the most bytes they held together."""

    def __init__(self, model: nn.Module) -> None:
        self.most = 0
        self._empty = [storage for storage in live_storages().values() if storage.nbytes() == 0]
        self._handles: list[Any] = [p.register_post_accumulate_grad_hook(self._look) for p in model.parameters()]
        for module in model.modules():
            self._handles += [
                module.register_forward_pre_hook(self._look),
                module.register_forward_hook(self._look),
                module.register_full_backward_pre_hook(self._look),
                module.register_full_backward_hook(self._look),
            ]

    def _look(self, *_: Any) -> None:
        self.most = max(self.most, sum(storage.nbytes() for storage in self._empty))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._empty.clear()


def measure_thousand() -> list[dict[str, int]]:
    """By stage, a model of about 1,000 parameters: the most bytes alive after steps and at modules' starts and ends."""
    gc.collect()
    gc.freeze()
    return [_measure_thousand(stage) for stage in range(4)]


def _measure_thousand(stage: int) -> dict[str, int]:
    gc.collect()
    before = live_bytes()
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 32), nn.Linear(32, 8))
    numel, most = count(model), 0
    engine, *_ = zrun_runtime.initialize(model=model, model_parameters=model.parameters(), config=zero_config(stage, 4))

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, live_bytes() - before)

    for module in model:
        module.register_forward_hook(look)
        module.register_full_backward_hook(look)
    for _ in range(3):
        engine.backward(engine(torch.randn(4, 8)).square().mean())
        look()
        engine.step()
        look()
    engine.destroy()
    return {"parameters": numel, "most": most}


# ---- around them


def bench(arguments: Sequence[str]) -> Report:
    """See the top of the file."""
    options = parse(arguments)
    cases = [(stage, dtype) for dtype in ("fp32", "bf16") for stage in range(4)]
    where, rows, promises, found = machine(), [], [], {}
    for world in options.worlds:
        with progress(f"{len(cases)} cases, world {world}"):
            found[world] = run_ranks("memory:measure", {"cases": cases, "size": options.size}, world)
        for (stage, dtype), results in zip(cases, zip(*found[world], strict=True), strict=True):
            worst = max(results, key=lambda result: result["held"])
            name, exact, numel = (
                f"{dtype}, stage {stage}, world {world}",
                formula(stage, world, dtype),
                worst["parameters"],
            )
            held, told = worst["held"] / numel, worst["told"] / numel
            full = max(result["full"] for result in results) / worst["two_groups"]
            rows.append((name, exact, held, told, full))
            promises.append(Promise(f"{name}: bytes a parameter", held, 1.05 * exact + MIB / numel))
            if stage == 3:
                most = 1.05 + 2**18 * (4 if dtype == "fp32" else 2) / worst["two_groups"]
                promises.append(Promise(f"{name}: full weights / two groups", full, most))
    world = max(options.worlds)
    with progress(f"1,000 parameters, world {world}"):
        small = run_ranks("memory:measure_thousand", {}, world)
    for stage, results in enumerate(zip(*small, strict=True)):
        text = f"a model of {results[0]['parameters']} parameters, stage {stage}, world {world}: KiB alive"
        promises.append(Promise(text, max(result["most"] for result in results) / 1024, 1024))
    about = "live torch storages of the rank that holds most; told: what the engine says"
    return Report(
        "Model state held by a rank between steps, bytes a parameter",
        [where, f"GPT of {numel / 1e6:.1f}M parameters; {about}"],
        [table(("", "formula", "held", "told", "full weights in a step / two groups"), rows)],
        promises,
        found,
    )


def parse(arguments: Sequence[str]) -> Any:
    """The options of a run."""
    made = parser(__doc__)
    made.add_argument("--size", choices=sorted(SIZES), default="small")
    made.add_argument("--worlds", type=numbers, default=[1, 2, 4])
    return made.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(bench, parse))
