"""What the ranks run for test_engine.py: engines driven the ways that loops of other frameworks drive them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

import zrun_runtime
from zrun_runtime.optimizers import OWN, Lion

from .compare import distance, flat
from .scenario import WIDTH, Recipe, Spot, Stack, build
from .training import digest, gathered, make_config
from .traps import Plain, _said

SGD = {"lr": 0.05, "momentum": 0.9}


def stack_engine(stage: int, recipe: Recipe = Recipe(), dtype: str = "", **keys: Any) -> Any:  # noqa: B008
    """An engine over a plain stack with SGD, `keys` added to its config; dtype: "", "bf16" or "fp16"."""
    config = {**make_config(stage, recipe, SGD), **({dtype: {"enabled": True}} if dtype else {}), **keys}
    return zrun_runtime.initialize(model=build(Plain()), config=config)[0]


def loss_of(engine: Any, spot: Spot) -> Tensor:
    """The loss of a micro-batch."""
    features, classes = Plain().batch(spot)
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float16 if engine.fp16_enabled() else features.dtype
    return torch.nn.functional.cross_entropy(engine(features.to(dtype)).float(), classes)


def _forced(engine: Any, spot: Spot, last: bool) -> None:
    engine.set_gradient_accumulation_boundary(last)
    engine.backward(loss_of(engine, spot) / 4, scale_wrt_gas=False)


def ways_to_accumulate(rank: int, world: int, *, stage: int, way: str, dtype: str) -> dict[str, Any]:
    """Three steps of four micro-batches each, accumulated in one of many ways. What came of it, and what was sent."""
    counted = way in ("counted", "plain", "step at the end")
    keys = {"managed_gradient_accumulation": False} if way == "unmanaged" else {}
    engine = stack_engine(stage, Recipe(accumulation=4 if counted else 1), dtype, **keys)
    if way == "resized":
        engine.set_train_batch_size(4 * engine.train_batch_size())
    calls: list[int] = []
    for step in range(3):
        spots = [Spot(step, rank, micro) for micro in range(4)]
        before = engine.collectives.traffic.calls.get("reduce_scatter", 0)
        if way in ("counted", "resized"):
            for spot in spots:
                engine.backward(loss_of(engine, spot))
                engine.step()
        elif way == "plain":
            for spot in spots:
                engine.scale(loss_of(engine, spot)).backward()
                engine.step()
        elif way == "forced":
            for spot in spots:
                _forced(engine, spot, last=spot is spots[-1])
            engine.step()
        elif way in ("no_sync", "no_sync plain"):
            for spot in spots:
                with engine.no_sync() if spot is not spots[-1] else nullcontext():
                    loss = loss_of(engine, spot) / 4
                    engine.scale(loss).backward() if way.endswith("plain") else engine.backward(loss)
            engine.step()
        elif way == "coalesced":
            with engine.coalesce_grad_reduction():
                for spot in spots:
                    engine.backward(loss_of(engine, spot) / 4)
            engine.step()
        elif way == "unmanaged":
            for spot in spots:
                engine.backward(loss_of(engine, spot) / 4)
            engine.step()
        calls.append(engine.collectives.traffic.calls.get("reduce_scatter", 0) - before)
    weights = gathered(engine.module)
    return {
        "weights": {name: weight.float() for name, weight in weights.items()} if rank == 0 else {},
        "digest": digest(weights),
        "calls": calls,
        "steps": (engine.global_steps, engine.skipped_steps),
        "samples": engine.global_samples,
        "norm": engine.get_global_grad_norm(),
        "grads": engine.state_bytes()["grads"],
    }


def refusals(rank: int, world: int, *, stage: int) -> dict[str, str]:
    """What misuse says. Collective only where the engine is not at fault."""
    engine, half = stack_engine(stage), stack_engine(stage, dtype="fp16")
    unmanaged = stack_engine(stage, managed_gradient_accumulation=False)
    spot = Spot(0, rank, 0)

    def inside(action: Any) -> Any:
        with engine.no_sync():
            return action()

    def coalesce() -> None:
        with unmanaged.coalesce_grad_reduction():
            pass

    said = {
        "step": _said(lambda: inside(engine.step)),
        "nested": _said(lambda: inside(lambda: inside(int))),
        "fp16": _said(lambda: loss_of(half, spot).backward()),
        "boundary": _said(lambda: unmanaged.set_gradient_accumulation_boundary(True)),
        "coalesce": _said(coalesce),
        "batch": _said(lambda: engine.set_train_batch_size(engine.train_batch_size() + 1)),
    }
    for one in (engine, half, unmanaged):  # and all of them still train
        before = digest(gathered(one.module))
        one.backward(loss_of(one, spot))
        one.step()
        one.backward(loss_of(one, spot))
        one.step()
        said[f"trains {one.settings.precision}"] = str(digest(gathered(one.module)) != before)
    loss = loss_of(engine, spot)
    engine.destroy()
    said["gone"] = _said(lambda: engine.backward(loss)) + _said(engine.step)
    return said


def answers(rank: int, world: int, *, stage: int) -> dict[str, Any]:
    """Everything that frameworks ask an engine, as one dict."""
    engine = stack_engine(stage, Recipe(accumulation=2))
    names = (
        *("get_lr", "get_mom", "get_type", "get_batch_info", "optimizer_name", "scheduler_name", "gradient_clipping"),
        *("zero_optimization", "zero_optimization_stage", "zero_optimization_partition_gradients"),
        *("zero_optimization_partition_weights", "zero_gather_16bit_weights_on_model_save", "zero_offload_param"),
        *("fp16_enabled", "bfloat16_enabled", "dynamic_loss_scale", "loss_scale", "get_data_types"),
        *("was_step_applied", "get_global_grad_norm", "is_gradient_accumulation_boundary"),
        *("zero_overlap_comm", "zero_prefetch_bucket_size", "zero_cpu_offload", "zero_has_nvme_offload"),
        *("torch_autocast_enabled", "torch_autocast_dtype", "prescale_gradients", "curriculum_enabled_legacy"),
    )
    found = {name: getattr(engine, name)() for name in names}
    fields = ("global_rank", "local_rank", "world_size", "dp_world_size", "mp_world_size", "communication_data_type")
    found |= {name: getattr(engine, name) for name in (*fields, "global_samples", "micro_steps", "global_steps")}
    found["sizes"] = []
    for size in (4, 8):
        engine.set_train_micro_batch_size(size)
        found["sizes"].append(engine.get_batch_info())
    engine.set_train_batch_size(8 * world * 3)
    found["sizes"].append(engine.get_batch_info())
    found["config"] = engine.config["zero_optimization"]["stage"]
    found["named"] = set(engine.param_names.values()) == {name for name, _ in engine.module.named_parameters()}
    found["average"], found["none"] = engine.gradient_average, (engine.mpu, engine.training_dataloader)
    found["group"] = torch.distributed.get_world_size(engine.data_parallel_group)
    return found


def window_after_resize(rank: int, world: int, *, stage: int) -> list[bool]:
    """Where updates fall when the number of micro-batches changes after an odd number of them."""
    engine = stack_engine(stage)
    applied = []
    for micro in range(9):
        if micro == 3:
            engine.set_train_batch_size(2 * engine.train_batch_size())
        engine.backward(loss_of(engine, Spot(micro, rank, 0)))
        before = engine.global_steps
        engine.step()
        applied.append(engine.global_steps > before)
    return applied


def loaded(rank: int, world: int, *, stage: int, dtype: str, only_rank_0: bool) -> dict[str, Any]:
    """Weights loaded into a running engine: they are there at once, and are what the next step starts from."""
    engine, twin = stack_engine(stage, dtype=dtype), stack_engine(stage, dtype=dtype)
    for step in range(2):
        twin.backward(loss_of(twin, Spot(step, rank, 0)))
        twin.step()
    wanted = gathered(twin.module)
    given = {name: weight.clone() for name, weight in wanted.items()} if rank == 0 or not only_rank_0 else {}
    engine.load_module_state_dict(given)
    found = gathered(engine.module)
    equal = all(torch.equal(found[name], wanted[name]) for name in wanted)
    engine.backward(loss_of(engine, Spot(5, rank, 0)))
    engine.step()
    moved = distance(flat(gathered(engine.module)), flat(wanted))
    bad = dict(given)
    if bad:
        bad["blocks.0.up.wight"] = bad.pop("blocks.0.up.weight")
    names = list(engine.module_state_dict(prefix="net.", exclude_frozen_parameters=True))
    return {"equal": equal, "moved": moved, "said": _said(lambda: engine.load_module_state_dict(bad)), "names": names}


def loads_between_forward_and_backward(rank: int, world: int, *, stage: int) -> str:
    """Weights that change under a forward's feet: refused by the backward, or effective in it."""
    engine = stack_engine(stage)
    loss = engine(torch.ones(2, WIDTH)).square().sum()
    state = {name: torch.zeros_like(weight) for name, weight in gathered(engine.module).items()}
    engine.load_module_state_dict(state)
    return _said(lambda: engine.backward(loss))


