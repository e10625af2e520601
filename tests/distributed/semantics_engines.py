"""What the ranks run for test_semantics.py: several engines in one process, and engines within modules."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import zrun_runtime

from .scenario import WIDTH, Block, Recipe, Stack
from .semantics_alone import Alone, engine_over, far, features, said, sgd
from .training import digest, gathered

Found = dict[str, Any]
CONFIGURED = {"optimizer": {"type": "SGD", "params": {"lr": 0.05}}}


def mean_square(output: Tensor) -> Tensor:
    """A loss."""
    return output.float().square().mean()


class Generator(nn.Module):
    """Features to features."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


# ---- several engines with interleaved steps


def adversaries(rank: int, world: int, *, stage: int, recipe: Recipe, how: str) -> Found:
    """A generator and a critic, each with an engine, stepped in turn.

    how: "toggled": the critic is frozen while the generator learns. "dropped": it is not, and its gradients of that
    pass are dropped. "late": both backwards come before both steps, the critic frozen in between.
    """
    torch.manual_seed(0)
    models = Generator().to(recipe.dtype), Stack().to(recipe.dtype)
    generator, critic = (Alone(copy.deepcopy(model), sgd) for model in models)
    engines = [engine_over(model.float(), stage, recipe, sgd(model.parameters())) for model in models]
    named = [dict(engine.module.named_parameters()) for engine in engines]

    def losses(make: Any, judge: Any, of: int, step: int) -> tuple[Tensor, Tensor]:
        x = features(of, step, recipe.dtype)
        fake = make(x)
        for parameter in judge_parameters(judge):
            parameter.requires_grad_(True)
        real_loss = mean_square(judge(x) - 1) + mean_square(judge(fake.detach()))
        for parameter in judge_parameters(judge):
            parameter.requires_grad_(how == "dropped")
        return real_loss, mean_square(judge(fake) - 1)

    def judge_parameters(judge: Any) -> list[nn.Parameter]:
        return list((judge.module if hasattr(judge, "module") else judge).parameters())

    for step in range(3):
        critic_loss, generator_loss = losses(engines[0], engines[1], rank, step)
        engines[1].module.requires_grad_(True)
        if how == "late":
            engines[1].backward(critic_loss)
            engines[1].module.requires_grad_(False)
            engines[0].backward(generator_loss)
            engines[1].step()
            engines[0].step()
        else:
            engines[1].backward(critic_loss)
            engines[1].step()
            engines[1].module.requires_grad_(how == "dropped")
            x = features(rank, step, recipe.dtype)
            engines[0].backward(mean_square(engines[1](engines[0](x)) - 1))
            engines[0].step()
            engines[1].zero_grad()
        for other in range(world):
            critic_loss, generator_loss = losses(generator.model, critic.model, other, step)
            critic.model.requires_grad_(True)
            (critic_loss / world).backward()
            if how == "late":
                critic.model.requires_grad_(False)
                (generator_loss / world).backward()
        critic.model.requires_grad_(True)
        critic.step()
        critic.model.requires_grad_(how == "dropped")
        for other in range(world) if how != "late" else ():
            x = features(other, step, recipe.dtype)
            (mean_square(critic.model(generator.model(x)) - 1) / world).backward()
        generator.step()
        critic.model.zero_grad()
    assert generator.moved() and critic.moved()
    first, second = far(named[0], generator), far(named[1], critic)
    return {**{f"generator.{k}": v for k, v in first.items()}, **{f"critic.{k}": v for k, v in second.items()}}


# ---- engines over the same parameters


