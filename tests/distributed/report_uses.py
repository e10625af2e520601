"""What the ranks run for test_reports.py: what users of runtimes like this one have reported as broken."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import redirect_stderr
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import IterableDataset, TensorDataset

import zrun_runtime
from zrun_runtime import zero

from .compare import distance, flat
from .engine_uses import SGD, loss_of, stack_engine
from .scenario import CLASSES, WIDTH, Block, Recipe, Spot, Stack, build
from .training import digest, gathered, make_config
from .traps import Plain


def _weights(engine: Any) -> Tensor:
    return flat(gathered(engine.module))


# ---- schedules and counting


def schedules(rank: int, world: int, *, stage: int) -> dict[str, Any]:
    """A schedule and an optimizer of the client's beside those of the config; what is said, and the rate in force."""
    config = {**make_config(stage, Recipe(), {"lr": 1e-5}), "scheduler": {"type": "WarmupLR", "params": {}}}
    with redirect_stderr(io.StringIO()) as said:
        engine, _, _, scheduler = zrun_runtime.initialize(
            model=build(Plain()),
            config=config,
            lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1.0),
        )
    before = gathered(engine.module)
    engine.backward(loss_of(engine, Spot(0, rank, 0)))
    grads = {name: zero.safe_get_full_grad(p) for name, p in engine.module.named_parameters()}
    engine.step()
    wanted = flat({name: before[name] - 1e-5 * grads[name] for name in before})
    model = build(Plain())
    with redirect_stderr(io.StringIO()) as other:
        zrun_runtime.initialize(model=model, config=config, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    return {
        "said": said.getvalue() + other.getvalue(),
        "rate": engine.get_lr(),
        "applied": distance(_weights(engine), wanted),
        "kind": type(scheduler).__name__,
    }


def stepped_twice(rank: int, world: int, *, stage: int, how: str) -> tuple[str, int]:
    """What is said where a program steps the schedule too (every time, never, or restores it), and where it stands."""
    model = build(Plain())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {key: value for key, value in make_config(stage, Recipe(), SGD).items() if key != "optimizer"}
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    engine, *_ = zrun_runtime.initialize(model=model, optimizer=optimizer, config=config, lr_scheduler=schedule)
    with redirect_stderr(io.StringIO()) as said:
        for step in range(3):
            engine.backward(loss_of(engine, Spot(step, rank, 0)))
            engine.step()
            if how == "every time":
                schedule.step()
            if how == "restored" and step == 1:
                schedule.load_state_dict({**schedule.state_dict(), "last_epoch": 50})
    return said.getvalue(), schedule.last_epoch


def overflow_in_words(rank: int, world: int) -> str:
    """What is said of three overflows in a row at an initial scale of 16 and a hysteresis of 2."""
    engine = stack_engine(2, fp16={"enabled": True, "initial_scale_power": 4})
    with redirect_stderr(io.StringIO()) as said:
        for step in range(3):
            engine.backward(loss_of(engine, Spot(step, rank, 0)) * float("inf"))
            engine.step()
    return said.getvalue()


def accumulation(rank: int, world: int, *, stage: int) -> dict[str, Any]:
    """Ten micro-batches at four a step, and twins; what happens to the two that are left; step called too rarely."""
    engine, twin = stack_engine(stage, Recipe(accumulation=4)), stack_engine(stage)
    for micro in range(10):
        engine.backward(loss_of(engine, Spot(0, rank, micro)))
        engine.step()
    for step in range(2):
        batches = [Plain().batch(Spot(0, rank, 4 * step + micro)) for micro in range(4)]
        features, classes = (torch.cat(parts) for parts in zip(*batches, strict=True))
        twin.backward(F.cross_entropy(twin(features), classes))
        twin.step()
    found: dict[str, Any] = {"steps": engine.global_steps, "far": distance(_weights(engine), _weights(twin))}
    for micro in (10, 11):
        engine.backward(loss_of(engine, Spot(0, rank, micro)))
        engine.step()
    batches = [Plain().batch(Spot(0, rank, micro)) for micro in (8, 9, 10, 11)]
    features, classes = (torch.cat(parts) for parts in zip(*batches, strict=True))
    twin.backward(F.cross_entropy(twin(features), classes))
    twin.step()
    found["tail"] = engine.global_steps, distance(_weights(engine), _weights(twin))
    rare = stack_engine(stage, Recipe(accumulation=4))
    with redirect_stderr(io.StringIO()) as said:
        for step in range(2):
            for micro in range(4):
                rare.backward(loss_of(rare, Spot(step, rank, micro)))
            rare.step()
    found["rare"] = said.getvalue(), rare.global_steps, rare.is_gradient_accumulation_boundary()
    return found


def vector_backward(rank: int, world: int, *, stage: int) -> float:
    """`output.backward(gradient)` against the same by a loss: how far apart."""
    ends = []
    for plain in (True, False):
        engine = stack_engine(stage)
        for step in range(2):
            output = engine(Plain().batch(Spot(step, rank, 0))[0])
            weight = torch.linspace(-1, 1, output.numel()).view_as(output)
            output.backward(weight) if plain else engine.backward((output * weight).sum())
            engine.step()
        ends.append(_weights(engine))
    return distance(*ends)


# ---- shapes of models


class Branching(nn.Module):
    """Two heads, one of which a step uses; blocks that some steps skip; a head that is read several times."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.heads = nn.ModuleDict({"odd": nn.Linear(WIDTH, CLASSES), "even": nn.Linear(WIDTH, CLASSES)})
        self.last = nn.Linear(CLASSES, CLASSES)

    def forward(self, x: Tensor, step: int, times: int = 1) -> Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            if number != 1 or step % 2:
                x = block(x)
        x = self.heads["odd" if step % 2 else "even"](x)
        for _ in range(times):
            x = x + F.linear(x, self.last.weight)
        return x


def branches(rank: int, world: int, *, stage: int, uneven: bool) -> dict[str, Any]:
    """Weights after six steps over all branches against plain torch, where what was not used has zero gradients."""
    torch.manual_seed(0)
    model, plain = Branching(), Branching()
    plain.load_state_dict(model.state_dict())
    engine = zrun_runtime.initialize(model=model, config=make_config(stage, Recipe(), SGD))[0]
    optimizer = torch.optim.SGD(plain.parameters(), **SGD)
    rest = []
    for step in range(6):
        features, classes = Plain().batch(Spot(step, rank, 0))
        engine.backward(F.cross_entropy(engine(features, step, 1 + rank * uneven), classes))
        engine.step()
        rest.append(engine.state_bytes()["params"])
        optimizer.zero_grad()
        for other in range(world):
            features, classes = Plain().batch(Spot(step, other, 0))
            (F.cross_entropy(plain(features, step, 1 + other * uneven), classes) / world).backward()
        for parameter in plain.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    wanted = flat({name: p.detach() for name, p in plain.named_parameters()})
    return {"far": distance(_weights(engine), wanted), "rest": len(set(rest))}


class Crossing(nn.Module):
    """Two halves that each rank runs in an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, swapped: bool) -> Tensor:
        first, second = (self.right, self.left) if swapped else (self.left, self.right)
        return first(x).tanh() + second(x)


