"""What the ranks run for test_diverge.py: ranks that were told different things, and ranks that do not come."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

import zrun_runtime

from .scenario import WIDTH, Stack

Config = dict[str, Any]


def _config(stage: int) -> Config:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
    }


def _other_order(model: nn.Module, config: Config) -> None:
    first = next(model.named_children())
    delattr(model, first[0])
    setattr(model, *first)


def _one_more(model: nn.Module, config: Config) -> None:
    model.more = nn.Linear(2, 2)


def _other_type(model: nn.Module, config: Config) -> None:
    model.stem.double()


def _frozen(model: nn.Module, config: Config) -> None:
    model.stem.weight.requires_grad_(False)


def _other_shape(model: nn.Module, config: Config) -> None:
    model.head = nn.Linear(WIDTH, 7)


def _other_buffer(model: nn.Module, config: Config) -> None:
    model.register_buffer("seen", torch.zeros(3))


def _leaf(model: nn.Module, config: Config) -> None:
    zrun_runtime.zero.set_z3_leaf_modules(model, [nn.ModuleList])


def _other_rate(model: nn.Module, config: Config) -> None:
    config["optimizer"]["params"]["lr"] = 0.02


def _other_accumulation(model: nn.Module, config: Config) -> None:
    config["gradient_accumulation_steps"] = 2


def _other_clip(model: nn.Module, config: Config) -> None:
    config["gradient_clipping"] = 0.5


def _other_stage(model: nn.Module, config: Config) -> None:
    config["zero_optimization"]["stage"] ^= 1


# What the last rank does differently, and what the error says of it.
DIFFERENCES = {
    _other_order: "parameter 0 is ",
    _one_more: " more.weight (2x2 float32, of optimizer group 0) on rank ",
    _other_type: " float64, ",
    _frozen: "stem.weight",
    _other_shape: "head.weight",
    _other_buffer: "buffer 0 is missing on rank 0 and seen (3 float32) on rank ",
    _leaf: "the leaf modules is none on rank 0 and blocks on rank ",
    _other_rate: "config.optimizer.params.lr is 0.01 on rank 0 and 0.02 on rank ",
    _other_accumulation: "config.accumulation_steps is 1 on rank 0 and 2 on rank ",
    _other_clip: "config.gradient_clipping is 1.0 on rank 0 and 0.5 on rank ",
    _other_stage: "config.zero.stage is ",
}


def different_things(rank: int, world: int, *, stage: int) -> list[str]:
    """What is said where the last rank was given something else, by `DIFFERENCES`; then it trains, with other seeds."""
    said = []
    for change in DIFFERENCES:
        model, config = Stack(), _config(stage)
        if rank == world - 1:
            change(model, config)
        said.append(_said(lambda m=model, c=config: _engine(m, c)))
    torch.manual_seed(rank)
    engine = _engine(Stack(), _config(stage))
    said.append(_said(lambda: _step(engine, 2 + rank)))
    return said


def built_differently(rank: int, world: int) -> str:
    """What is said where the last rank builds another layer inside `zero.Init`; nothing is mixed up after it."""

    def build(width: int) -> None:
        with zrun_runtime.zero.Init(config_dict_or_path=_config(3)):
            nn.Sequential(nn.Linear(4, 8), nn.Linear(8, width))

    said = _said(lambda: build(6 if rank == world - 1 else 5))
    build(5)
    return said


def other_rates_at_a_step(rank: int, world: int, *, stage: int, option: str) -> tuple[str, str]:
    """A step after one that was alike, in which the last rank has another option of its optimizer group."""
    engine = _engine(Stack(), _config(stage))
    first = _said(lambda: _step(engine))
    engine.optimizer.param_groups[0][option] = 0.5 if rank == world - 1 else 0.25
    return first, _said(lambda: _step(engine))


def sleeps_in_a_module(rank: int, world: int, *, stage: int, dtype: torch.dtype) -> str:
    """What is said on a rank where the last one falls asleep in its second forward, inside a module."""
    zrun_runtime.init_distributed(timeout=timedelta(seconds=4))
    config = _config(stage)
    config["bf16"] = {"enabled": dtype is torch.bfloat16}
    engine = _engine(Stack(), config)
    _step(engine, dtype=dtype)
    if rank == world - 1:
        engine.module.head.register_forward_pre_hook(lambda module, args: time.sleep(9))
    return _said(lambda: _step(engine, dtype=dtype))


def _engine(model: nn.Module, config: Config) -> Any:
    return zrun_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def _step(engine: Any, samples: int = 2, dtype: torch.dtype = torch.float32) -> None:
    output: Tensor = engine(torch.ones(samples, WIDTH, dtype=dtype))
    engine.backward(output.float().sum())
    engine.step()


def _said(action: Any) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
