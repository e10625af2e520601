"""What the ranks run for test_precision.py: loss scales, 16-bit types, clashes of types."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import zrun_runtime
from zrun_runtime.errors import ZeroRuntimeError

from .compare import distance, flat
from .engine_uses import loss_of, stack_engine
from .scenario import CLASSES, WIDTH, Recipe, Spot, build
from .training import digest, gathered, make_config, masters
from .traps import Plain, _said


def trajectories(
    rank: int, world: int, *, stage: int, patterns: list[str], fp16: dict[str, Any]
) -> list[dict[str, Any]]:
    """Scripted overflows (O: on the last rank, in the second of two micro-batches): what the engine makes of each."""
    found = []
    for pattern in patterns:
        section = {"enabled": True, **fp16}
        scheduler = {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 50, "warmup_type": "linear", "warmup_min_lr": 0.01},
        }
        engine = stack_engine(stage, Recipe(accumulation=2), fp16=section, scheduler=scheduler)
        scales, rates, changed, said, before = [engine.loss_scale()], [], [], "", digest(gathered(engine.module))
        try:
            for step, mark in enumerate(pattern):
                for micro in range(2):
                    loss = loss_of(engine, Spot(step, rank, micro))
                    bad = mark == "O" and rank == world - 1 and micro == 1
                    engine.backward(loss * float("inf") if bad else loss)
                    engine.step()
                after = digest(gathered(engine.module))
                changed.append(after != before)
                before = after
                scales.append(engine.loss_scale())
                rates.append(engine.get_lr()[0])
        except ZeroRuntimeError as error:
            said = str(error)
        counters = engine.global_steps, engine.skipped_steps
        found.append({"scales": scales, "changed": changed, "rates": rates, "said": said, "counters": counters})
    return found


class Small(torch.nn.Module):
    """Two layers, so that a pattern costs milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x))


RISING = {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 1}}  # its rate tells how far the schedule is


def scripted(
    rank: int, world: int, *, stage: int, scripts: list[tuple[str, dict[str, Any]]], scheduler: dict[str, Any] = RISING
) -> list[dict[str, Any]]:
    """Scripted overflows (the digit of the rank that has one, or .) under settings of fp16: what the engine makes of
    each."""
    found = []
    torch.manual_seed(0)
    state = Small().state_dict()
    for pattern, fp16 in scripts:
        model = Small()
        model.load_state_dict(state)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": None,
            "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
            "scheduler": scheduler,
            "zero_optimization": {"stage": stage},
            "fp16": {"enabled": True, **fp16},
        }
        engine = zrun_runtime.initialize(model=model, config=config)[0]
        steps, said, x = [], "", torch.ones(1, 4, dtype=torch.float16)
        try:
            for mark in pattern:
                loss = engine(x).float().square().sum() * 1e-3
                engine.backward(loss * float("inf") if mark == str(rank) else loss)
                engine.step()
                steps.append((engine.loss_scale(), engine.skipped_steps, engine.was_step_applied(), engine.get_lr()[0]))
                assert engine.optimizer.overflow != engine.was_step_applied()
                assert engine.optimizer.loss_scale == engine.optimizer.cur_scale == engine.loss_scale()
        except ZeroRuntimeError as error:
            said = str(error)
        found.append({"steps": steps, "said": said})
        engine.destroy()
    return found


def sixteen_bits(rank: int, world: int, *, stage: int, dtype: str, accumulation: int, merged: bool = False) -> Any:
    """Masters after six steps of AdamW with clipping. merged: one micro-batch of what would be eight."""
    recipe = Recipe("adamw", 1 if merged else accumulation, 0.5)
    section = {"enabled": True, **({"initial_scale_power": 10} if dtype == "fp16" else {})}
    config = {**make_config(stage, recipe, {"lr": 1e-3, "weight_decay": 0.01}), dtype: section}
    engine = zrun_runtime.initialize(model=build(Plain()), config=config)[0]
    norms = []
    for step in range(6):
        batches = [Plain().batch(Spot(step, rank, micro)) for micro in range(accumulation)]
        if merged:
            batches = [tuple(torch.cat(parts) for parts in zip(*batches, strict=True))]
        for features, classes in batches:
            engine.backward(
                F.cross_entropy(engine(features.to(next(engine.module.parameters()).dtype)).float(), classes)
            )
            engine.step()
        norms.append(engine.get_global_grad_norm())
    start = {name: p.detach() for name, p in build(Plain()).named_parameters()}
    moved = {name: value - start[name] for name, value in masters(engine.module).items()}
    return {
        "moved": flat(moved),
        "norms": norms,
        "digest": digest(gathered(engine.module)),
        "skipped": engine.skipped_steps,
    }