def compiled(rank: int, world: int, *, stage: int) -> tuple[str, bool]:
    """What `compile` says, and whether a compiled engine trains as another does (this backend needs no compiler)."""
    engine, plain = stack_engine(stage), stack_engine(stage)
    said = _said(lambda: engine.compile(backend="eager"))
    for one in (engine, plain):
        for step in range(3):
            one.backward(loss_of(one, Spot(step, rank, 0)))
            one.step()
    return said, distance(flat(gathered(engine.module)), flat(gathered(plain.module))) < 1e-6


def mean_gradients(model: Any, step: int, world: int) -> None:
    """Put the gradients that all ranks would agree on into a plain model."""
    model.zero_grad()
    for rank in range(world):
        features, classes = Plain().batch(Spot(step, rank, 0))
        (torch.nn.functional.cross_entropy(model(features), classes) / world).backward()


def optimizers_against_torch(
    rank: int, world: int, *, stage: int, kinds: dict[str, tuple[str, dict[str, Any]]]
) -> dict[str, tuple[str, float]]:
    """By label: the class that a config's optimizer became, and how far it ends up from plain torch on one process."""
    found = {}
    for label, (kind, params) in kinds.items():
        config = {**make_config(stage, Recipe(), {}), "optimizer": {"type": kind, "params": params}}
        engine = zrun_runtime.initialize(model=build(Plain()), config=config)[0]
        plain = build(Plain())
        settings = engine.settings.optimizer
        factory = OWN.get(settings.type) or getattr(torch.optim, settings.type)
        optimizer = factory(plain.parameters(), **settings.params)
        start = flat({name: p.detach().clone() for name, p in plain.named_parameters()})
        for step in range(4):
            engine.backward(loss_of(engine, Spot(step, rank, 0)))
            engine.step()
            mean_gradients(plain, step, world)
            optimizer.step()
        wanted = flat({name: p.detach() for name, p in plain.named_parameters()}) - start
        found[label] = settings.type, distance(flat(gathered(engine.module)) - start, wanted)
    return found


