"""Whatever a model is put together from, it trains as one process would train it.

40 models are drawn, always the same ones; ZRUN_TEST_FULL=1 draws 300.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from .random_models import INNER, LEAVES, Case, Node, RandomModel, train_random
from .reference import Reference
from .scenario import Recipe
from .test_parity import check
from .worlds import World

pytestmark = pytest.mark.slow

FULL = bool(os.environ.get("ZRUN_TEST_FULL"))
EXAMPLES = 300 if FULL else 40
PHASES = tuple(phase for phase in Phase if FULL or phase is not Phase.shrink)  # shrinking takes minutes

_numbers = st.integers(0, 5)
_frozen = st.sampled_from((False, False, False, True))
_leaves = st.builds(Node, st.sampled_from(LEAVES), st.just(()), _numbers, _frozen)


def _inner(parts: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    several = st.lists(parts, min_size=1, max_size=4).map(tuple)
    return st.builds(Node, st.sampled_from(INNER), several, _numbers, _frozen)


_trees = st.recursive(_leaves, _inner, max_leaves=10)
_recipes = st.builds(
    Recipe,
    optimizer=st.sampled_from(("sgd", "adamw")),
    accumulation=st.sampled_from((1, 2, 3)),
    clip=st.sampled_from((0.0, 0.3)),
    client=st.booleans(),
    steps=st.just(4),
    dtype=st.just(torch.float64),
)
_cases = st.builds(
    Case,
    tree=_inner(_trees),
    stage=st.sampled_from((3, 2, 1, 0)),
    world=st.sampled_from((2, 3, 1)),
    recipe=_recipes,
    stem=st.booleans(),
    reentrant=st.booleans(),
    early=st.booleans(),
    whole=st.booleans(),
    prefetch=st.booleans(),
)


def _check(case: Case, world: Callable[..., World]) -> None:
    recipe = case.recipe
    wanted = Reference(RandomModel(case), recipe, case.world).train()
    results = world(case.world).run(train_random, drawn=case, timeout=120)
    check(results, wanted, limit=1e-6, recipe=recipe)


_SGD = Recipe(steps=4, dtype=torch.float64)
FOUND = {
    "a leaf that comes first, of which a rank uses nothing": Case(
        Node("on some ranks", (Node("linear"),)), 3, 2, _SGD, stem=False
    ),
    "and a head of its own after it": Case(
        Node("on some ranks", (Node("batch norm"),)), 3, 2, _SGD, stem=False, whole=False
    ),
    "frozen, built in slices and full from then on": Case(
        Node("sequential", (Node("linear", frozen=True), Node("linear"))), 1, 2, _SGD, early=True
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_wrong_once_is_right(name: str, world: Callable[..., World]) -> None:
    """Found by the test below. All are built in float64 inside zero.Init where that is on, which was refused once."""
    _check(FOUND[name], world)


@settings(max_examples=EXAMPLES, phases=PHASES, report_multiple_bugs=False, suppress_health_check=list(HealthCheck))
@given(case=_cases)
def test_a_random_model_trains_as_one_process_would(case: Case, world: Callable[..., World]) -> None:
    note(repr(case))
    _check(case, world)
