"""What the ranks run for test_semantics.py: scripts that change weights between steps, in every way there is.

An edit is a function of the model. It is made on the engine's model (inside `GatheredParameters` where values are
sharded) and on the reference's, at the same places, and training goes on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import zrun_runtime
from zrun_runtime.zero import GatheredParameters

from .compare import distance
from .reference import Reference
from .scenario import CLASSES, WIDTH, Block, Recipe, Scenario, Spot
from .semantics_alone import Alone, engine_over, far, features, said, sgd
from .training import EngineRun, make_engine

LEARNING = {"momentum": 0.5, "lr": 0.05, "weight_decay": 0.01}
STEPS = 4


class Mixed(nn.Module):
    """A square stem, a convolution, blocks, and a head of the stem's shape before the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.picture = nn.Conv2d(2, 2, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.other = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.picture(self.stem(x).view(-1, 2, 2, 4)).flatten(1)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.tanh(self.other(x)))


class Editing(Scenario):
    hyper = {"sgd": LEARNING}

    def build(self) -> nn.Module:
        return Mixed()

    def batch(self, spot: Spot) -> Any:
        features, classes = super().batch(spot)
        return features, classes

    def loss(self, run: Any, batch: Any) -> Tensor:
        features, classes = batch
        dtype = next(run.module.parameters()).dtype
        return nn.functional.cross_entropy(run.forward(features.to(dtype)).float(), classes)


# ---- the edits


def _cast_and_back(model: nn.Module, step: int) -> None:
    own = model.stem.weight.dtype
    model.to(torch.float16 if own is torch.float32 else torch.float64).to(own)


def _scale_data(model: nn.Module, step: int) -> None:
    model.stem.weight.data = model.stem.weight.data * 0.5
    model.head.bias.data = model.head.bias.data + 0.25


def _vector(model: nn.Module, step: int) -> None:
    parameters = list(model.parameters())
    vector = nn.utils.parameters_to_vector(parameters).detach()
    nn.utils.vector_to_parameters(vector * 0.75, parameters)


def _transpose(model: nn.Module, step: int) -> None:
    model.stem.weight.data = model.stem.weight.data.t()


class _Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


def _parametrize(model: nn.Module, step: int) -> None:
    if step == 1:
        parametrize.register_parametrization(model.other, "weight", _Halved())


def _spectral_norm(model: nn.Module, step: int) -> None:
    if step == 1:
        torch.manual_seed(0)
        nn.utils.spectral_norm(model.other)
        for name in ("weight_u", "weight_v"):  # the same on every rank and in the reference
            setattr(model.other, name, getattr(model.other, name).sign() / 4)


def _prune(model: nn.Module, step: int) -> None:
    if step == 1:
        mask = torch.arange(WIDTH * WIDTH).view(WIDTH, WIDTH) % 3 > 0
        prune.custom_from_mask(model.other, "weight", mask)


def _load(model: nn.Module, step: int) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def _clamp(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.15, 0.15)


def _clamp_data(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.15, 0.15)


def _merge(model: nn.Module, step: int) -> None:
    """A low-rank update is added to the weight, and taken off one step later."""
    delta = torch.full((WIDTH, 2), 0.25) @ torch.arange(2 * WIDTH).view(2, WIDTH).div(64)
    weight = model.other.weight
    weight.data += (delta if step == 1 else -delta).to(weight.dtype)


def _again(model: nn.Module, step: int) -> None:
    if step == 1:
        torch.manual_seed(3)
        nn.init.normal_(model.head.weight, std=0.1)
        model.head.bias.data.zero_()


def _tie(model: nn.Module, step: int) -> None:
    model.other.weight = model.stem.weight


def _flip(model: nn.Module, step: int) -> None:
    """A permutation: every sum of the weights stays."""
    model.stem.weight.data.copy_(model.stem.weight.data.flip(0).clone())


def _kept_data(model: nn.Module, step: int) -> None:
    """Through a tensor that was taken once and is kept."""
    if step == 1:
        vars(model)["kept"] = model.stem.weight.data
    model.kept.mul_(0.75)


def _kept_elsewhere(model: nn.Module, step: int) -> None:
    """Through another library's tensor in the same memory, of which torch knows nothing."""
    if step == 1:
        vars(model)["kept"] = torch.from_dlpack(model.stem.weight.detach())
    model.kept.copy_(model.kept.flip(0))


EDITS: dict[str, Callable[[Any, int], None]] = {
    "to and back": _cast_and_back,
    "to(device)": lambda model, step: model.to("cpu") and None,
    "channels_last": lambda model, step: model.to(memory_format=torch.channels_last) and None,
    "p.data =": _scale_data,
    "vector_to_parameters": _vector,
    "transposed": _transpose,
    "parametrize": _parametrize,
    "spectral_norm": _spectral_norm,
    "prune": _prune,
    "load_state_dict": _load,
    "clamp": _clamp,
    "clamp data": _clamp_data,
    "merge": _merge,
    "head again": _again,
    "tie": _tie,
    "permutation": _flip,
}
KEPT = {"kept data": _kept_data, "kept elsewhere": _kept_elsewhere}  # over several steps, so not at stage 3


