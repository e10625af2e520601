"""Corners in which a parameter could stop training, an edit could get lost or memory could stay, without a word."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from . import corners
from .worlds import World

pytestmark = pytest.mark.slow

Worlds = Callable[..., World]


# ---- parameters in unusual places


@pytest.mark.parametrize("kind", corners.PLACES)
def test_a_parameter_trains_wherever_it_is_registered(kind: str, world: Worlds) -> None:
    assert world(2).run(corners.stuck_in_places, kind=kind) == [[], []]


def test_a_model_that_is_an_embedding_trains(world: Worlds) -> None:
    assert world(2).run(corners.stuck_embedding) == [False, False]


def test_buffers_of_all_types_are_those_of_rank_0(world: Worlds) -> None:
    first, second = world(2).run(corners.buffers_of_all_types)
    assert first == second
    assert all(all(values) for values in first.values())


# ---- edits


@pytest.mark.parametrize("stage", (1, 3))
def test_what_the_modifier_rank_writes_counts_however_it_writes_it(stage: int, world: Worlds) -> None:
    assert world(2).run(corners.edited_by_data, stage=stage) == [3.0, 3.0]


def test_a_step_inside_a_gathering_is_not_undone_by_it(world: Worlds) -> None:
    assert world(2).run(corners.step_inside_gathering) == [(True, True)] * 2


def test_inference_mode_leaves_a_model_that_trains(world: Worlds) -> None:
    assert world(2).run(corners.gathered_in_inference_mode) == [True, True]


# ---- optimizers


@pytest.mark.parametrize("kind", corners.OPTIMIZERS)
@pytest.mark.parametrize(("stage", "history"), ((0, 0), (1, 2), (3, 2)))
def test_any_element_wise_optimizer_goes_on_where_it_was(kind: str, stage: int, history: int, world: Worlds) -> None:
    assert max(world(2).run(corners.with_history, stage=stage, kind=kind, history=history)) < 1e-5


@pytest.mark.parametrize("stage", (0, 3))
def test_a_parameter_that_is_not_in_the_model_is_refused(stage: int, world: Worlds) -> None:
    for text in world(2).run(corners.stranger_in_the_optimizer, stage=stage):
        assert text.startswith("ParameterError: optimizer group 0: a parameter of shape (3, 5) is not in the model")


@pytest.mark.parametrize("stage", (0, 3))
def test_a_step_of_the_optimizer_itself_is_refused(stage: int, world: Worlds) -> None:
    for text, hooks, still in world(2).run(corners.optimizer_stepped_by_hand, stage=stage):
        assert text.startswith("EngineError: optimizer.step()")
        assert "engine.step()" in text
        assert hooks == 1
        assert not still
