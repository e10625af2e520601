"""Every feature of models trains as a naive single process would, at every stage.

By default each pair of (scenario, stage, world, accumulation, optimizer, clipping, client optimizer) occurs at least
once, and each scenario and stage at two ranks; ZRUN_TEST_FULL=1 runs the whole product.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch

from . import compare
from .models import SCENARIOS
from .pairwise import Row, cover
from .reference import Reference
from .scenario import Outcome, Recipe
from .training import Trained, train
from .worlds import World

pytestmark = pytest.mark.slow

STAGES = (0, 1, 2, 3)
COLUMNS: dict[str, Any] = {
    "scenario": sorted(SCENARIOS),
    "stage": STAGES,
    "world": (2, 1, 4),
    "accumulation": (1, 4),
    "optimizer": ("sgd", "adamw"),
    "clip": (0.5, 0.0),
    "client": (False, True),
}


def _rows() -> list[Row]:
    if os.environ.get("ZRUN_TEST_FULL"):
        rows = [dict(zip(COLUMNS, values, strict=True)) for values in product(*COLUMNS.values())]
    else:
        at_two = [{"scenario": s, "stage": z, "world": 2} for s, z in product(COLUMNS["scenario"], STAGES)]
        rows = cover(COLUMNS, at_two)
    return [row for row in rows if row["stage"] in SCENARIOS[row["scenario"]].stages]


def _label(row: Row) -> str:
    marks = [f"stage{row['stage']}", f"world{row['world']}", f"accumulation{row['accumulation']}", row["optimizer"]]
    return "-".join([row["scenario"], *marks, *["clip"][: row["clip"] > 0], *["client"][: row["client"]]])


def _recipe(row: Row) -> Recipe:
    return Recipe(row["optimizer"], row["accumulation"], row["clip"], row["client"])


@lru_cache(maxsize=64)
def truth(scenario: str, recipe: Recipe, world: int) -> list[Outcome]:
    """What the reference makes of it; the client's optimizer is no difference to it."""
    return Reference(SCENARIOS[scenario](), recipe, world).train()


def check(results: list[Trained], wanted: list[Outcome], *, limit: float, recipe: Recipe) -> None:
    """Raise with every complaint about the results of all ranks."""
    found = compare.complaints(results[0], wanted[0], limit=limit, whole=recipe.optimizer == "adamw")
    for rank, (ours, true) in enumerate(zip(results, wanted, strict=True)):
        found += [f"[rank {rank}] {text}" for text in compare.own_complaints(ours, true, limit)]
        counters = (recipe.steps, recipe.steps * recipe.accumulation, 0)
        found += [] if ours.counters == counters else [f"[rank {rank}] counters {ours.counters}, not {counters}"]
    if len({result.digest for result in results}) > 1:
        found.append("the ranks do not have the same weights")
    if len({tuple(result.norms) for result in results}) > 1:
        found.append("the ranks do not tell the same gradient norms")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("row", _rows(), ids=_label)
def test_trains_as_one_process_would(row: Row, world: Callable[..., World]) -> None:
    recipe = _recipe(row)
    wanted = truth(row["scenario"], Recipe(recipe.optimizer, recipe.accumulation, recipe.clip), row["world"])
    results = world(row["world"]).run(train, name=row["scenario"], stage=row["stage"], recipe=recipe)
    check(results, wanted, limit=SCENARIOS[row["scenario"]].tolerance, recipe=recipe)


@pytest.mark.parametrize("stage", STAGES)
def test_world_of_one_with_a_launchers_environment(stage: int, world: Callable[..., World]) -> None:
    recipe = Recipe("adamw", 2, 0.5)
    results = world(1, launched=True).run(train, name="gpt_tied_head", stage=stage, recipe=recipe)
    check(results, truth("gpt_tied_head", recipe, 1), limit=1e-5, recipe=recipe)


@pytest.mark.parametrize("accumulation", (1, 4))
@pytest.mark.parametrize("stage", STAGES)
def test_bf16_follows_fp32_masters(stage: int, accumulation: int, world: Callable[..., World]) -> None:
    """Rounding of 16-bit gradients on the wire is allowed, losing updates smaller than a weight's last bit is not."""
    recipe = Recipe("adamw", accumulation, 0.5, dtype=torch.bfloat16)
    results = world(2).run(train, name="gpt_tied_head", stage=stage, recipe=recipe)
    wanted = truth("gpt_tied_head", recipe, 2)[0]
    start = truth("gpt_tied_head", Recipe(steps=0, dtype=torch.bfloat16), 2)[0]
    moved = compare.flat(wanted.masters) - compare.flat(start.masters)
    ours = compare.flat(results[0].masters) - compare.flat(start.masters)
    assert compare.distance(ours, moved) < 0.05
    assert not compare.published(results[0])
    assert {weight.dtype for weight in results[0].weights.values()} == {torch.bfloat16}
    assert not compare.gradients(results[0], wanted, 0.01)
    assert not compare.numbers("loss", results[0].losses, wanted.losses, 0.01)
    assert len({result.digest for result in results}) == 1
