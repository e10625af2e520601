"""The tools of this folder themselves: the reference against torch's own optimizers, the pairwise cover, the worlds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from . import compare
from .models import SCENARIOS
from .pairwise import cover, pairs_of
from .reference import PlainRun, Reference
from .scenario import Recipe, Spot, build
from .worlds import CaseFailed, World


@pytest.mark.parametrize("optimizer", ("sgd", "adamw"))
@pytest.mark.parametrize("name", ("groups", "unused_on_all_ranks", "odd_shapes"))
def test_reference_agrees_with_torch(name: str, optimizer: str) -> None:
    scenario, recipe = SCENARIOS[name](), Recipe(optimizer, clip=0.5)
    model = build(scenario)
    groups: Any = scenario.groups(model) or model.parameters()
    kind = torch.optim.SGD if optimizer == "sgd" else torch.optim.AdamW
    torch_optimizer = kind(groups, **scenario.settings(recipe))
    run = PlainRun(model, 1)
    for step in range(recipe.steps):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        run.spot = Spot(step, 0, 0)
        scenario.micro(run)
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        torch_optimizer.step()
    wanted = {parameter_name: p.detach() for parameter_name, p in model.named_parameters()}
    assert not compare.each("weight", Reference(scenario, recipe, 1).train()[0].weights, wanted, 1e-5)


def test_every_scenario_moves_its_weights() -> None:
    """A scenario whose loss does not depend on its weights would prove nothing."""
    for name, kind in SCENARIOS.items():
        before, after = (Reference(kind(), Recipe(steps=steps), 2).train()[0] for steps in (0, 10))
        still = [
            key for key, master in after.masters.items() if torch.equal(master, before.masters[key]) and master.numel()
        ]
        assert not still, f"{name}: {still}"


def test_cover_leaves_no_pair_out() -> None:
    columns = {"a": (1, 2, 3), "b": ("x", "y"), "c": (True, False), "d": (0, 1)}
    rows = cover(columns, [{"a": 2, "d": 1}])
    met = set().union(*(pairs_of(row) for row in rows))
    for values in product(*columns.values()):
        assert pairs_of(dict(zip(columns, values, strict=True))) <= met
    assert len(rows) < 3 * 2 * 2 * 2


def _behave(rank: int, world: int, *, how: str) -> Any:
    if how == "rank":
        return rank, world, os.environ.get("RANK"), os.environ["OMP_NUM_THREADS"], os.getpid()
    if rank == 1 and how == "raise":
        raise ValueError("rank one had enough")
    if rank == 1 and how == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if rank == 1 and how == "hang":
        time.sleep(1000)
    return None


def _meet(rank: int, world: int) -> float:
    dist.init_process_group("gloo")
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    (("raise", "ValueError: rank one had enough"), ("die", "exit code -11"), ("hang", "did not answer")),
)
def test_a_failing_case_is_told_and_the_next_one_runs(how: str, said: str) -> None:
    one = World(2)
    try:
        first = one.run(_behave, how="rank")
        assert [(r, w, environment) for r, w, environment, _, _ in first] == [(0, 2, "0"), (1, 2, "1")]
        with pytest.raises(CaseFailed, match=f"rank 1[^~]*{said}"):
            one.run(_behave, how=how, timeout=1.0 if how == "hang" else 60.0)
        assert not any(_alive(result[4]) for result in first)
        assert one.run(_meet) == [1.0, 1.0]
    finally:
        one.close()


@pytest.mark.slow
def test_a_plain_process_has_no_launcher_environment(world: Callable[..., World]) -> None:
    assert world(1).run(_behave, how="rank")[0][:4] == (0, 1, None, "1")