def orders(rank: int, world: int, *, stage: int) -> float:
    """Weights where gradients come in another order on each rank, against plain torch."""
    torch.manual_seed(0)
    model, plain = Crossing(), Crossing()
    plain.load_state_dict(model.state_dict())
    config = make_config(stage, Recipe(), SGD)
    config["zero_optimization"]["reduce_bucket_size"] = WIDTH
    engine = zrun_runtime.initialize(model=model, config=config)[0]
    optimizer = torch.optim.SGD(plain.parameters(), **SGD)
    for step in range(3):
        features, classes = Plain().batch(Spot(step, rank, 0))
        engine.backward(F.cross_entropy(engine(features, rank % 2 == 1), classes))
        engine.step()
        optimizer.zero_grad()
        for other in range(world):
            features, classes = Plain().batch(Spot(step, other, 0))
            (F.cross_entropy(plain(features, other % 2 == 1), classes) / world).backward()
        optimizer.step()
    return distance(_weights(engine), flat({name: p.detach() for name, p in plain.named_parameters()}))


class Dropping(nn.Module):
    """Blocks with dropout; reentrant: how they are checkpointed, None: not at all."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.5)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def dropouts(rank: int, world: int, *, stage: int) -> list[float]:
    """How far weights are with checkpoints of either kind from those without, all with the same random numbers."""
    ends = []
    for reentrant in (None, False, True):
        torch.manual_seed(0)
        engine = zrun_runtime.initialize(model=Dropping(reentrant), config=make_config(stage, Recipe(), SGD))[0]
        torch.manual_seed(rank)
        for step in range(3):
            features = Plain().batch(Spot(step, rank, 0))[0].requires_grad_()
            engine.backward(engine(features).square().mean())
            engine.step()
        ends.append(_weights(engine))
    return [distance(end, ends[0]) for end in ends[1:]]


def tiny(rank: int, world: int, *, stage: int) -> float:
    """A model whose only trainable parameter has three elements, given by a generator."""
    model = nn.Linear(2, 3)
    model.weight.requires_grad_(False)
    start = model.bias.detach().clone() if rank == 0 else torch.zeros(3)
    config = {**make_config(stage, Recipe(), {"lr": 0.5}), "gradient_clipping": 0.0}
    generator = (p for p in model.parameters() if p.requires_grad)
    engine = zrun_runtime.initialize(model=model, config=config, model_parameters=generator)[0]
    start = gathered(engine.module)["bias"]
    engine.backward(engine(torch.ones(1, 2)).sum() * (rank + 1))
    engine.step()
    return distance(gathered(engine.module)["bias"], start - 0.5 * sum(range(1, world + 1)) / world)


class Buffers(nn.Module):
    """Buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, CLASSES), nn.BatchNorm1d(CLASSES, affine=False)
        self.register_buffer("counts", torch.arange(5))
        self.register_buffer("angles", torch.linspace(0, 1, 257))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).float())