class Actor(nn.Module):
    """A frozen base and a trained head."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.head = base, nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x))


def frozen_base(rank: int, world: int, *, stages: tuple[int, int], recipe: Recipe) -> tuple[Found, bool, bool]:
    """An actor and a critic over one frozen base, as in learning from feedback, stepped in turn; and the base alone
    as the reference, in an engine that trains nothing. The last: the state dict of the second engine is whole."""
    torch.manual_seed(0)
    base = Stack().requires_grad_(False)
    models = Actor(base).to(recipe.dtype), Actor(base).to(recipe.dtype)
    twins = copy.deepcopy(nn.ModuleList(models))
    alone = [Alone(twin, lambda masters: sgd(masters[-2:])) for twin in twins]
    for model in models:
        model.float()  # the engines cast
    engines = [
        engine_over(model, stage, recipe, sgd(model.head.parameters()))
        for model, stage in zip(models, stages, strict=True)
    ]
    reference = zrun_runtime.initialize(
        model=base, config={"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stages[1]},
                            **({"bf16": {"enabled": True}} if recipe.dtype is torch.bfloat16 else {})}
    )[0]  # fmt: skip
    heads = [{f"head.{n}": p for n, p in model.head.named_parameters()} for model in models]
    found: Found = {}
    right = True
    for step in range(3):
        x = features(rank, step, recipe.dtype)
        with torch.no_grad():
            ours, theirs = reference(x), twins[0].base(x)
        right &= torch.allclose(ours, theirs, atol=1e-6 if recipe.dtype is torch.float32 else 1e-2)
        outputs = [engine(x) for engine in engines]
        for engine, output in zip(engines, outputs, strict=True):
            engine.backward(mean_square(output))
            engine.step()
        for one in alone:
            for other in range(world):
                (mean_square(one.model(features(other, step, recipe.dtype))) / world).backward()
            one.step()
    for index, (named, one) in enumerate(zip(heads, alone, strict=True)):
        found |= {f"{index}.{name}": value for name, value in far(named, one).items()}
    state = engines[1].state_dict()
    names = set(twins[1].state_dict())
    return found, right, (set(state) == names) if rank == 0 or max(stages) < 3 else True


def trained_twice(rank: int, world: int, *, stage: int, second: int) -> tuple[str, str, bool]:
    """What is said when a second engine would train the parameters of a first one, or wants another dtype of them; and
    whether the first goes on."""
    model = Stack()
    engine = engine_over(model, stage, Recipe(), None, **CONFIGURED)
    text = said(lambda: engine_over(model, second, Recipe(), None, **CONFIGURED))
    other = said(lambda: engine_over(Actor(model), second, Recipe(dtype=torch.bfloat16), None, **CONFIGURED))
    before = digest(gathered(engine.module))
    engine.backward(mean_square(engine(features(rank, 0))))
    engine.step()
    return text, other, digest(gathered(engine.module)) != before


def wrapped(rank: int, world: int, *, stage: int) -> list[str]:
    """What is said to an engine, or a wrapper of torch, given as the model."""
    engine = engine_over(Stack(), stage, Recipe(), None, **CONFIGURED)
    holder = nn.Sequential(engine)
    models = [engine, holder, nn.DataParallel(Stack())]
    if world > 1:
        models.append(nn.Sequential(DistributedDataParallel(Stack())))
        models.append(FullyShardedDataParallel(Stack(), device_id=torch.device("cpu")))
    return [said(lambda m=m: engine_over(m, stage, Recipe(), None, **CONFIGURED)) for m in models]  # type: ignore[misc]


# ---- an engine as a part of a module


class Counted(Stack):
    """With tied weights, a buffer, extra state and a hook on its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.twin = nn.Linear(WIDTH, WIDTH)
        self.twin.weight = self.stem.weight
        self.register_buffer("steps", torch.arange(3.0))
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.seen = 7
        self.register_state_dict_post_hook(lambda module, state, prefix, meta: state.update({f"{prefix}more": 1}))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.twin(x))

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


class Outer(nn.Module):
    """A module that has an engine and something of its own."""

    def __init__(self, engine: nn.Module) -> None:
        super().__init__()
        self.engine, self.scale = engine, nn.Parameter(torch.ones(2))


def nested(rank: int, world: int, *, stage: int) -> Found:
    """State dicts of an engine, and of a module that has one, beside those of the plain modules."""
    torch.manual_seed(0)
    model = Counted()
    plain = copy.deepcopy(model)
    engine = engine_over(model, stage, Recipe(), None, **CONFIGURED)
    outer = Outer(engine)
    state, mine = outer.state_dict(), engine.state_dict()
    if stage == 3 and rank and world > 1:
        return {"names": set(state) == {"scale"} and not mine}
    wanted = {f"engine.{name}" for name in plain.state_dict()} | {"scale"}
    file, other = io.BytesIO(), io.BytesIO()
    torch.save(mine, file)
    torch.save(plain.state_dict(), other)
    found: Found = {
        "names": set(state) == wanted and set(mine) == set(plain.state_dict()),
        "tied": mine["twin.weight"] is mine["stem.weight"],
        "extra": mine["_extra_state"],
        "versions": mine._metadata["blocks.0"] == {"version": 1} and "engine.blocks.0" in state._metadata,
        "size": file.tell() / other.tell(),
        "loads": said(lambda: plain.load_state_dict({k: v for k, v in mine.items() if k != "more"})),
    }
    if stage < 3:
        del state["engine.more"]
        state["engine.head.bias"] = torch.full((5,), 3.0)
        outer.load_state_dict(state)
        found["back"] = bool((engine.module.head.bias == 3).all())
    return found