def edited_truth(edit: str, recipe: Recipe, world: int) -> tuple[dict[str, Tensor], list[float]]:
    """(fp64 masters by their first names, losses of rank 0) of one process that does the same."""
    reference = Reference(Editing(), recipe, world)
    named = dict(reference.model.named_parameters())
    for step in range(STEPS):
        gradients = reference._gradients(step)
        reference._update(gradients, 0.0)
        if step in (1, 2):
            (EDITS | KEPT)[edit](reference.model, step)
            reference.buffers = [{k: b.clone() for k, b in reference.model.named_buffers()} for _ in range(world)]
            for name, optimizer in reference.optimizers.items():
                now = named[name].detach()
                kept = optimizer.master.to(now.dtype) == now
                optimizer.master = torch.where(kept, optimizer.master, now.double())
    left = {id(p) for p in reference.model.parameters()}  # but one that was tied away
    found = {n: o.master for n, o in reference.optimizers.items() if id(named[n]) in left}
    return found, reference.outcomes[0].losses


def edited(rank: int, world: int, *, edit: str, stage: int, recipe: Recipe) -> tuple[dict[str, Tensor], list[float]]:
    """The same with an engine."""
    scenario = Editing()
    engine = make_engine(scenario, stage, recipe)
    named, run = dict(engine.module.named_parameters()), EngineRun(engine)
    for step in range(STEPS):
        run.spot = Spot(step, rank, 0)
        scenario.micro(run)
        engine.step()
        if step in (1, 2):
            with GatheredParameters(list(engine.module.parameters())) if stage == 3 else nullcontext():
                (EDITS | KEPT)[edit](engine.module, step)
    left = {id(p) for p in engine.module.parameters()}
    found = {n: zrun_runtime.safe_get_full_fp32_param(p).clone() for n, p in named.items() if id(p) in left}
    return found, run.losses


# ---- averaged weights, swapped in and out


def _average(model: nn.Module, averages: dict[str, nn.Parameter]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            averages[name].lerp_(parameter, 0.5)


def _swap(model: nn.Module, averages: dict[str, nn.Parameter], how: str) -> None:
    for name, parameter in model.named_parameters():
        average = averages[name]
        if how == "exchanged":
            parameter.data, average.data = average.data, parameter.data
        else:
            kept = parameter.detach().clone()
            parameter.data.copy_(average.data)
            average.data.copy_(kept)


def averaged(rank: int, world: int, *, stage: int, recipe: Recipe, how: str) -> dict[str, float]:
    """An average of the weights is swapped in for an evaluation after each step, and out again: how far weights,
    averages and evaluations are from those of one process.

    how: "copied", or "exchanged": p.data, a.data = a.data, p.data.
    """
    torch.manual_seed(0)
    model = Mixed().to(recipe.dtype)
    alone = Alone(copy.deepcopy(model), sgd)
    engine = engine_over(model.float(), stage, recipe, sgd(model.parameters()))
    both = [(engine.module, engine), (alone.model, alone.model)]
    averages = [{n: nn.Parameter(p.detach().clone()) for n, p in alone.named.items()} for _ in both]
    found: dict[str, float] = {}
    for step in range(3):
        engine.backward(engine(features(rank, step, recipe.dtype)).float().square().mean())
        engine.step()
        for other in range(world):
            (alone.model(features(other, step, recipe.dtype)).float().square().mean() / world).backward()
        alone.step()
        evaluations = []
        for (module, forward), average in zip(both, averages, strict=True):
            for action in (_average, _swap, None, _swap):
                if action is None:
                    with torch.no_grad():
                        evaluations.append(forward(features(7, 7, recipe.dtype)).float())
                    continue
                gathering = stage == 3 and module is engine.module
                with GatheredParameters(list(module.parameters())) if gathering else nullcontext():
                    action(module, average, *([how] if action is _swap else []))
        found[f"evaluation {step}"] = distance(*evaluations)
    named = dict(engine.module.named_parameters())
    found |= {f"weight {name}": value for name, value in far(named, alone).items()}
    return found | {f"average {n}": distance(averages[0][n].detach(), averages[1][n].detach()) for n in named}


# ---- what is refused


def refused(rank: int, world: int, *, stage: int) -> dict[str, str]:
    """What edits say that cannot be followed; and "" for those that change nothing."""
    texts: dict[str, str] = {}
    for name, edit in REFUSALS.items():
        engine = engine_over(Mixed(), stage, Recipe(), None, optimizer={"type": "SGD", "params": {"lr": 0.05}})
        step = lambda engine=engine, edit=edit: (edit(engine.module), engine(features(rank, 0)))  # noqa: E731
        texts[name] = said(step)
    return texts


def _assign(model: Any) -> None:
    model.stem.weight.data = torch.zeros(WIDTH, WIDTH)


REFUSALS: dict[str, Callable[[Any], Any]] = {
    "to(device)": lambda model: model.to("cpu").float(),
    "bfloat16": lambda model: model.bfloat16(),
    "shape": lambda model: setattr(model.stem.weight, "data", torch.zeros(2, 2)),
    "weight_norm": lambda model: nn.utils.parametrizations.weight_norm(model.stem),
    "old weight_norm": lambda model: nn.utils.weight_norm(model.stem),
    "p.data =": _assign,
    "clamp": lambda model: model.stem.weight.data.clamp_(-1, 1),
    "load_state_dict": lambda model: model.load_state_dict(Mixed().state_dict()),
}
