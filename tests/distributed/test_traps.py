"""What breaks a careless ZeRO: freed values, early gradients, hooks, ranks that go different ways, bad gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from . import compare, traps
from .reference import Reference
from .scenario import Recipe
from .worlds import World

pytestmark = pytest.mark.slow

STAGES = (0, 1, 2, 3)
Worlds = Callable[..., World]


# ---- freeing


@pytest.mark.parametrize(
    "moment", ("after initialize", "after step", "after forward", "after evaluation", "after gathering")
)
def test_a_stray_read_names_the_parameter_and_the_way_out(moment: str, world: Worlds) -> None:
    for said, kind in world(2).run(traps.stray_reads, moment=moment):
        silent = {
            name: text for name, text in said.items() if traps.SHARDED not in text or "GatheredParameters" not in text
        }
        assert not silent
        assert kind == ((24, 16), torch.float32, 24 * 16, True, 2)


def test_a_state_dict_of_gathered_parameters_outlives_the_gathering(world: Worlds) -> None:
    assert world(2).run(traps.kept_gathered) == [True, True]


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_through_older_weights_is_refused(stage: int, world: Worlds) -> None:
    for said, goes_on in world(2).run(traps.stale_graph, stage=stage):
        assert "no error" not in said
        assert goes_on


def test_gathered_parameters_outlast_a_forward_inside(world: Worlds) -> None:
    for inside, said in world(2).run(traps.gathered_across_steps):
        assert inside
        assert traps.SHARDED in said


# ---- gradients and hooks


@pytest.mark.parametrize("accumulation", (1, 2))
@pytest.mark.parametrize("stage", STAGES)
def test_where_gradients_are_after_backward(stage: int, accumulation: int, world: Worlds) -> None:
    wanted = Reference(traps.Plain(), Recipe(accumulation=accumulation, steps=1), 2).train()[0].first_grads
    for result in world(2).run(traps.grads_after_backward, stage=stage, accumulation=accumulation):
        assert not compare.each("gradient of", result["full"], wanted, 1e-5)
        assert not result["differ"]
        assert not result["left"]
        if stage:
            assert not result["present"], "a partial sum must never look like a gradient"


@pytest.mark.parametrize("late", (False, True), ids=("before initialize", "after initialize"))
@pytest.mark.parametrize("stage", (2, 3))
def test_hooks_of_the_user_see_full_weights(stage: int, late: bool, world: Worlds) -> None:
    for ran, wrong in world(2).run(traps.weights_in_hooks, stage=stage, late=late):
        assert not wrong
        assert len(ran) == (2 + 3 * 3) * 5  # stem, head, and three blocks of two layers, each in five ways


@pytest.mark.parametrize("kind", ("tensor early", "tensor late", "accumulated early", "accumulated late"))
@pytest.mark.parametrize("stage", STAGES)
def test_hooks_of_the_user_change_gradients_before_us(stage: int, kind: str, world: Worlds) -> None:
    wanted = Reference(traps.Plain(), Recipe(steps=1), 2).train()[0].first_grads
    wanted = {name: 2 * gradient for name, gradient in wanted.items()}
    for grads in world(2).run(traps.doubled_by_hooks, stage=stage, kind=kind):
        assert not compare.each("gradient of", grads, wanted, 1e-5)


# ---- ranks that diverge


WAYS = {
    "other": ([0, 1], [0, 2]),
    "one more": ([0, 1, 2], [0, 1]),
    "one less": ([0, 1], [0, 1, 2]),
    "other order": ([0, 2, 1], [0, 1, 2]),
    "one again": ([0, 0, 1, 2], [0, 1, 2]),
    "one only once": ([0, 1, 2], [0, 0, 1, 2]),
}


@pytest.mark.parametrize(("ways", "size"), [(ways, 2) for ways in WAYS] + [("other", 4), ("other order", 4)])
def test_ranks_that_enter_different_modules_are_told_or_right(size: int, ways: str, world: Worlds) -> None:
    """Fetching ahead may bring what a rank skips, so its way can fit by luck; what must not be is mixed or hung."""
    odd_one, others = WAYS[ways]
    results = world(size).run(traps.diverge, odd_one=odd_one, others=others, timeout=60, last=True)
    kinds = {kind for kind, _, _ in results}
    assert kinds == ({"RanksDivergedError"} if "once" in ways or "again" in ways or kinds != {""} else {""})
    for kind, said, wrong in results:
        assert not wrong
        assert not kind or (f"rank {size - 1}" in said and "blocks." in said)


@pytest.mark.parametrize("case", (traps.one_skips_the_backward, traps.one_raises))
def test_a_rank_that_goes_on_alone_is_told(case: Callable[..., Any], world: Worlds) -> None:
    results = world(2).run(case, timeout=60, last=True)
    assert [kind for kind, _ in results] == ["RanksDivergedError"] * 2
    assert all("rank 1" in said for _, said in results)


# ---- what goes wrong inside a step


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("bad", (math.inf, -math.inf, math.nan))
@pytest.mark.parametrize("stage", STAGES)
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(
    stage: int, bad: float, dtype: torch.dtype, world: Worlds
) -> None:
    recipe = Recipe("adamw", accumulation=1 if bad > 0 else 2, clip=0.5, dtype=dtype, steps=3)
    results: list[dict[str, Any]] = world(2).run(traps.poisoned, stage=stage, recipe=recipe, bad=bad)
    wanted = Reference(traps.Poisoned(bad, 2), recipe, 2).train()[0]
    for result in results:
        start, first, second, third = result["digests"]
        assert first != start
        assert second == first, "a skipped step must leave every bit of the weights"
        assert third != second
        assert result["counters"] == (3, 1)
        assert [math.isfinite(norm) for norm in result["norms"]] == [True, False, True]
        assert result["digests"] == results[0]["digests"]
    if dtype is torch.float32:  # moments and step counts are untouched too, or the third step would differ
        far = compare.distance(compare.flat(results[0]["masters"]), compare.flat(wanted.masters))
        assert far <= 1e-5


@pytest.mark.parametrize("where", ("forward", "backward", "evaluation"))
def test_an_exception_leaves_every_group_sharded(where: str, world: Worlds) -> None:
    for raised, readable, goes_on in world(2).run(traps.sharded_after_exception, where=where):
        assert raised
        assert not readable
        assert goes_on