def travel(rank: int, world: int, *, stage: int) -> dict[str, tuple[int, int]]:
    """By dtype of the reduction and of the sum: (bytes reduced a step, gradient bytes held between micro-batches)."""
    found = {}
    for wire, sums in (("", ""), ("fp32", ""), ("bf16", ""), ("", "bf16"), ("fp32", "bf16"), ("fp16", "fp32")):
        keys: dict[str, Any] = {"communication_data_type": wire} if wire else {}
        keys |= {"data_types": {"grad_accum_dtype": sums}} if sums else {}
        engine = stack_engine(stage, Recipe(accumulation=2), "bf16", **keys)
        for step in range(2):
            engine.traffic()
            engine.backward(loss_of(engine, Spot(step, rank, 0)))
            engine.step()
            held = engine.state_bytes()["grads"]
            engine.backward(loss_of(engine, Spot(step, rank, 1)))
            engine.step()
        found[f"{wire}/{sums}"] = engine.traffic()["reduce_scatter"], held
    return found


def clashes(rank: int, world: int, *, stage: int, dtype: str) -> dict[str, Any]:
    """Float inputs meet 16-bit weights: told; or cast where the config says so."""
    plain, cast = stack_engine(stage, dtype=dtype), stack_engine(stage, **{dtype: {"enabled": True, "auto_cast": True}})
    features = torch.ones(2, WIDTH)
    found = {"said": _said(lambda: plain(features)), "cast": cast(features).dtype}
    found["other"] = _said(lambda: plain(torch.ones(2, 3, dtype=cast(features).dtype)))
    before = digest(gathered(plain.module))
    plain.backward(loss_of(plain, Spot(0, rank, 0)))
    plain.step()
    found["goes on"] = digest(gathered(plain.module)) != before
    return found


def under_autocast(rank: int, world: int, *, stage: int) -> dict[str, Any]:
    """The engine's own autocast against the script's."""
    ends: list[Tensor] = []
    for own in (True, False):
        engine = stack_engine(stage, **({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}} if own else {}))
        for step in range(3):
            features, classes = Plain().batch(Spot(step, rank, 0))
            with torch.autocast("cpu", torch.bfloat16, enabled=not own, cache_enabled=stage < 3):
                output = engine(features)
            engine.backward(F.cross_entropy(output.float(), classes))
            engine.step()
        ends.append(flat(gathered(engine.module)))
    return {"output": output.dtype, "weights": next(engine.module.parameters()).dtype, "far": distance(*ends)}


def empty_gradients(rank: int, world: int, *, stage: int, dtype: str) -> dict[str, Any]:
    """A step whose gradients are all zero, with clipping: nothing happens, and nothing is skipped."""
    engine = stack_engine(stage, Recipe(clip=1.0), dtype)
    before = digest(gathered(engine.module))
    engine.backward(loss_of(engine, Spot(0, rank, 0)) * 0)
    engine.step()
    return {
        "same": digest(gathered(engine.module)) == before,
        "norm": engine.get_global_grad_norm(),
        "skipped": engine.skipped_steps,
    }


