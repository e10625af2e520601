"""Checkpoints: resuming is exact, any world loads any other's, and what is wrong is told by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from . import checkpoint_uses as uses
from .worlds import World

pytestmark = pytest.mark.slow

STAGES = (0, 1, 2, 3)
Worlds = Callable[..., World]


@pytest.mark.parametrize(
    ("stage", "dtype", "accumulation"),
    [
        (stage, dtype, 4 if (stage + index) % 2 else 1)
        for stage in STAGES
        for index, dtype in enumerate(("fp32", "bf16"))
    ]
    + [(2, "fp16", 1), (3, "fp16", 4)],
)
@pytest.mark.parametrize("background", (False, True), ids=("", "async"))
def test_resuming_is_exact(
    stage: int, dtype: str, accumulation: int, background: bool, world: Worlds, tmp_path: Path
) -> None:
    how = {"directory": str(tmp_path), "stage": stage, "dtype": dtype, "accumulation": accumulation}
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

    def anyone() -> tuple[int, int, str]:
        return chance.randint(1, 4), chance.choice(STAGES), chance.choice(("fp32", "fp32", "bf16"))

    for number in range(10):
        size, stage, dtype = anyone()
        directory = str(tmp_path / str(number))
        wanted = world(size).run(uses.saved_for_others, directory=directory, stage=stage, dtype=dtype)
        for _ in range(4):
            new_size, new_stage, new_dtype = anyone()
            how = {"directory": directory, "stage": new_stage, "dtype": new_dtype, "stepped": chance.random() < 0.3}
            for one in world(new_size).run(uses.loaded_by_others, **how):
                what = f"{size} ranks, stage {stage}, {dtype} -> {new_size} ranks, stage {new_stage}, {new_dtype}"
                assert one["mark"] == wanted[0]["mark"], what
                limit = 1e-5 if dtype == new_dtype == "fp32" else 3e-2
                assert one["losses"] == pytest.approx(wanted[0]["losses"], rel=limit), what
