"""Real architectures train as a naive single process would train them, at every stage.

ZRUN_TEST_FULL=1 runs every stage with every accumulation and kind of checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from itertools import product

import pytest

from .real_models import ARCHITECTURES, Variant, train_real
from .reference import Reference
from .scenario import Outcome, Recipe
from .test_parity import check
from .worlds import World

pytestmark = pytest.mark.slow

STAGES = (0, 1, 2, 3)
KINDS = ("reentrant", "non-reentrant")


def _variants(name: str) -> list[Variant]:
    """What is run of an architecture."""
    kinds = KINDS if ARCHITECTURES[name].checkpoints else ()
    if os.environ.get("ZRUN_TEST_FULL"):
        plain = [Variant(*how) for how in product(STAGES, (1, 2))]
        early = [Variant(3, accumulation, early=True) for accumulation in (1, 2)]
        return plain + early + [Variant(*how) for how in product(STAGES, (1, 2), kinds)]
    plain = [Variant(0, 1), Variant(1, 2), Variant(2, 1), Variant(3, 2), Variant(3, 1, early=True)]
    return plain + [Variant(stage, 2, kind) for stage, kind in ((2, KINDS[0]), (3, KINDS[0]), (3, KINDS[1])) if kinds]


@lru_cache(maxsize=8)
def _truth(name: str, recipe: Recipe, checkpoint: str | None) -> list[Outcome]:
    return Reference(ARCHITECTURES[name](checkpoint), recipe, 2).train()


@pytest.mark.parametrize(
    ("name", "variant"), [(name, v) for name in sorted(ARCHITECTURES) for v in _variants(name)], ids=str
)
def test_a_real_architecture_trains_as_one_process_would(
    name: str, variant: Variant, world: Callable[..., World]
) -> None:
    recipe = Recipe(accumulation=variant.accumulation, steps=5)
    results = world(2).run(train_real, name=name, recipe=recipe, variant=variant)
    check(results, _truth(name, recipe, variant.checkpoint), limit=1e-5, recipe=recipe)
