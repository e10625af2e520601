"""The truth: a naive trainer in one process that replays what every rank does and shares no code with the product.

Forward and backward are plain autograd in the model's own dtype. Everything after it is fp64, written out by hand:
the sum over micro-batches and ranks, the norm, the clipping, the optimizer and the master weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .scenario import Outcome, Recipe, Scenario, Spot, build


class PlainRun:
    """A `Run` over the bare module."""

    def __init__(self, module: nn.Module, accumulation: int) -> None:
        self.module = module
        self.spot = Spot(0, 0, 0)
        self.losses: list[float] = []
        self._accumulation = accumulation

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        self.losses.append(loss.item())
        (loss / self._accumulation).backward(retain_graph=retain_graph)

    def zero_grad(self) -> None:
        self.module.zero_grad(set_to_none=True)


class Sgd:
    """Momentum SGD with L2 decay, for one parameter."""

    def __init__(self, master: Tensor, settings: Mapping[str, Any]) -> None:
        self.master, self.settings = master, settings
        self.velocity = torch.zeros_like(master)

    def update(self, grad: Tensor) -> None:
        grad = grad + self.settings["weight_decay"] * self.master
        self.velocity = self.settings["momentum"] * self.velocity + grad
        self.master -= self.settings["lr"] * self.velocity


class AdamW:
    """Adam with decoupled decay, for one parameter."""

    def __init__(self, master: Tensor, settings: Mapping[str, Any]) -> None:
        self.master, self.settings, self.time = master, settings, 0
        self.mean, self.square = torch.zeros_like(master), torch.zeros_like(master)

    def update(self, grad: Tensor) -> None:
        first, second = self.settings["betas"]
        self.time += 1
        self.master *= 1 - self.settings["lr"] * self.settings["weight_decay"]
        self.mean = first * self.mean + (1 - first) * grad
        self.square = second * self.square + (1 - second) * grad * grad
        mean, square = self.mean / (1 - first**self.time), self.square / (1 - second**self.time)
        self.master -= self.settings["lr"] * mean / (square.sqrt() + self.settings["eps"])


class Reference:
    """Trains one model as `world` ranks would.

    Parameters that got no gradient count as zero gradients. Buffers belong to a rank. A step whose gradient is not
    finite is left out.
    """

    def __init__(self, scenario: Scenario, recipe: Recipe, world: int) -> None:
        self.scenario, self.recipe, self.world = scenario, recipe, world
        self.model = build(scenario, recipe.dtype)
        self.run = PlainRun(self.model, recipe.accumulation)
        self.trainable = {n: p for n, p in self.model.named_parameters() if p.requires_grad and p.numel()}
        self.optimizers = self._optimizers()
        self.buffers = [{k: b.clone() for k, b in self.model.named_buffers()} for _ in range(world)]
        self.outcomes = [Outcome() for _ in range(world)]

    def _optimizers(self) -> dict[str, Sgd | AdamW]:
        kind = Sgd if self.recipe.optimizer == "sgd" else AdamW
        settings = self.scenario.settings(self.recipe)
        groups = self.scenario.groups(self.model) or [{"params": list(self.model.parameters())}]
        own = {id(p): {**settings, **group} for group in groups for p in group["params"]}
        return {name: kind(p.detach().double(), own[id(p)]) for name, p in self.trainable.items()}

    @contextmanager
    def _as_rank(self, rank: int) -> Any:
        """The model with the buffers of `rank`."""
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self.buffers[rank][name])
        try:
            yield
        finally:
            self.buffers[rank] = {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def _gradients(self, step: int) -> dict[str, Tensor]:
        """The mean over ranks of the sum over micro-batches, fp64."""
        sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in self.trainable.items()}
        for rank in range(self.world):
            with self._as_rank(rank):
                for micro in range(self.recipe.accumulation):
                    self._micro(Spot(step, rank, micro), sums)
        return {name: total / self.world for name, total in sums.items()}

    def _micro(self, spot: Spot, sums: dict[str, Tensor]) -> None:
        self.model.zero_grad(set_to_none=True)
        self.run.spot, self.run.losses = spot, self.outcomes[spot.rank].losses
        torch.manual_seed(spot.generator().initial_seed())
        self.scenario.micro(self.run)
        for name, parameter in self.trainable.items():
            if parameter.grad is not None:
                sums[name] += parameter.grad.double()

    def _update(self, gradients: dict[str, Tensor], norm: float) -> None:
        if not math.isfinite(norm):
            return
        clip = self.recipe.clip
        scale = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        with torch.no_grad():
            for name, parameter in self.trainable.items():
                self.optimizers[name].update(gradients[name] * scale)
                parameter.copy_(self.optimizers[name].master)

    def train(self) -> list[Outcome]:
        """All steps; one outcome a rank (its own losses, evaluations and buffers; the rest is common)."""
        for step in range(self.recipe.steps):
            gradients = self._gradients(step)
            norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
            self._update(gradients, norm)
            for rank, outcome in enumerate(self.outcomes):
                outcome.norms.append(norm)
                if step == 0:
                    outcome.first_grads = gradients
                self.run.spot = Spot(step, rank, 0)
                with self._as_rank(rank):
                    result = self.scenario.after_step(self.run)
                if result is not None:
                    outcome.evals.append(result)
        for rank, outcome in enumerate(self.outcomes):
            outcome.weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
            outcome.masters = {name: optimizer.master for name, optimizer in self.optimizers.items()}
            outcome.buffers = self.buffers[rank]
        return self.outcomes
