"""What the ranks run for test_compiled.py: models of which parts, or all, go through torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from .engine_uses import SGD
from .scenario import CLASSES, WIDTH, Recipe, Run, Scenario, Spot, Stack, build
from .training import EngineRun, engine_of, gathered


class Shapes(Scenario):
    """Plain blocks over batches whose size changes with the step."""

    hyper = {"sgd": SGD}

    def build(self) -> nn.Module:
        return Stack()

    def batch(self, spot: Spot) -> Any:
        generator = spot.generator()
        size = 3 + 2 * spot.step
        return torch.randn(size, WIDTH, generator=generator), torch.randint(CLASSES, (size,), generator=generator)

    def loss(self, run: Run, batch: Any) -> Tensor:
        features, classes = batch
        return F.cross_entropy(run.forward(features), classes)


def _blocks(model: Any, **options: Any) -> None:
    for block in model.blocks:
        block.compile(**options)


def _wrapped_blocks(model: Any, **options: Any) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, **options)


def _whole(model: Any, **options: Any) -> None:
    model.compile(**options)


def _ran(model: Any, **options: Any) -> None:
    """Compiled and run before initialize."""
    _blocks(model, **options)
    model(torch.randn(3, WIDTH)).sum().backward()
    model.zero_grad(set_to_none=True)


def _whole_wrapped(model: Any, **options: Any) -> None:
    """As `torch.compile(model)`, which is given to initialize in its place."""


BEFORE: dict[str, Callable[..., None]] = {
    "blocks": _blocks,
    "wrapped blocks": _wrapped_blocks,
    "ran": _ran,
    "whole": _whole,
    "wrapped": _whole_wrapped,
}
AFTER: dict[str, Callable[..., None]] = {"blocks": _blocks, "whole": _whole}


def train_compiled(
    rank: int, world: int, *, stage: int, how: str, late: bool, dynamic: bool | None, backend: str
) -> dict[str, Any]:
    """Three steps. What it said if it was refused, the weights without it, and how many graphs were compiled."""
    torch._dynamo.reset()
    scenario, recipe = Shapes(), Recipe(steps=3)
    model = build(scenario)
    counter = CompileCounterWithBackend(backend)
    options: dict[str, Any] = {"backend": counter, "fullgraph": True, "dynamic": dynamic}
    found: dict[str, Any] = {"said": "", "graphs": 0}
    try:
        if not late:
            BEFORE[how](model, **options)
        if how == "wrapped":
            model = torch.compile(model, **options)
        engine = engine_of(model, scenario, stage, recipe, {"stage3_param_persistence_threshold": 0})
        if late:
            if how == "whole":
                engine.compile(compile_kwargs=options)
            else:
                AFTER[how](engine.module, **options)
        run = EngineRun(engine)
        for step in range(recipe.steps):
            run.spot = Spot(step, rank, 0)
            scenario.micro(run)
            engine.step()
        found["weights"] = {name.replace("_orig_mod.", ""): w for name, w in gathered(engine.module).items()}
        found["losses"] = run.losses
    except Exception as error:
        found["said"] = f"{type(error).__name__}: {error}"
    found["graphs"] = counter.frame_count
    return found
