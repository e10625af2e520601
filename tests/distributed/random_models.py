"""Models made at random: trees of modules with shared, frozen, reused, checkpointed and unused parts.

A tree is plain data (`Node`), so the ranks and the reference build the same model from it. Everything maps (4, SIZE)
features to the like; weights are float64, so that nothing hides behind rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zrun_runtime
from zrun_runtime.zero import set_z3_leaf_module

from .scenario import CLASSES, Recipe, Run, Scenario, Spot, build, evaluating
from .training import Trained, engine_of, follow

SIZE = 6
TOKENS = 7
LEAVES = (
    *("linear", "no bias", "norm", "batch norm", "attention", "own", "lookup", "in place", "lstm"),
    *("borrow", "tied", "again"),
)
INNER = (
    *("sequential", "list", "dict", "block", "loop", "checkpoint", "sometimes", "on some ranks", "never"),
    *("no grad", "bundle", "leaf"),
)


@dataclass(frozen=True)
class Node:
    """One module. `number` picks one of those before it (to share), a count, or a turn."""

    kind: str
    parts: tuple[Node, ...] = ()
    number: int = 0
    frozen: bool = False


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    tree: Node
    stage: int
    world: int
    recipe: Recipe
    stem: bool = True  # the tree's input needs a gradient
    reentrant: bool = False  # the kind of its checkpoints
    early: bool = False  # built in slices
    whole: bool = True  # small groups may stay full
    prefetch: bool = True


@dataclass
class Clock:
    """What parts of the model that choose their way look at."""

    turn: int = 0
    rank: int = 0
    tokens: Tensor | None = None


class Part(nn.Module):
    """A node. Its forward is a function of itself and x."""

    def __init__(self, action: Callable[[Any, Tensor], Tensor], **children: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.action = action
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x: Tensor) -> Tensor:
        return self.action(self, x)


class Bundle(nn.Module):
    """Takes its input in a list, gives its output in a dict."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, xs: list[Tensor]) -> dict[str, Any]:
        return {"out": (self.inner(xs[0]),), "other": None}


class Builder:
    """From nodes to modules."""

    def __init__(self, case: Case) -> None:
        self.case, self.clock = case, Clock()
        self.made: list[nn.Module] = []  # what may be shared, in the order of its making
        self.weights: list[nn.Linear] = []  # whose weight may be borrowed or tied
        self.diverging = 0  # ranks may differ in what they run of the node that is built
        self.repeating = 0  # it is in a checkpoint

    def build(self, node: Node) -> nn.Module:
        makers = {name.replace(" ", "_"): getattr(self, "_" + name.replace(" ", "_")) for name in LEAVES + INNER}
        module: nn.Module = makers[node.kind.replace(" ", "_")](node)
        if node.frozen:
            module.requires_grad_(False)
        if not any(getattr(m, "borrows", False) for m in module.modules()):
            self.made.append(module)
        return module

    def _parts(self, node: Node) -> list[nn.Module]:
        return [self.build(part) for part in node.parts] or [self._linear(node)]

    # ---- leaves

    def _linear(self, node: Node, bias: bool = True) -> nn.Module:
        self.weights.append(nn.Linear(SIZE, SIZE, bias=bias))
        return Part(lambda self, x: x + F.gelu(self.linear(x)), linear=self.weights[-1])

    def _no_bias(self, node: Node) -> nn.Module:
        return self._linear(node, bias=False)

    def _norm(self, node: Node) -> nn.Module:
        return Part(lambda self, x: x + self.norm(x), norm=nn.LayerNorm(SIZE, eps=0.1))

    def _batch_norm(self, node: Node) -> nn.Module:
        if self.repeating:
            return self._norm(node)  # a checkpoint that repeats its forward counts a batch twice
        return Part(lambda self, x: x + self.norm(x), norm=nn.BatchNorm1d(SIZE, eps=0.1))

    def _attention(self, node: Node) -> nn.Module:
        return Part(lambda self, x: x + self.attention(x, x, x)[0], attention=nn.MultiheadAttention(SIZE, 2))

    def _own(self, node: Node) -> nn.Module:
        ones = nn.ParameterList([nn.Parameter(torch.randn(SIZE)) for _ in range(2)])
        return Part(
            lambda self, x: x * self.scale + self.shifts[0] - self.shifts[1].tanh(),
            scale=nn.Parameter(torch.ones(())),
            shifts=ones,
        )

    def _lookup(self, node: Node) -> nn.Module:
        clock = self.clock
        return Part(lambda self, x: x + self.table(clock.tokens), table=nn.Embedding(TOKENS, SIZE))

    def _in_place(self, node: Node) -> nn.Module:
        return Part(lambda self, x: F.relu(self.linear(x).add_(x), inplace=True), linear=nn.Linear(SIZE, SIZE))

    def _lstm(self, node: Node) -> nn.Module:
        return Part(lambda self, x: x + self.rnn(x[None])[0][0], rnn=nn.LSTM(SIZE, SIZE))

    def _borrow(self, node: Node) -> nn.Module:
        if not self.weights or self.diverging:
            return self._linear(node)
        owner = [self.weights[node.number % len(self.weights)]]  # in a list: not a child
        part = Part(lambda self, x: x + F.linear(x, owner[0].weight).tanh())
        part.borrows = True
        return part

    def _tied(self, node: Node) -> nn.Module:
        part = self._linear(node)
        weights = self.weights
        weights[-1].weight = weights[node.number % len(weights)].weight
        return part

    def _again(self, node: Node) -> nn.Module:
        module = self.made[node.number % len(self.made)] if self.made else self._linear(node)
        differs = any(getattr(m, "differs", False) or isinstance(m, nn.BatchNorm1d) for m in module.modules())
        return self._linear(node) if differs and self.repeating else module

    # ---- inner nodes

    def _sequential(self, node: Node) -> nn.Module:
        return nn.Sequential(*self._parts(node))

    def _list(self, node: Node) -> nn.Module:
        return Part(lambda self, x: _through(self.items, x), items=nn.ModuleList(self._parts(node)))

    def _dict(self, node: Node) -> nn.Module:
        named = nn.ModuleDict({f"item{i}": part for i, part in enumerate(self._parts(node))})
        return Part(lambda self, x: _through(reversed(self.items.values()), x), items=named)

    def _block(self, node: Node) -> nn.Module:
        parts = {f"part{index}": part for index, part in enumerate(self._parts(node))}
        return Part(lambda self, x: _through((getattr(self, name) for name in parts), x), **parts)

    def _loop(self, node: Node) -> nn.Module:
        times = 2 + node.number % 2
        return Part(lambda self, x: _through([self.inner] * times, x), inner=self._one(node))

    def _checkpoint(self, node: Node) -> nn.Module:
        kind = self.case.reentrant
        self.repeating += 1
        part = Part(lambda self, x: checkpoint(self.inner, x, use_reentrant=kind), inner=self._one(node))
        self.repeating -= 1
        return part

    def _sometimes(self, node: Node) -> nn.Module:
        clock = self.clock
        return Part(lambda self, x: self.inner(x) if (clock.turn + node.number) % 2 else x + 0, inner=self._one(node))

    def _on_some_ranks(self, node: Node) -> nn.Module:
        if self.repeating:
            return self._leaf(node)  # when a checkpoint repeats its forward depends on what is used in it
        clock = self.clock
        self.diverging += 1
        part = Part(lambda self, x: self.inner(x) if clock.rank == node.number % 2 else x, inner=self._one(node))
        self.diverging -= 1
        part.differs = True
        set_z3_leaf_module(part, True)
        return part

    def _never(self, node: Node) -> nn.Module:
        return Part(lambda self, x: x, inner=self._one(node))

    def _no_grad(self, node: Node) -> nn.Module:
        return Part(lambda self, x: x + torch.no_grad()(self.inner)(x), inner=self._one(node))

    def _bundle(self, node: Node) -> nn.Module:
        return Part(lambda self, x: self.inner([x])["out"][0], inner=Bundle(self._one(node)))

    def _leaf(self, node: Node) -> nn.Module:
        part = Part(lambda self, x: self.inner(x), inner=self._one(node))
        set_z3_leaf_module(part, True)
        return part

    def _one(self, node: Node) -> nn.Module:
        parts = self._parts(node)
        return parts[0] if len(parts) == 1 else nn.Sequential(*parts)


