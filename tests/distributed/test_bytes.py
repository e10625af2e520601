"""Bytes sent in a step are those of the formula, by the runtime's own count and by the kernel's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from . import loopback
from .bytes_of_steps import Job, measure
from .worlds import World

pytestmark = pytest.mark.slow

STAGES = (0, 1, 2, 3)
SMALL = 4096  # bytes a step for the few numbers that ranks exchange, and for every check of a gather
Worlds = Callable[..., World]


def expected(stage: int, accumulation: int) -> tuple[float, float]:
    """(least, most) that a rank sends in a step, in units of (N-1)/N x the bytes of the parameters."""
    if stage == 3:  # the last groups may stay from forward to backward, an embedding is not needed there
        return 2.0 * accumulation, 3.0 * accumulation
    exact = accumulation + 1.0 if stage == 2 else 2.0
    return exact, exact


def check(counted: dict[str, float], stage: int, accumulation: int, unit: float) -> None:
    least, most = expected(stage, accumulation)
    assert 0.98 * least * unit <= sum(counted.values()) <= 1.02 * most * unit + SMALL
    reductions = accumulation if stage >= 2 else 1
    if stage:
        assert counted["reduce_scatter"] == pytest.approx(reductions * unit, rel=0.02, abs=SMALL)
    gathers = 2 * accumulation if stage == 3 else 1
    assert counted["all_gather"] <= 1.02 * gathers * unit + SMALL


@pytest.mark.parametrize("accumulation", (1, 4))
@pytest.mark.parametrize("size", (2, 4))
@pytest.mark.parametrize("stage", STAGES)
def test_counted_bytes_follow_the_formula(stage: int, size: int, accumulation: int, world: Worlds) -> None:
    for result in world(size).run(measure, job=Job(stage, accumulation)):
        check(result["counted"], stage, accumulation, result["parameters"] * (size - 1) / size)


@pytest.mark.parametrize("kind", ("reentrant", "plain"))
@pytest.mark.parametrize("stage", (2, 3))
def test_activation_checkpointing_sends_nothing_more(stage: int, kind: str, world: Worlds) -> None:
    without = world(2).run(measure, job=Job(stage))
    with_it = world(2).run(measure, job=Job(stage, checkpointed=kind))
    for before, after in zip(without, with_it, strict=True):
        assert sum(after["counted"].values()) <= 1.001 * sum(before["counted"].values()) + SMALL


@pytest.mark.parametrize("stage", STAGES)
def test_a_world_of_one_sends_nothing(stage: int, world: Worlds) -> None:
    (result,) = world(1).run(measure, job=Job(stage))
    assert sum(result["counted"].values()) == 0


@pytest.mark.parametrize("size", (2, 4))
def test_the_loopback_interface_agrees(size: int) -> None:
    """In a private network namespace nothing else speaks: what `lo` sent is what all ranks say they sent."""
    done = subprocess.run(
        ["unshare", "-rn", sys.executable, "-m", loopback.__name__, str(size)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(STAGES) * 2
    for line in lines:
        ranks = line["ranks"]
        counted = sum(sum(result["counted"].values()) for result in ranks)
        seen = ranks[0]["interface"]
        assert counted <= seen <= 1.02 * counted + size * (size - 1) * 64 * 1024, line