def buffers(rank: int, world: int, *, stage: int) -> dict[str, Any]:
    """Names, dtypes and values in a state dict under bf16, and after rank 0's was loaded into another engine."""
    config = {**make_config(stage, Recipe(), SGD), "bf16": {"enabled": True}}
    engines = [zrun_runtime.initialize(model=Buffers(), config=config)[0] for _ in range(2)]
    engine = engines[0]
    output = engine(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(rank)).bfloat16())
    engine.backward(output.square().mean() * 0 + output.mean())
    engine.step()
    state = engine.state_dict()
    engines[1].load_state_dict(state)
    back = engines[1].state_dict()
    return {
        "dtypes": {name: str(value.dtype) for name, value in state.items()},
        "angles": torch.equal(state["angles"], torch.linspace(0, 1, 257)) if state else True,
        "back": bool(rank)
        or all(torch.equal(state[name], back[name]) and state[name].dtype == back[name].dtype for name in state),
    }


# ---- several engines, data


def two_engines(rank: int, world: int, *, stages: tuple[int, int], accumulation: int) -> dict[str, Any]:
    """Two engines of different plans under one loss, driven by one of them, against two alone."""
    first, second = (stack_engine(stage, Recipe(accumulation=accumulation)) for stage in stages)
    plain = [build(Plain()) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), **SGD) for model in plain]
    for step in range(3):
        for model in plain:
            model.zero_grad()
        for micro in range(accumulation):
            features, classes = Plain().batch(Spot(step, rank, micro))
            loss = F.cross_entropy(first(features) + second(features), classes)
            first.backward(loss)
            first.step()
            second.step()
            for other in range(world):
                features, classes = Plain().batch(Spot(step, other, micro))
                loss = F.cross_entropy(plain[0](features) + plain[1](features), classes)
                (loss / world / accumulation).backward()
        for optimizer in optimizers:
            optimizer.step()
    wanted = [flat({name: p.detach() for name, p in model.named_parameters()}) for model in plain]
    ends = [_weights(first), _weights(second)]
    return {"far": [distance(a, b) for a, b in zip(ends, wanted, strict=True)], "steps": second.global_steps}


