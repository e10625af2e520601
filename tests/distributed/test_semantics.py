"""Nothing a script does to weights, gradients or modules ends in silently wrong training (docs/semantics.md)."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch

from . import compare, semantics_edits
from .scenario import Recipe
from .worlds import World

pytestmark = pytest.mark.slow

STAGES = (0, 1, 2, 3)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ALL = tuple(product(STAGES, DTYPES))
# Every stage, every dtype, and all of stage 3; ZRUN_TEST_FULL=1 runs the whole product.
SOME = ALL if os.environ.get("ZRUN_TEST_FULL") else ((0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16"))
Worlds = Callable[..., World]


# ---- views, and edits between steps


@lru_cache(maxsize=64)
def edited_truth(edit: str, recipe: Recipe, world: int) -> Any:
    return semantics_edits.edited_truth(edit, recipe, world)


@pytest.mark.parametrize(("stage", "dtype"), SOME)
@pytest.mark.parametrize("edit", semantics_edits.EDITS)
def test_edits_are_followed(edit: str, stage: int, dtype: str, world: Worlds) -> None:
    recipe = Recipe(dtype=DTYPES[dtype])
    wanted, losses = edited_truth(edit, recipe, 2)
    for rank, (found, said) in enumerate(world(2).run(semantics_edits.edited, edit=edit, stage=stage, recipe=recipe)):
        assert not compare.each("weight", found, wanted, 1e-5 if dtype == "fp32" else 5e-3)
        assert rank or not compare.numbers("loss", said, losses, 1e-5 if dtype == "fp32" else 1e-2)