def kept_in_fp32(rank: int, world: int, *, stage: int, dtype: str) -> dict[str, Any]:
    """Some modules stay fp32, built in zero.Init and not; buffers are cast; a name that is none is told."""
    types = {"keep_in_fp32_modules": ["norm", "head"], "buffer_dtype": dtype}
    config = {**make_config(stage, Recipe(), {"lr": 0.05}), dtype: {"enabled": True}, "data_types": types}
    ends, found = [], {}
    for early in (False, True):
        torch.manual_seed(3)
        with zrun_runtime.zero.Init(config_dict_or_path=config, enabled=early):
            model = Careful()
        engine = zrun_runtime.initialize(model=model, config=config)[0]
        start = flat(masters(engine.module))
        for step in range(3):
            features, classes = Plain().batch(Spot(step, rank, 0))
            loss = F.cross_entropy(engine(features.to(model.body.weight.dtype)), classes)
            engine.backward(loss)
            engine.step()
        ends.append(flat(masters(engine.module)) - start)
        found["types"] = {name: str(p.dtype) for name, p in model.named_parameters()}
        found["buffers"] = [str(buffer.dtype) for buffer in model.buffers()]
    found["far"] = distance(*ends)
    config["data_types"] = {"keep_in_fp32_modules": ["norms"]}
    found["said"] = _said(lambda: zrun_runtime.initialize(model=Careful(), config=config))
    model = Careful()
    model._keep_in_fp32_modules, model._keep_in_fp32_modules_strict = ["head"], ["norm"]
    config["data_types"] = {"keep_in_fp32_modules": "auto"}
    zrun_runtime.initialize(model=model, config=config)
    found["auto"] = {name for name, p in model.named_parameters() if p.dtype is torch.float32}
    return found


class Careful(torch.nn.Module):
    """Normalises and classifies in fp32, whatever its body is in."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, CLASSES)
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm((self.body(x) + self.shift).float()))


def summed(rank: int, world: int, *, stage: int) -> dict[str, Any]:
    """Gradients summed over ranks are world times the mean: in the norm, in the step, and after clipping."""
    found = {}
    for clip in (0.0, 0.3):
        recipe = Recipe(accumulation=2, clip=clip)
        one = stack_engine(stage, recipe)
        other = stack_engine(stage, recipe, gradient_allreduce_op="sum")
        start = flat(gathered(one.module))
        for micro in range(2):
            for engine in (one, other):
                engine.backward(loss_of(engine, Spot(0, rank, micro)))
                engine.step()
        moved = [flat(gathered(engine.module)) - start for engine in (one, other)]
        found[clip] = {
            "norms": other.get_global_grad_norm() / one.get_global_grad_norm(),
            "moved": distance(moved[1], moved[0] * (world if not clip else 1)),
        }
    return found


def autocast_and_fp16(rank: int, world: int, *, stage: int) -> dict[str, Any]:
    """fp16 under autocast has a loss scale: an overflow on one rank is skipped on all, and training goes on."""
    engine = stack_engine(
        stage, torch_autocast={"enabled": True, "dtype": "fp16"}, fp16={"initial_scale_power": 6, "hysteresis": 1}
    )
    scales, changed, before = [engine.loss_scale()], [], digest(gathered(engine.module))
    outputs = set()
    for step in range(3):
        features, classes = Plain().batch(Spot(step, rank, 0))
        output = engine(features)
        outputs.add(str(output.dtype))
        loss = F.cross_entropy(output.float(), classes)
        engine.backward(loss * float("inf") if step == 1 and rank == world - 1 else loss)
        engine.step()
        after = digest(gathered(engine.module))
        changed.append(after != before)
        before = after
        scales.append(engine.loss_scale())
    plain = _said(lambda: F.cross_entropy(engine(features).float(), classes).backward())
    return {
        "scales": scales,
        "changed": changed,
        "outputs": outputs,
        "weights": str(next(engine.module.parameters()).dtype),
        "plain": plain,
        "dynamic": engine.dynamic_loss_scale(),
    }


def autocast_over_sixteen_bits(rank: int, world: int, *, stage: int, dtype: str) -> dict[str, Any]:
    """16-bit parameters under autocast take float inputs."""
    engine = stack_engine(stage, dtype=dtype, torch_autocast={"enabled": True})
    features, classes = Plain().batch(Spot(0, rank, 0))
    output = engine(features)
    engine.backward(F.cross_entropy(output.float(), classes))
    engine.step()
    return {"output": str(output.dtype), "weights": str(next(engine.module.parameters()).dtype)}
