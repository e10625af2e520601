"""Offloaded groups that are larger than what is updated at once train as those on the device do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zrun_runtime

from .worlds import World

pytestmark = pytest.mark.slow


def train_wide(rank: int, world: int, *, offload: dict[str, Any] | None) -> list[Tensor]:
    """Three steps of a model with a group of more than two million elements; its weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1500, 1500), nn.ReLU(), nn.Linear(1500, 8))
    zero: dict[str, Any] = {"stage": 2, **({"offload_optimizer": offload} if offload else {})}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
    }
    engine, *_ = zrun_runtime.initialize(model=model, config=config)
    inputs = torch.randn(4, 1500)
    for _ in range(3):
        engine.backward(engine(inputs).square().mean())
        engine.step()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    engine.destroy()
    return weights


@pytest.mark.parametrize("device", ("cpu", "nvme"))
def test_a_group_of_several_strips_is_updated_as_one(device: str, world: Callable[..., World], tmp_path: Path) -> None:
    offload = {"device": device, "nvme_path": str(tmp_path)}
    here, there = (world(1).run(train_wide, offload=how)[0] for how in (None, offload))
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
