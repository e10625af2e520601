"""Offloaded Adam goes strip by strip through torch's kernel: the same to the bit, and nobody who asks the optimizer
whether it has stepped is told otherwise."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zrun_runtime


def _engine(offload: bool, make: Callable[[Any], torch.optim.Optimizer]) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    optimizer = make(model.parameters())
    zero: dict[str, Any] = {"stage": 1, "sub_group_size": 64}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.1,
        "bf16": {"enabled": True},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    engine, *_ = zrun_runtime.initialize(model=model, optimizer=optimizer, config=config, lr_scheduler=schedule)
    return engine


def _train(engine: Any, steps: int) -> list[torch.Tensor]:
    for step in range(steps):
        inputs = torch.linspace(-1, 1 + step, 16, dtype=torch.bfloat16)
        engine.backward(engine(inputs).float().square().mean())
        engine.step()
    return [zrun_runtime.safe_get_full_fp32_param(p).clone() for p in engine.module.parameters()]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, maximize=True),
        lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95), eps=1e-6),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), amsgrad=True, fused=True),
    ],
    ids=["adam", "adamw", "amsgrad, tensor lr"],
)
def test_strips_are_updated_as_the_optimizer_would(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    engines = [_engine(offload, make) for offload in (False, True)]
    wanted, found = (_train(engine, 4) for engine in engines)
    for engine in engines:
        engine.destroy()
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def test_a_schedule_that_is_resumed_sees_the_optimizer_step(tmp_path: Path) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)

    engine = _engine(True, make)
    _train(engine, 2)
    engine.save_checkpoint(str(tmp_path))
    engine.destroy()
    again = _engine(True, make)
    again.load_checkpoint(str(tmp_path), load_lr_scheduler_states=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _train(again, 2)
    again.destroy()
