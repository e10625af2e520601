"""Checkpoints: resuming is exact, any world loads any other's, and what is wrong is told by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from . import checkpoint_uses as uses
from .worlds import World

pytestmark = pytest.mark.slow

STAGES = (0, 1, 2, 3)
Worlds = Callable[..., World]


# stage, dtype, where offloaded state is, accumulation, in the background
RESUMED = (
    *((0, "fp32", "none", 1, False), (0, "bf16", "none", 4, True), (1, "fp32", "none", 4, True)),
    *((1, "bf16", "cpu", 1, False), (1, "fp32", "nvme", 1, False), (2, "bf16", "none", 4, False)),
    *((2, "fp32", "cpu", 1, True), (2, "fp16", "nvme", 1, True), (3, "fp32", "none", 4, True)),
    *((3, "bf16", "none", 1, False), (3, "fp16", "cpu", 4, False), (3, "bf16", "nvme", 4, True)),
)


@pytest.mark.parametrize(("stage", "dtype", "tier", "accumulation", "background"), RESUMED)
def test_resuming_is_exact(
    stage: int, dtype: str, tier: str, accumulation: int, background: bool, world: Worlds, tmp_path: Path
) -> None:
    how = {"directory": str(tmp_path), "stage": stage, "dtype": dtype, "tier": tier, "accumulation": accumulation}
    how["checkpoint"] = {"async": background}
    wanted = world(2).run(uses.straight, **how)
    found = world(2).run(uses.resumed, **how)
    for rank, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert other["saved"] is True
        assert one["path"] == str(tmp_path / "global_step3")
        tensor = one["state"].pop("tensor")
        assert tensor.tolist() == [rank, rank + 1, rank + 2, rank + 3]
        assert one["state"] == {"epoch": 7, "who": rank, "list": [1, (2.5, None)]}
        for key in ("after", "chance", "losses", "end"):
            assert one[key] == other[key], f"rank {rank}: {key} differs"


def test_any_world_loads_any_other(world: Worlds, tmp_path: Path) -> None:
    """A random sample of 40 pairs of (ranks, stage, dtype): ten that save, each loaded by four others."""
    chance = random.Random(7)

    def anyone() -> tuple[int, dict[str, Any]]:
        how = {"stage": chance.choice(STAGES), "dtype": chance.choice(("fp32", "fp32", "bf16"))}
        tier = chance.choice(("none", "none", "cpu", "nvme")) if how["stage"] else "none"
        return chance.randint(1, 4), {**how, "tier": tier}

    for number in range(10):
        size, old = anyone()
        directory = str(tmp_path / str(number))
        wanted = world(size).run(uses.saved_for_others, directory=directory, **old)
        for _ in range(4):
            new_size, new = anyone()
            stepped = chance.random() < 0.3
            for one in world(new_size).run(uses.loaded_by_others, directory=directory, stepped=stepped, **new):
                what = f"{size} ranks, {old} -> {new_size} ranks, {new}"
                assert one["mark"] == wanted[0]["mark"], what
                limit = 1e-5 if old["dtype"] == new["dtype"] == "fp32" else 3e-2
                assert one["losses"] == pytest.approx(wanted[0]["losses"], rel=limit), what
