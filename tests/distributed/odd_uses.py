"""What the ranks run for test_odd.py: unusual tensors, copies of models, and ranks that stop."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import zrun_runtime

from .corners import features, initialize, said, stuck, train
from .scenario import WIDTH, Stack
from .training import digest, gathered

# ---- unusual tensors


class Wrapped(torch.Tensor):
    """A tensor subclass that keeps its values as int8, as quantizing libraries do, and claims to be where it is told.
    Like theirs it refuses what it was not made for."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, device: str = "cpu") -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32, device=device)
        made.values = values
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *rest: Any) -> Wrapped:
        return Wrapped(inner["values"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Wrapped(args[0].values, args[0].device)
        if func is torch.ops.aten.view.default:
            raise NotImplementedError("Wrapped: view")
        plain = [a.values.float() / 64 if isinstance(a, Wrapped) else a for a in args]
        return func(*plain, **(kwargs or {}))


class Odd(Stack):
    """With one unusual parameter, which its forward reads."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__()
        self.kind = kind
        torch.manual_seed(seed)
        if kind == "int8 buffer":
            self.register_buffer("base", torch.randint(-64, 64, (WIDTH, WIDTH), dtype=torch.int8))
        elif kind == "int8":
            self.base = nn.Parameter(torch.randint(-64, 64, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False)
        elif kind == "complex":
            self.base = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64), requires_grad=False)
        elif kind == "subclass":
            values = Wrapped(torch.randint(-64, 64, (WIDTH, WIDTH), dtype=torch.int8))
            self.base = nn.Parameter(values, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind.startswith("int8"):
            x = x + F.linear(x, self.base.to(x.dtype) / 64)
        elif self.kind == "complex":
            x = x + F.linear(x, self.base.real)
        elif self.kind == "subclass":
            x = x + F.linear(x, self.base)
        return super().forward(x)


FROZEN = ("int8 buffer", "int8", "complex", "subclass")


def odd_and_frozen(rank: int, world: int, *, stage: int, kind: str) -> tuple[list[str], bool]:
    """What a step does not move of a model with an unusual frozen parameter; and whether that is rank 0's."""
    engine = initialize(Odd(kind, seed=rank), stage)
    before = _trained(engine)
    train(engine, rank)
    after = _trained(engine)
    ours, first = (b.values if isinstance(b, Wrapped) else b for b in (engine.module.base, Odd(kind, seed=0).base))
    return [name for name in before if torch.equal(before[name], after[name])], torch.equal(ours, first)


def _trained(engine: Any) -> dict[str, Tensor]:
    parameters = {n: p for n, p in engine.module.named_parameters() if p.requires_grad}
    with zrun_runtime.zero.GatheredParameters(list(parameters.values())):
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def _overlapping() -> nn.Module:
    model = Stack()
    model.tail = nn.Parameter(model.head.weight.data[:2])
    return model


def _expanded() -> nn.Module:
    model = Stack()
    model.scale = nn.Parameter(torch.ones(1).expand(WIDTH))
    return model


def _far_apart() -> nn.Module:
    model = Stack()
    for index in range(2):
        values = Wrapped(torch.ones(3, 3, dtype=torch.int8), f"cuda:{index}")
        model.register_parameter(f"base{index}", nn.Parameter(values, requires_grad=False))
    return model


def _with(name: str, value: Any) -> nn.Module:
    model = Stack()
    setattr(model, name, value)
    return model


UNFIT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "sparse": (lambda: _with("table", nn.Embedding(7, WIDTH, sparse=True)), "table: sparse=True"),
    "max_norm": (lambda: _with("table", nn.Embedding(7, WIDTH, max_norm=1.0)), "table: max_norm=1.0"),
    "overlapping": (_overlapping, "head.weight: it shares memory with tail"),
    "expanded": (_expanded, "scale: it is expanded"),
    "complex": (lambda: _with("base", nn.Parameter(torch.randn(3, dtype=torch.complex64))), "base: a trainable"),
    "subclass": (lambda: _with("base", nn.Parameter(Wrapped(torch.ones(3, 3)))), "base: a trainable"),
    "meta": (lambda: _with("base", nn.Parameter(torch.empty(3, device="meta"))), "1 parameters are on the meta"),
    "two devices": (_far_apart, "the model's parameters are on 2 devices: base0 on cuda:0, base1 on cuda:1"),
}


def unfit(rank: int, world: int, *, stage: int) -> dict[str, str]:
    """What is said of each model that cannot be right."""
    return {name: said(lambda make=make: initialize(make(), stage)) for name, (make, _) in UNFIT.items()}  # type: ignore[misc]


def columns_of_one_matrix(rank: int, world: int, *, stage: int) -> list[str]:
    """Parameters that lie in one tensor without sharing an element are fine."""
    model = Stack()
    both = torch.randn(WIDTH, 2 * WIDTH)
    model.stem.weight = nn.Parameter(both[:, :WIDTH])
    model.blocks[0].up.weight = nn.Parameter(both[:, WIDTH:].repeat(2, 1)[:24])
    model.stem.bias = nn.Parameter(both[:, WIDTH])
    return stuck(initialize(model, stage), rank)


# ---- copies


class Answers(Dataset[Tensor]):
    """A dataset whose workers ask a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        with torch.no_grad():
            return self.model(features(0, index))


def in_a_worker(rank: int, world: int, *, stage: int, start: str) -> tuple[str, float, bool]:
    """What a data loader's worker gets from the model, how far from the truth, and whether training goes on.

    start: how the worker is started: "fork" or "spawn", which sends the model.
    """
    engine = initialize(Stack(), stage)
    with torch.no_grad():
        wanted = engine(features(0, 0))
    answers: list[Tensor] = []
    text = said(
        lambda: answers.extend(DataLoader(Answers(engine.module), num_workers=1, multiprocessing_context=start))
    )
    far = float((answers[0][0] - wanted).abs().max()) if answers else 0.0
    return text, far, not stuck(engine, rank)


def saved(rank: int, world: int, *, stage: int) -> dict[str, Any]:
    """Bytes of a saved state dict over those of the weights, and what is said of copies."""
    engine = initialize(Stack(), stage)
    train(engine, rank)

    def size(value: Any) -> int:
        file = io.BytesIO()
        torch.save(value, file)
        return len(file.getvalue())

    with zrun_runtime.zero.GatheredParameters(list(engine.module.parameters())):
        found: dict[str, Any] = {"module": size({n: p.detach() for n, p in engine.module.state_dict().items()})}
        plain = Stack()
        plain.load_state_dict(engine.module.state_dict())
        found["plain"] = size(plain.state_dict())
    state = engine.state_dict()
    found["engine"] = size(state) if state else found["plain"]
    found["same"] = not state or digest(state) == digest(dict(plain.named_parameters()))
    found["pickled"] = said(lambda: pickle.dumps(engine))
    found["copied"] = said(lambda: copy.deepcopy(engine))
    averaged: list[Any] = []
    found["averaged"] = said(lambda: averaged.append(torch.optim.swa_utils.AveragedModel(engine.module)))
    if averaged:
        train(engine, rank, 1)
        averaged[0].update_parameters(engine.module)
        train(engine, rank, 2)
        averaged[0].update_parameters(engine.module)
        weights = dict(averaged[0].module.named_parameters())
        found["averages"] = digest(weights) != digest(gathered(engine.module)) and not stuck(engine, rank)
    return found


# ---- ranks that stop


def stops(rank: int, world: int, *, stage: int, how: str) -> str:
    """What the first rank gets to hear when the last one stops in its second step."""
    zrun_runtime.init_distributed(timeout=timedelta(seconds=6))
    engine = initialize(Stack(), stage)
    train(engine, rank)
    if rank == world - 1:
        if how == "exits":
            os._exit(0)
        return ""
    return said(lambda: [train(engine, rank, step) for step in (1, 2)])
