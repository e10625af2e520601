"""Unusual tensors, copies of models and ranks that stop: right, or an error that says what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from . import odd_uses
from .worlds import CaseFailed, World

pytestmark = pytest.mark.slow

STAGES = (0, 1, 2, 3)
Worlds = Callable[..., World]


@pytest.mark.parametrize("kind", odd_uses.FROZEN)
@pytest.mark.parametrize("stage", (0, 2, 3))
def test_an_unusual_frozen_tensor_is_left_alone(stage: int, kind: str, world: Worlds) -> None:
    assert world(2).run(odd_uses.odd_and_frozen, stage=stage, kind=kind) == [([], True), ([], True)]


@pytest.mark.parametrize("stage", STAGES)
def test_what_cannot_train_right_is_refused_by_name(stage: int, world: Worlds) -> None:
    for said in world(2).run(odd_uses.unfit, stage=stage):
        for kind, (_, wanted) in odd_uses.UNFIT.items():
            assert said[kind].startswith(f"ParameterError: {wanted}")


@pytest.mark.parametrize("stage", (0, 3))
def test_columns_of_one_matrix_may_be_parameters(stage: int, world: Worlds) -> None:
    assert world(2).run(odd_uses.columns_of_one_matrix, stage=stage) == [[], []]


@pytest.mark.parametrize(("stage", "start"), [(stage, "fork") for stage in STAGES] + [(2, "spawn"), (3, "spawn")])
def test_a_model_in_a_worker(stage: int, start: str, world: Worlds) -> None:
    for said, far, trains in world(2).run(odd_uses.in_a_worker, stage=stage, start=start):
        assert trains
        assert far < 1e-6
        assert bool(said) == (stage == 3)
        assert stage < 3 or ("is no rank" if start == "fork" else "cannot be read here (pickle)") in said


@pytest.mark.parametrize("stage", STAGES)
def test_copies_and_their_size(stage: int, world: Worlds) -> None:
    for found in world(2).run(odd_uses.saved, stage=stage):
        assert found["engine"] <= 1.1 * found["plain"]
        assert found["module"] <= 1.1 * found["plain"] + 2048
        assert found["same"]
        assert found["pickled"].startswith("EngineError") and "engine.state_dict()" in found["pickled"]
        assert found["copied"].startswith("EngineError")
        if stage == 3:
            assert "GatheredParameters" in found["averaged"]
        else:
            assert not found["averaged"] and found["averages"]


@pytest.mark.parametrize("how", ("returns", "exits"))
@pytest.mark.parametrize("stage", (1, 3))
def test_a_rank_that_stops_is_told_of_within_the_time_out(stage: int, how: str) -> None:
    own = World(2)  # with a time-out of its own
    if how == "exits":
        with pytest.raises(CaseFailed, match=r"\[rank 1\] died with exit code 0"):
            own.run(odd_uses.stops, stage=stage, how=how, timeout=90)
        return
    first, _ = own.run(odd_uses.stops, stage=stage, how=how, timeout=90, last=True)
    assert first.startswith("RanksDivergedError: rank 0 waited for rank 1 at a ")
    assert "\n    rank 1: 1 steps done, operation " in first and "outside the engine, at " in first
    assert "   <- behind\n    rank 0: 1 steps done, operation " in first