def clients(rank: int, world: int, *, stage: int) -> dict[str, Any]:
    """Client optimizers and schedulers in every form; a generator of some parameters; and one that is refused."""
    found: dict[str, Any] = {}
    config = {key: value for key, value in make_config(stage, Recipe(), {}).items() if key != "optimizer"}
    model = build(Plain())
    engine, optimizer, _, scheduler = zrun_runtime.initialize(
        model=model,
        config=config,
        optimizer=lambda params: torch.optim.SGD(params, 0.1),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    )
    rates = []
    for step in range(3):
        engine.backward(loss_of(engine, Spot(step, rank, 0)))
        engine.step()
        rates.append(engine.get_lr()[0])
    found["rates"], found["same"] = rates, scheduler.optimizer is optimizer is engine.optimizer
    engine, _, _, plateau = zrun_runtime.initialize(
        model=build(Plain()),
        config=config,
        optimizer=lambda params: torch.optim.SGD(params, 0.1),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
    )
    found["plateau"] = []
    for step, lr_kwargs in enumerate((None, {"metrics": 1.0}, {"metrics": 2.0}, None)):
        engine.backward(loss_of(engine, Spot(step, rank, 0)))
        engine.step(lr_kwargs)
        found["plateau"].append(engine.get_lr()[0])
    plateau.step(3.0)
    found["plateau"].append(engine.get_lr()[0])
    model = build(Plain())
    mine = Lion(model.parameters(), lr=1e-2)
    groups = mine.param_groups
    engine, optimizer, *_ = zrun_runtime.initialize(model=model, config=config, optimizer=mine)
    found["mine"] = optimizer is mine and optimizer.param_groups is groups
    model = build(Plain())
    part = (p for name, p in model.named_parameters() if name.endswith("bias"))
    config = make_config(stage, Recipe(), {"lr": 0.1})
    engine = zrun_runtime.initialize(model=model, config=config, model_parameters=part)[0]
    before = gathered(engine.module)
    engine.backward(loss_of(engine, Spot(0, rank, 0)))
    engine.step()
    after = gathered(engine.module)
    found["moved"] = {name.rpartition(".")[2] for name in after if not torch.equal(after[name], before[name])}
    model = build(Plain())
    found["refused"] = _said(
        lambda: zrun_runtime.initialize(model=model, config=config, optimizer=torch.optim.LBFGS(model.parameters()))
    )
    return found


class Checkpointed(Stack):
    """Its blocks by way of our `checkpoint`."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = zrun_runtime.checkpointing.checkpoint(block, x)
        return self.head(x)


def checkpointed(rank: int, world: int, *, stage: int, on_cpu: bool) -> float:
    """How far training with checkpoints ends up from training without."""
    plain = stack_engine(stage)
    model = Checkpointed()
    model.load_state_dict(build(Plain()).state_dict())
    config = {**make_config(stage, Recipe(), SGD), "activation_checkpointing": {"cpu_checkpointing": on_cpu}}
    engine = zrun_runtime.initialize(model=model, config=config)[0]
    assert zrun_runtime.checkpointing.is_configured()
    for one in (plain, engine):
        for step in range(3):
            one.backward(loss_of(one, Spot(step, rank, 0)))
            one.step()
    zrun_runtime.checkpointing.configure(checkpoint_in_cpu=False)
    return distance(flat(gathered(engine.module)), flat(gathered(plain.module)))
