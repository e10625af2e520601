"""Checkpoints: resuming is exact, any world loads any other's, and what is wrong is told by name.

By default each pair of (stage, tiers, dtype, accumulation, background) occurs at least once; ZRUN_TEST_FULL=1 runs the
whole product.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from . import checkpoint_uses as uses
from .pairwise import Row, cover, whole
from .worlds import World

pytestmark = pytest.mark.slow

STAGES = (0, 1, 2, 3)
Worlds = Callable[..., World]


COLUMNS: dict[str, Any] = {
    "stage": STAGES,
    "tier": ("none", "cpu", "nvme"),
    "param_tier": ("none", "cpu", "nvme"),
    "dtype": ("fp32", "bf16", "fp16", "autocast"),
    "accumulation": (1, 4),
    "background": (False, True),
}


def _exists(row: Row) -> bool:
    """State that is on every rank stays on the device, and so do parameters below stage 3."""
    stage = row.get("stage", 3)
    return (stage > 0 or row.get("tier", "none") == "none") and (stage == 3 or row.get("param_tier", "none") == "none")


RESUMED = whole(COLUMNS, _exists) if os.environ.get("ZRUN_TEST_FULL") else cover(COLUMNS, allowed=_exists)


@pytest.fixture(scope="module")
def later() -> Iterator[World]:
    """Two ranks that are other processes than those that saved."""
    ranks = World(2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("row", RESUMED, ids=lambda row: "-".join(f"{value}" for value in row.values()))
def test_resuming_is_exact(row: Row, world: Worlds, later: World, tmp_path: Path) -> None:
    how = {"directory": str(tmp_path), **row}
    how["checkpoint"] = {"async": how.pop("background")}
    wanted = world(2).run(uses.straight, **how)
    found = later.run(uses.resumed, **how)
    for rank, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert other["saved"] is True
        assert one["path"] == str(tmp_path / "global_step3")
        tensor = one["state"].pop("tensor")
        assert tensor.tolist() == [rank, rank + 1, rank + 2, rank + 3]
        assert one["state"] == {"epoch": 7, "who": rank, "list": [1, (2.5, None)]}
        for key in ("after", "chance", "losses", "end"):
            assert one[key] == other[key], f"rank {rank}: {key} differs"
    buffers = {one["end"]["buffers"] for one in found}
    assert len(buffers) == 2  # batch norm's are each rank's own


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
