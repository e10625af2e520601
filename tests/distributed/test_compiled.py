"""Compiled parts of a model, and the whole of it, train as they do uncompiled; no hook of ours breaks a graph."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from . import compare
from .compiled import AFTER, BEFORE, Shapes, train_compiled
from .reference import Reference
from .scenario import Recipe
from .worlds import World

pytestmark = pytest.mark.slow

ALL = [(how, False, None) for how in BEFORE] + [(how, True, None) for how in AFTER] + [("blocks", False, True)]
SOME = [(0, "whole", True, None), (0, "ran", False, None), (1, "blocks", True, None), (1, "wrapped", False, None)]
WAYS = [(stage, *way) for stage in (2, 3) for way in ALL] + SOME
# The real one needs a C++ compiler, and seconds a graph; ZRUN_TEST_FULL=1 runs every stage through it.
FULL = [(stage, *way, "inductor") for stage in range(4) for way in ALL] if os.environ.get("ZRUN_TEST_FULL") else []


@pytest.mark.parametrize(("stage", "how", "late", "dynamic", "backend"), [(*way, "aot_eager") for way in WAYS] + FULL)
def test_compiled_parts_train_in_one_graph_each(
    stage: int, how: str, late: bool, dynamic: bool | None, backend: str, world: Callable[..., World]
) -> None:
    """fullgraph=True: a break is an error. Batches change their size at every step."""
    wanted = Reference(Shapes(), Recipe(steps=3), 2).train()
    case = {"stage": stage, "how": how, "late": late, "dynamic": dynamic, "backend": backend}
    results = world(2).run(train_compiled, timeout=300, **case)
    for found, true in zip(results, wanted, strict=True):
        if stage == 3 and how in ("whole", "wrapped"):
            assert found["said"].startswith("EngineError: compile: the model is one region, and sharded parameters")
            continue
        assert not found["said"]
        assert not compare.each("weight", found["weights"], true.weights, 1e-5)
        assert not compare.numbers("loss", found["losses"], true.losses, 1e-5)
        assert found["graphs"] == 2, "as without the runtime"
