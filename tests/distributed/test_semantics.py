"""Nothing a script does to weights, gradients or modules ends in silently wrong training (docs/semantics.md)."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch

from . import compare, semantics_changes, semantics_edits, semantics_engines, semantics_gradients
from .scenario import Recipe
from .worlds import World

pytestmark = pytest.mark.slow

STAGES = (0, 1, 2, 3)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FULL = bool(os.environ.get("ZRUN_TEST_FULL"))
SIZES = (1, 2, 4) if FULL else (2,)
# Every stage, every dtype, and all of stage 3, at two ranks; ZRUN_TEST_FULL=1 runs the whole product, of worlds too.
FEW = ((0, "bf16", 2), (1, "fp32", 2), (2, "bf16", 2), (3, "fp32", 2), (3, "bf16", 2))
SOME = tuple(product(STAGES, DTYPES, SIZES)) if FULL else FEW
Worlds = Callable[..., World]


def sharded(stage: int, size: int) -> bool:
    """Whether values come and go."""
    return stage == 3 and size > 1


# ---- views, and edits between steps


@lru_cache(maxsize=64)
def edited_truth(edit: str, recipe: Recipe, world: int) -> Any:
    return semantics_edits.edited_truth(edit, recipe, world)


@pytest.mark.parametrize(
    ("edit", "stage", "dtype", "size"),
    [
        *((edit, *some) for edit in semantics_edits.EDITS for some in SOME),
        *product(semantics_edits.KEPT, (2,), ("bf16",), (2,)),
    ],
)
def test_edits_are_followed(edit: str, stage: int, dtype: str, size: int, world: Worlds) -> None:
    recipe = Recipe(dtype=DTYPES[dtype])
    wanted, losses = edited_truth(edit, recipe, size)
    for rank, (found, said) in enumerate(
        world(size).run(semantics_edits.edited, edit=edit, stage=stage, recipe=recipe)
    ):
        assert not compare.each("weight", found, wanted, 1e-5 if dtype == "fp32" else 5e-3)
        assert rank or not compare.numbers("loss", said, losses, 1e-5 if dtype == "fp32" else 1e-2)


@pytest.mark.parametrize("how", ("copied", "exchanged"))
@pytest.mark.parametrize(("stage", "dtype", "size"), SOME)
def test_averages_are_swapped_in_and_out(stage: int, dtype: str, size: int, how: str, world: Worlds) -> None:
    case = semantics_edits.averaged
    for found in world(size).run(case, stage=stage, recipe=Recipe(dtype=DTYPES[dtype]), how=how):
        assert near(found, dtype), found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stage", STAGES)
def test_edits_that_cannot_be_followed_are_named(stage: int, size: int, world: Worlds) -> None:
    for texts in world(size).run(semantics_edits.refused, stage=stage):
        assert not texts.pop("to(device)")
        followed = ("p.data =", "clamp", "load_state_dict")
        assert [name for name in followed if texts.pop(name)] == (list(followed) if sharded(stage, size) else [])
        if not sharded(stage, size):
            assert "its dtype became torch.bfloat16 after initialize" in texts["bfloat16"]
            assert "its shape became (2, 2) after initialize" in texts["shape"]
            assert "no optimizer has it" in texts["weight_norm"] and "no optimizer has it" in texts["old weight_norm"]
        else:
            assert all("GatheredParameters" in text for text in texts.values()), texts


# ---- gradients


def near(found: dict[str, float], dtype: str) -> bool:
    """Something was compared, and none of it is far."""
    return bool(found) and max(found.values()) <= (2e-5 if dtype == "fp32" else 1e-2)


@pytest.mark.parametrize("late", (False, True), ids=("before initialize", "after initialize"))
@pytest.mark.parametrize(("stage", "dtype", "size"), SOME)
def test_hooks_of_modules_change_what_passes(stage: int, dtype: str, size: int, late: bool, world: Worlds) -> None:
    case = semantics_gradients.module_hooks
    for found in world(size).run(case, stage=stage, recipe=Recipe(dtype=DTYPES[dtype]), late=late):
        assert near(found, dtype), found


@pytest.mark.parametrize(("stage", "dtype", "size"), SOME)
def test_gradients_set_by_hand_count(stage: int, dtype: str, size: int, world: Worlds) -> None:
    case = semantics_gradients.grads_by_hand
    for found, text, goes_on in world(size).run(case, stage=stage, recipe=Recipe(dtype=DTYPES[dtype])):
        assert near(found, dtype), found
        assert text.startswith("EngineError: blocks.1.up.weight: p.grad was set after a backward")
        assert goes_on


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_in_the_backward_is_refused(stage: int, size: int, world: Worlds) -> None:
    for text, goes_on in world(size).run(semantics_gradients.stepped_in_backward, stage=stage):
        assert "a hook changed it in the backward and took its gradient" in text
        assert goes_on


@pytest.mark.parametrize(("stage", "dtype", "size"), SOME)
def test_gradient_penalties_are_right_or_refused(stage: int, dtype: str, size: int, world: Worlds) -> None:
    case = semantics_gradients.penalty
    for found, text in world(size).run(case, stage=stage, recipe=Recipe(dtype=DTYPES[dtype])):
        assert near(found, dtype), found
        assert ("gradient penalties with ZeRO 2 or less" in text) == sharded(stage, size)


@pytest.mark.parametrize("accumulation", (1, 2))
@pytest.mark.parametrize(("stage", "dtype", "size"), SOME)
def test_autograd_grad_reduces_nothing_and_disturbs_nothing(
    stage: int, dtype: str, size: int, accumulation: int, world: Worlds
) -> None:
    recipe = Recipe(accumulation=accumulation, dtype=DTYPES[dtype])
    for found, reductions, right in world(size).run(semantics_gradients.saliency, stage=stage, recipe=recipe):
        assert near(found, dtype), found
        assert not any(reductions)
        assert right


@pytest.mark.parametrize(("stage", "dtype", "size"), SOME)
def test_function_transforms_go_through_the_model(stage: int, dtype: str, size: int, world: Worlds) -> None:
    for found in world(size).run(semantics_gradients.transforms, stage=stage, recipe=Recipe(dtype=DTYPES[dtype])):
        assert near(found, dtype), found


@pytest.mark.parametrize(("stage", "dtype", "size"), SOME)
def test_dropped_gradients_are_gone(stage: int, dtype: str, size: int, world: Worlds) -> None:
    for found in world(size).run(semantics_gradients.dropped, stage=stage, recipe=Recipe(dtype=DTYPES[dtype])):
        assert near(found, dtype), found


@pytest.mark.parametrize(("stage", "dtype", "size"), SOME)
def test_a_weight_changed_inside_a_forward_is_followed_or_refused(
    stage: int, dtype: str, size: int, world: Worlds
) -> None:
    case = semantics_gradients.clamped_inside
    for text, largest in world(size).run(case, stage=stage, recipe=Recipe(dtype=DTYPES[dtype])):
        assert ("blocks.0.up.weight: it was changed while the model used it" in text) == sharded(stage, size)
        assert sharded(stage, size) or largest < 0.1


# ---- what is trained changes


@pytest.mark.parametrize("kind", ("schedule", "gradual unfreezing"))
@pytest.mark.parametrize(
    ("stage", "dtype", "size"), SOME if FULL else (*SOME, (1, "fp32", 1), (3, "fp32", 1), (3, "bf16", 4))
)
def test_what_is_frozen_is_left_out_and_comes_back(stage: int, dtype: str, size: int, kind: str, world: Worlds) -> None:
    case = semantics_changes.freezing
    for found in world(size).run(case, stage=stage, recipe=Recipe(accumulation=2, dtype=DTYPES[dtype]), kind=kind):
        assert near(found, dtype), found


@pytest.mark.parametrize("case", (semantics_changes.frozen_late, semantics_changes.by_hand, semantics_changes.modes))
@pytest.mark.parametrize(("stage", "dtype", "size"), SOME)
def test_training_goes_on_as_alone(case: Callable[..., Any], stage: int, dtype: str, size: int, world: Worlds) -> None:
    for found in world(size).run(case, stage=stage, recipe=Recipe(dtype=DTYPES[dtype])):
        assert near(found, dtype), found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stage", STAGES)
def test_what_leaves_its_optimizer_group_is_named(stage: int, size: int, world: Worlds) -> None:
    for texts in world(size).run(semantics_changes.regrouped, stage=stage):
        for kind, text in texts.items():
            assert text.startswith("ParameterError: ") and "taken out of optimizer.param_groups" in text, (kind, text)


@pytest.mark.parametrize("size", (2, 4) if FULL else (2,))
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_freeze_different_parameters_are_told(stage: int, size: int, world: Worlds) -> None:
    for rank, text in enumerate(world(size).run(semantics_changes.frozen_on_one_rank, stage=stage)):
        others = ", ".join(str(other) for other in range(1, size)) if rank == 0 else "0"
        assert f"other parameters are frozen on rank {others} than on rank {rank}" in text


@pytest.mark.parametrize("kind", semantics_changes.ADDITIONS)
@pytest.mark.parametrize(("stage", "dtype", "size"), SOME)
def test_what_is_added_is_trained_once_an_optimizer_has_it(
    stage: int, dtype: str, size: int, kind: str, world: Worlds
) -> None:
    case = semantics_changes.added
    for text, old, new in world(size).run(case, stage=stage, recipe=Recipe(dtype=DTYPES[dtype]), kind=kind):
        assert "no optimizer has it" in text and "add_param_group" in text
        assert near(old, dtype) and near(new, dtype), (old, new)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_that_would_never_be_trained_are_named(stage: int, size: int, world: Worlds) -> None:
    for assigned, thawed, goes_on in world(size).run(semantics_changes.assigned, stage=stage):
        assert assigned.startswith("ParameterError: head.weight") and "assign=True" in assigned
        assert thawed.startswith("ParameterError: stem.weight")
        assert goes_on
    for text in world(size).run(semantics_changes.thawed_in_a_window, stage=stage):
        assert text.startswith("EngineError: stem.weight: it began to be trained while")


# ---- several engines


@pytest.mark.parametrize("how", ("toggled", "dropped", "late"))
@pytest.mark.parametrize(("stage", "dtype", "size"), SOME)
def test_adversaries_learn_as_alone(stage: int, dtype: str, size: int, how: str, world: Worlds) -> None:
    case = semantics_engines.adversaries
    for found in world(size).run(case, stage=stage, recipe=Recipe(dtype=DTYPES[dtype]), how=how):
        assert near(found, dtype), found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stages", ((0, 0), (1, 2), (3, 3), (3, 1), (2, 3)))
def test_engines_may_share_what_is_frozen(stages: tuple[int, int], dtype: str, size: int, world: Worlds) -> None:
    case = semantics_engines.frozen_base
    for found, right, whole in world(size).run(case, stages=stages, recipe=Recipe(dtype=DTYPES[dtype])):
        assert near(found, dtype), found
        assert len(found) == 4 and right and whole


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("stage", "second"), ((0, 0), (1, 1), (2, 3), (3, 2), (3, 3)))
def test_two_engines_cannot_train_the_same(stage: int, second: int, size: int, world: Worlds) -> None:
    for text, other, goes_on in world(size).run(semantics_engines.trained_twice, stage=stage, second=second):
        assert text.startswith("ParameterError: ") and "another engine has this parameter" in text
        assert "another engine has it as torch.float32" in other
        assert goes_on


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stage", (0, 3))
def test_a_model_is_wrapped_once(stage: int, size: int, world: Worlds) -> None:
    for texts in world(size).run(semantics_engines.wrapped, stage=stage):
        assert all(text.startswith("EngineError: initialize: ") for text in texts), texts


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_inside_a_module_has_its_part_of_the_state_dict(stage: int, size: int, world: Worlds) -> None:
    for rank, found in enumerate(world(size).run(semantics_engines.nested, stage=stage)):
        assert found["names"]
        if not sharded(stage, size) or not rank:
            assert found["tied"] and found["extra"] == {"seen": 7} and found["versions"] and not found["loads"]
            assert 0.9 < found["size"] < 1.1
        assert found.get("back", True)
