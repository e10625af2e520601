"""The other half of a comparison: one process that does with torch alone what all ranks do with an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zrun_runtime

from .compare import distance
from .scenario import WIDTH, Recipe, Spot
from .training import make_config

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """With momentum and decay, so that a step more or less shows."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.5, weight_decay=0.01)


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Counts steps, so that a parameter that was frozen has another count than its neighbours. A large eps, as a
    mathematically zero gradient would otherwise be a step of full size."""
    return torch.optim.AdamW(parameters, lr=2e-3, eps=1e-3, weight_decay=0.1)


class Alone:
    """A model and an optimizer over fp32 copies of its parameters. What got no gradient is left out, as torch does."""

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.model = model
        self.named = dict(model.named_parameters())
        self.masters = {name: nn.Parameter(p.detach().float().clone()) for name, p in self.named.items()}
        self.start = {name: master.detach().clone() for name, master in self.masters.items()}
        self.optimizer = make_optimizer(list(self.masters.values()))

    def moved(self) -> bool:
        """Training did something to every parameter."""
        return not any(torch.equal(self.masters[name].detach(), start) for name, start in self.start.items())

    def step(self) -> None:
        """One update; gradients are dropped."""
        for name, parameter in self.named.items():
            self.masters[name].grad = parameter.grad.float() if parameter.grad is not None else None
            parameter.grad = None
        self.optimizer.step()
        for name, parameter in self.named.items():
            if self.masters[name].grad is not None:
                parameter.data.copy_(self.masters[name].detach())


def engine_over(model: nn.Module, stage: int, recipe: Recipe, client: Any = None, **keys: Any) -> Any:
    """An engine with a client optimizer over this model; no group is too small to be sharded."""
    config = {
        **make_config(stage, Recipe(accumulation=recipe.accumulation, client=True, dtype=recipe.dtype), {}),
        **keys,
    }
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return zrun_runtime.initialize(model=model, config=config, optimizer=client)[0]


def features(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(4, WIDTH), other values for each rank and step."""
    return torch.randn(4, WIDTH, generator=Spot(step, rank, 0).generator()).to(dtype)


def far(engine_parameters: dict[str, nn.Parameter], alone: Alone) -> dict[str, float]:
    """How far each trained parameter's master is from the other's. A collective."""
    found = {}
    for name, parameter in engine_parameters.items():
        master = zrun_runtime.safe_get_full_fp32_param(parameter)
        if master is not None and name in alone.masters:
            found[name] = distance(master, alone.masters[name].detach())
    return found


def said(action: Callable[[], Any]) -> str:
    """The class and message of the error that `action` raises, or ""."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
