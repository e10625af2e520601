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
from .scenario import WIDTH, Recipe, Spot, build
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
