"""What a training case is: a model, its batches, and how one micro-batch runs. Knows neither product nor reference.

A scenario is written once and run twice: on the ranks, where `run.forward` is the engine, and in one process, where it
is the bare module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16
CLASSES = 5
SCENARIOS: dict[str, type[Scenario]] = {}


@dataclass(frozen=True)
class Spot:
    """One micro-batch of a run."""

    step: int
    rank: int
    micro: int

    def generator(self) -> torch.Generator:
        """Seeded for this micro-batch alone."""
        return torch.Generator().manual_seed(1_000_003 * self.step + 10_007 * self.rank + 101 * self.micro + 17)


class Run(Protocol):
    """What a scenario may do to what is being trained. `backward` divides by the accumulation and records the loss."""

    module: nn.Module
    spot: Spot

    def forward(self, *args: Any, **kwargs: Any) -> Any: ...

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None: ...

    def zero_grad(self) -> None: ...


@dataclass(frozen=True)
class Recipe:
    """How to train. Learning rates are large enough for 10 steps to move every weight visibly."""

    optimizer: str = "sgd"  # "sgd" (with momentum) or "adamw"
    accumulation: int = 1
    clip: float = 0.0  # global norm; 0 is off
    client: bool = False  # the user builds the optimizer, else the config names it
    steps: int = 10
    dtype: torch.dtype = torch.float32  # what the whole model is cast to

    @property
    def hyper(self) -> dict[str, Any]:
        if self.optimizer == "sgd":
            return {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
        return {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@dataclass
class Outcome:
    """What a run left behind. Tensors by parameter or buffer name."""

    losses: list[float] = field(default_factory=list)  # one each backward, in order, of one rank
    evals: list[float] = field(default_factory=list)  # what `after_step` returned, of one rank
    norms: list[float] = field(default_factory=list)  # global gradient norm before clipping, each step
    first_grads: dict[str, Tensor] = field(default_factory=dict)  # mean over ranks, before clipping, in step 0
    weights: dict[str, Tensor] = field(default_factory=dict)
    masters: dict[str, Tensor] = field(default_factory=dict)  # fp32 or finer
    buffers: dict[str, Tensor] = field(default_factory=dict)  # of one rank


class Scenario:
    """A feature of models that has to train right. Subclasses with a `name` are found in SCENARIOS."""

    name: ClassVar[str] = ""
    tolerance: ClassVar[float] = 1e-5  # norm-relative; only rounding of 16-bit parameters is a reason for more
    stages: ClassVar[tuple[int, ...]] = (0, 1, 2, 3)
    hyper: ClassVar[dict[str, dict[str, Any]]] = {}  # optimizer -> what differs from the recipe's

    def __init_subclass__(cls) -> None:
        if cls.name:
            SCENARIOS[cls.name] = cls

    def build(self) -> nn.Module:
        """A fresh model. The caller seeds."""
        raise NotImplementedError

    def batch(self, spot: Spot) -> Any:
        """Inputs of one micro-batch: here (4, WIDTH) features and (4,) classes."""
        generator = spot.generator()
        return torch.randn(4, WIDTH, generator=generator), torch.randint(CLASSES, (4,), generator=generator)

    def loss(self, run: Run, batch: Any) -> Tensor:
        features, classes = batch
        return F.cross_entropy(run.forward(features), classes)

    def micro(self, run: Run) -> None:
        """Forward and backward of one micro-batch, and whatever else the feature is about."""
        run.backward(self.loss(run, self.batch(run.spot)))

    def after_step(self, run: Run) -> float | None:
        """Something between two steps, e.g. an evaluation; its result is compared."""
        return None

    def groups(self, model: nn.Module) -> list[dict[str, Any]] | None:
        """Optimizer groups, or None for one group of all trainable parameters."""
        return None

    def settings(self, recipe: Recipe) -> dict[str, Any]:
        """Hyper-parameters of the optimizer for this scenario."""
        return {**recipe.hyper, **self.hyper.get(recipe.optimizer, {})}


class TokenScenario(Scenario):
    """Batches of token numbers: (2, 6) in, (2, 6) wanted out."""

    vocabulary: ClassVar[int] = 31

    def batch(self, spot: Spot) -> Any:
        tokens = torch.randint(self.vocabulary, (2, 7), generator=spot.generator())
        return tokens[:, :-1], tokens[:, 1:].contiguous()

    def loss(self, run: Run, batch: Any) -> Tensor:
        tokens, wanted = batch
        return F.cross_entropy(run.forward(tokens).flatten(0, 1).float(), wanted.flatten())


class Block(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int = WIDTH, hidden: int = 24) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks in a ModuleList between a linear stem and a linear head; `block` makes one."""

    def __init__(self, block: Callable[[], nn.Module] = Block, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """`module` in evaluation mode and no gradients."""
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train()


def build(scenario: Scenario, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """The scenario's model with weights that depend on nothing but `seed`; no parameter starts as all zeros."""
    torch.manual_seed(seed)
    model = scenario.build()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() and not parameter.any():
                parameter.normal_(std=0.1)
    return model.to(dtype) if dtype is not torch.float32 else model
