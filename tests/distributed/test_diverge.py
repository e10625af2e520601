"""Ranks that were told different things, or do not come: an error on every rank that names rank and module."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from . import diverge_uses
from .worlds import World

pytestmark = pytest.mark.slow

Worlds = Callable[..., World]


@pytest.mark.parametrize(("stage", "size"), [(0, 2), (1, 2), (2, 4), (3, 2)])
def test_ranks_that_were_told_different_things(stage: int, size: int, world: Worlds) -> None:
    results = world(size).run(diverge_uses.different_things, stage=stage)
    for said in results:
        assert said == results[0], "every rank says the same"
    *errors, trains = results[0]
    for (change, wanted), text in zip(diverge_uses.DIFFERENCES.items(), errors, strict=True):
        assert text.startswith("RanksDivergedError: initialize: "), change.__name__
        assert wanted in text and f"on rank {size - 1}" in text
    assert trains == ""


def test_ranks_that_build_different_models_in_init(world: Worlds) -> None:
    for said in world(2).run(diverge_uses.built_differently):
        assert said.startswith(
            "RanksDivergedError: zero.Init: the next parameter is Linear.weight (5x8 float32) on rank 0"
        )
        assert "(6x8 float32) on rank 1" in said


@pytest.mark.parametrize("option", ("lr", "weight_decay"))
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_options_of_the_optimizer_that_differ_at_a_step(stage: int, option: str, world: Worlds) -> None:
    (first, said), (_, other) = world(2).run(diverge_uses.other_rates_at_a_step, stage=stage, option=option)
    assert first == ""
    assert said.startswith("EngineError: step: the optimizer groups have another learning rate")
    assert "on rank 1 than on rank 0" in said and "on rank 0 than on rank 1" in other


@pytest.mark.parametrize(("stage", "size", "dtype"), [(0, 2, torch.float32), (3, 4, torch.bfloat16)])
def test_a_rank_that_sleeps_in_a_module(stage: int, size: int, dtype: torch.dtype) -> None:
    own = World(size)  # with a time-out of its own
    results = own.run(diverge_uses.sleeps_in_a_module, stage=stage, dtype=dtype, timeout=90, last=True)
    for rank, said in enumerate(results[:-1]):
        assert said.startswith(f"RanksDivergedError: rank {rank} waited for rank ")
        assert "1 steps done, operation " in said and " waits for other ranks at a " in said
        assert f"    rank {size - 1}: 1 steps done" in said and "in forward(), in head (Linear), at " in said