def _through(modules: Any, x: Tensor) -> Tensor:
    """One after the other, kept from growing."""
    for module in modules:
        x = 0.7 * module(x)
    return x


class RandomModel(Scenario):
    """A case as something to train."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.clock = Clock()

    def build(self) -> nn.Module:
        builder = Builder(self.case)
        model = nn.Module()
        self.clock = builder.clock
        stem = nn.Linear(SIZE, SIZE) if self.case.stem else None
        tree = builder.build(self.case.tree)
        model = Part(lambda self, x: self.head(self.tree(x if self.stem is None else self.stem(x)).tanh()))
        model.stem, model.tree, model.head = stem, tree, nn.Linear(SIZE, CLASSES)
        return model

    def _features(self, spot: Spot) -> Tensor:
        self.clock.turn, self.clock.rank = spot.step + spot.micro, spot.rank
        self.clock.tokens = torch.randint(TOKENS, (4,), generator=spot.generator())
        return torch.randn(4, SIZE, generator=spot.generator(), dtype=torch.float64)

    def loss(self, run: Run, batch: Any) -> Tensor:
        return F.cross_entropy(run.forward(self._features(run.spot)), batch)

    def batch(self, spot: Spot) -> Any:
        return torch.randint(CLASSES, (4,), generator=spot.generator())

    def after_step(self, run: Run) -> float | None:
        if run.spot.step % 2:
            return None
        with evaluating(run.module):
            return float(run.forward(self._features(Spot(run.spot.step + 1, run.spot.rank, 0))).square().mean())


def train_random(rank: int, world: int, *, drawn: Case) -> Trained:
    """The case: train a model made at random."""
    scenario = RandomModel(drawn)
    with zrun_runtime.zero.Init(enabled=drawn.early):
        model = build(scenario, torch.float64, seed=rank)
    options: dict[str, Any] = {} if drawn.whole else {"stage3_param_persistence_threshold": 0}
    if not drawn.prefetch:
        options["stage3_prefetch_bucket_size"] = 0
    return follow(engine_of(model, scenario, drawn.stage, drawn.recipe, options), scenario, drawn.recipe, rank)