class Counting(IterableDataset[int]):
    """Six numbers."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def loader(rank: int, world: int) -> tuple[int, set[int], set[int]]:
    """(length of the loader, sizes of its batches, items that this rank sees): 240 items, three a micro-batch."""
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}
    config |= {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    data = TensorDataset(torch.arange(240))
    engine, _, batches, _ = zrun_runtime.initialize(model=Stack(), config=config, training_data=data)
    ordered = engine.deepspeed_io(data, batch_size=5, route="eval", collate_fn=lambda items: [int(i[0]) for i in items])
    assert next(iter(ordered)) == [rank + world * number for number in range(5)]
    with redirect_stderr(io.StringIO()) as said:
        assert len(list(engine.deepspeed_io(Counting()))) == 2
    assert said.getvalue().count("give each rank samples of its own") == (rank == 0)
    own = engine.deepspeed_io(data, data_sampler=torch.utils.data.SequentialSampler(data))
    assert next(iter(own))[0].tolist() == [0, 1, 2]
    seen = [batch[0] for batch in batches]
    assert torch.cat(seen).tolist() != sorted(torch.cat(seen).tolist())
    return len(batches), {len(batch) for batch in seen}, set(torch.cat(seen).tolist())


def epochs(rank: int, world: int, *, drop_last: bool) -> dict[str, Any]:
    """Two epochs over 23 items, two a micro-batch: what this rank sees, in which order."""
    config = {"train_micro_batch_size_per_gpu": 2, "dataloader_drop_last": drop_last}
    config |= {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    data = TensorDataset(torch.arange(23))
    engine, _, batches, _ = zrun_runtime.initialize(model=Stack(), config=config, training_data=data)
    seen = []
    for epoch in (0, 1, 0):
        batches.sampler.set_epoch(epoch)
        seen.append([batch[0].tolist() for batch in batches])
    assert engine.training_dataloader is batches
    return {"seen": seen, "length": len(batches)}


def monitored(rank: int, world: int, *, folder: str) -> Any:
    """Three steps of fp16, the second one skipped, with a monitor of text on every rank's config."""
    section = {"enabled": True, "output_path": folder, "job_name": "run"}
    keys = {"csv_monitor": section, "wall_clock_breakdown": True, "steps_per_print": 2}
    engine = stack_engine(2, Recipe(accumulation=2), "fp16", **keys)
    said = io.StringIO()
    with redirect_stderr(said):
        for step in range(3):
            for micro in range(2):
                loss = loss_of(engine, Spot(step, rank, micro))
                engine.backward(loss * float("inf") if step == 1 else loss)
                engine.step()
    engine.monitor.write_events([("Mine/best", 1.5, engine.global_samples)])
    lines = [line for line in said.getvalue().splitlines() if "took" in line]
    return engine.monitor.enabled, engine.mean_loss(), engine.global_samples, lines


def uneven_batches(rank: int, world: int, *, stage: int) -> tuple[str, str]:
    """The last rank has one batch more than the others, which are done and wait in a barrier of their own."""
    zrun_runtime.init_distributed(timeout=timedelta(seconds=5))
    engine = stack_engine(stage)
    try:
        for step in range(4 + (rank == world - 1)):
            engine.backward(loss_of(engine, Spot(step, rank, 0)))
            engine.step()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", digest({"a": torch.ones(1)})
