"""What the ranks run: a scenario trained through the public face of the runtime."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import zrun_runtime

from .models import SCENARIOS
from .scenario import Outcome, Recipe, Scenario, Spot, build


@dataclass
class Trained(Outcome):
    """An outcome, and what only a rank of the real thing can tell."""

    digest: str = ""  # of every weight's bytes
    counters: tuple[int, int, int] = (0, 0, 0)  # global, micro and skipped steps


class EngineRun:
    """A `Run` over an engine."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.module: nn.Module = engine.module
        self.spot = Spot(0, 0, 0)
        self.losses: list[float] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        self.losses.append(loss.item())
        self.engine.backward(loss, retain_graph=retain_graph)

    def zero_grad(self) -> None:
        self.engine.zero_grad()


def make_config(stage: int, recipe: Recipe, settings: dict[str, Any]) -> dict[str, Any]:
    """The config dict of a recipe, in the field's keys."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": recipe.accumulation,
        "gradient_clipping": recipe.clip,
        "zero_optimization": {"stage": stage},
        "steps_per_print": None,
    }
    if not recipe.client:
        config["optimizer"] = {"type": {"sgd": "SGD", "adamw": "AdamW"}[recipe.optimizer], "params": settings}
    if recipe.dtype is torch.bfloat16:
        config["bf16"] = {"enabled": True}
    return config


def make_engine(scenario: Scenario, stage: int, recipe: Recipe, *, seed: int = 0) -> Any:
    """An engine over a fresh model of the scenario."""
    model = build(scenario, recipe.dtype, seed)
    if recipe.dtype is torch.bfloat16:
        model.float()  # the engine casts; values that bf16 can hold make it no matter what the masters are taken from
    return engine_of(model, scenario, stage, recipe)


def engine_of(
    model: nn.Module, scenario: Scenario, stage: int, recipe: Recipe, options: Mapping[str, Any] | None = None
) -> Any:
    """An engine over this model, with the scenario's optimizer groups and settings. options: of zero_optimization."""
    settings = scenario.settings(recipe)
    groups = scenario.groups(model) or [{"params": [p for p in model.parameters() if p.requires_grad]}]
    arguments: dict[str, Any] = {"model": model, "config": make_config(stage, recipe, settings)}
    arguments["config"]["zero_optimization"].update(options or {})
    if recipe.client:
        kind = torch.optim.SGD if recipe.optimizer == "sgd" else torch.optim.AdamW
        arguments["optimizer"] = kind(groups, **settings)
    else:
        arguments["model_parameters"] = groups
    return zrun_runtime.initialize(**arguments)[0]


def gathered(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters, at any stage. Collective."""
    with zrun_runtime.zero.GatheredParameters(list(module.parameters())):
        return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def digest(weights: dict[str, Tensor]) -> str:
    """Equal if and only if every tensor is equal to the bit."""
    mark = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        mark.update(name.encode() + weight.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return mark.hexdigest()


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """What an optimizer can change: trainable parameters that have elements."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad and p.numel()}


def full_grads(module: nn.Module) -> dict[str, Tensor]:
    """The gradients of all trained parameters, between a boundary backward and step. Collective."""
    return {name: zrun_runtime.safe_get_full_grad(p).detach().clone() for name, p in trained(module).items()}


def masters(module: nn.Module) -> dict[str, Tensor]:
    """The fp32 weights behind all trained parameters. Collective."""
    return {name: zrun_runtime.safe_get_full_fp32_param(p).detach().clone() for name, p in trained(module).items()}


def train(rank: int, world: int, *, name: str, stage: int, recipe: Recipe) -> Trained:
    """The case: train scenario `name` for the recipe's steps. Weights and gradients come back from rank 0 only."""
    scenario = SCENARIOS[name]()
    # Every rank begins with other weights: initialize() has to give all of them those of rank 0.
    return follow(make_engine(scenario, stage, recipe, seed=rank), scenario, recipe, rank)


def follow(engine: Any, scenario: Scenario, recipe: Recipe, rank: int) -> Trained:
    """Drive an engine through a recipe."""
    run, result = EngineRun(engine), Trained()
    run.losses = result.losses
    for step in range(recipe.steps):
        for micro in range(recipe.accumulation):
            run.spot = Spot(step, rank, micro)
            torch.manual_seed(run.spot.generator().initial_seed())
            scenario.micro(run)
            assert engine.is_gradient_accumulation_boundary() == (micro == recipe.accumulation - 1)
            if step == 0 and engine.is_gradient_accumulation_boundary():
                result.first_grads = full_grads(engine.module)
            engine.step()
        result.norms.append(float(engine.get_global_grad_norm()))
        run.spot = Spot(step, rank, 0)
        evaluated = scenario.after_step(run)
        if evaluated is not None:
            result.evals.append(evaluated)
    result.weights = gathered(engine.module)
    result.masters = masters(engine.module)
    result.buffers = {key: buffer.clone() for key, buffer in engine.module.named_buffers()}
    result.digest = digest(result.weights)
    result.counters = (engine.global_steps, engine.micro_steps, engine.skipped_steps)
    if rank:
        result.first_grads = result.weights = result.masters = {}
    return result
