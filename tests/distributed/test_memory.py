"""Bytes that a rank holds for the model are those of the formula, counted over live storages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from .memory_of_steps import Held, hold, hold_as_planned
from .scenario import Recipe
from .worlds import World

pytestmark = pytest.mark.slow

STAGES = (0, 1, 2, 3)
MIB = 2**20
ADAM = 8  # bytes a parameter: two fp32 moments
Worlds = Callable[..., World]


def state_bytes(stage: int, size: int, dtype: torch.dtype) -> float:
    """Bytes a parameter between steps: weights, fp32 masters of 16-bit weights, moments."""
    weight, optimizer = (4, ADAM) if dtype is torch.float32 else (2, 4 + ADAM)
    return weight / (size if stage == 3 else 1) + optimizer / (size if stage >= 1 else 1)


def limit(per_parameter: float, held: Held) -> float:
    return 1.05 * per_parameter * held.parameters + MIB


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("size", (1, 2, 4))
@pytest.mark.parametrize("stage", STAGES)
def test_states_take_what_the_formula_says(stage: int, size: int, dtype: torch.dtype, world: Worlds) -> None:
    per_parameter = state_bytes(stage, size, dtype)
    for held in world(size).run(hold, stage=stage, recipe=Recipe("adamw", dtype=dtype)):
        assert held.between <= limit(per_parameter, held)
        assert held.between >= 0.95 * per_parameter * held.parameters, "something hides from this count"
        assert sum(held.told.values()) == pytest.approx(held.between, rel=0.05, abs=MIB)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("stage", STAGES)
def test_accumulated_gradients_are_the_only_addition(stage: int, dtype: torch.dtype, world: Worlds) -> None:
    gradients = 4 / (2 if stage >= 2 else 1)  # fp32, whatever the weights are
    for held in world(2).run(hold, stage=stage, recipe=Recipe("adamw", accumulation=2, dtype=dtype)):
        assert held.within <= limit(state_bytes(stage, 2, dtype) + gradients, held)


@pytest.mark.parametrize("size", (2, 4))
def test_stage_three_adds_at_most_two_groups(size: int, world: Worlds) -> None:
    """Forward: two groups of weights. Backward: two of weights and of gradients, the slices that arrive for one of
    them, and what was reduced so far.
    """
    for held in world(size).run(hold, stage=3, recipe=Recipe("adamw")):
        group, reduced = 4 * held.block, 4 * held.parameters / size
        assert group < held.forward - held.between <= 1.05 * 2 * group + MIB
        assert held.backward - held.between <= 1.05 * (2 * 2 * group + group * (size - 1) / size + reduced) + MIB


@pytest.mark.parametrize("size", (1, 2, 4))
@pytest.mark.parametrize("stage", STAGES)
def test_a_tiny_model_has_tiny_buffers(stage: int, size: int, world: Worlds) -> None:
    for held in world(size).run(hold, stage=stage, recipe=Recipe("adamw"), tiny=True):
        assert 500 < held.parameters < 2000
        assert max(held.between, held.forward, held.backward, held.within) < MIB


OFFLOADS = [
    *((stage, "none", "none") for stage in STAGES),
    *((stage, tier, "none") for tier in ("cpu", "nvme") for stage in STAGES[1:]),
    *((3, optimizer, params) for optimizer, params in (("cpu", "cpu"), ("nvme", "cpu"), ("nvme", "nvme"))),
]


@pytest.mark.parametrize(("stage", "optimizer", "params"), OFFLOADS)
def test_states_take_what_was_planned(stage: int, optimizer: str, params: str, world: Worlds, tmp_path: Path) -> None:
    """What `zrun plan` says of every stage and offload, against live storages and files."""
    zero: dict[str, object] = {"stage": stage}
    for key, device in (("offload_optimizer", optimizer), ("offload_param", params)):
        if device != "none":
            zero[key] = {"device": device, **({"nvme_path": str(tmp_path)} if device == "nvme" else {})}
    if params == "nvme":
        zero["offload_param"] = {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 0}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
    }
    for found in world(2).run(hold_as_planned, config=config, path=str(tmp_path)):
        assert 0.95 * found.states <= found.held <= 1.05 * found.states + found.buffers + MIB // 4
        assert found.disk == pytest.approx(found.disk_states, rel=0.05, abs=MIB // 4)
