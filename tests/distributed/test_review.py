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


# ---- when a unit's weights are wanted


@pytest.mark.parametrize("frozen", (False, True))
@pytest.mark.parametrize("kind", corners.MODELS)
def test_weights_are_there_in_a_backward_that_comes_late(kind: str, frozen: bool, world: Worlds) -> None:
    for norms, wanted in world(2).run(corners.backward_after_evaluation, kind=kind, frozen=frozen):
        assert norms == pytest.approx(wanted, rel=1e-5)


def test_another_order_of_blocks_holds_no_more_of_them(world: Worlds) -> None:
    for changing, steady in world(2).run(corners.bytes_in_changing_order):
        assert changing <= steady


def test_the_last_layer_may_run_on_some_ranks(world: Worlds) -> None:
    assert world(2).run(corners.last_layer_on_some_ranks) == [True, True]


@pytest.mark.parametrize("stage", (0, 1, 2))
def test_some_ranks_may_run_reentrant_checkpoints(stage: int, world: Worlds) -> None:
    assert world(2).run(corners.checkpoints_on_some_ranks, stage=stage) == [True, True]


@pytest.mark.parametrize("stage", (0, 1, 2))
def test_a_rank_without_a_batch_may_step(stage: int, world: Worlds) -> None:
    for norm, wanted in world(2).run(corners.batch_on_some_ranks, stage=stage):
        assert norm == pytest.approx(wanted, rel=1e-5)


def test_a_hook_that_raises_before_ours_does_no_harm(world: Worlds) -> None:
    for texts, still in world(2).run(corners.hook_raises_before_ours):
        assert texts == ["ValueError: not now"] * 2
        assert not still


# ---- what stays behind, and copies


@pytest.mark.parametrize("destroy", (False, True))
@pytest.mark.parametrize("stage", (1, 3))
def test_nothing_outlives_the_last_reference(stage: int, destroy: bool, world: Worlds) -> None:
    assert world(2).run(corners.left_behind, stage=stage, destroy=destroy) == [[False] * 3] * 2


@pytest.mark.parametrize("stage", (0, 1, 2))
def test_copies_of_the_model_are_plain_models(stage: int, world: Worlds) -> None:
    assert world(2).run(corners.copies, stage=stage) == [[True, True]] * 2
