"""Disks of hosts, loaders, schedules, and parts of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from . import checkpoint_more as uses
from .worlds import World

pytestmark = pytest.mark.slow
Worlds = Callable[..., World]


def test_hosts_with_disks_of_their_own_agree(world: Worlds, tmp_path: Path) -> None:
    ranks = world(4).run(uses.hosts_with_disks, directory=str(tmp_path))
    for rank, found in enumerate(ranks):
        mine = [name for name in found["files"] if "-0000" in name]
        first = rank // 2 * 2
        names = [f"{role}-0000{r}-of-00004" for role in ("model", "optimizer") for r in (first, first + 1)]
        assert mine == [f"{name}.safetensors" for name in names]
        assert found["all"] == ("ck/global_step3", {"rank": rank}, True)
        assert found["newest on all"] == ("ck/global_step2", {"rank": rank}, True)
        assert "optimizer-00003" in found["damaged"] and "global_step1" in found["damaged"]
        assert found["fallback"] == ("ck/global_step1", True)
    for one in world(3).run(uses.together, directory=str(tmp_path)):
        assert one == ranks[0]["mark"]


def test_a_loader_goes_on_where_it_was(world: Worlds, tmp_path: Path) -> None:
    wanted = world(2).run(uses.loader_position, directory=str(tmp_path), resume=False)
    found = world(2).run(uses.loader_position, directory=str(tmp_path), resume=True)
    assert [len(one) for one in wanted] == [16, 16]
    for one, other in zip(found, wanted, strict=True):
        assert one == other[3:]
    (alone,) = world(1).run(uses.loader_position, directory=str(tmp_path), resume=True)
    seen = {sample for batch in alone[:10] for sample in batch}
    taken = {sample for rank in wanted for batch in rank[:3] for sample in batch}
    assert seen | taken == set(range(64)) and not seen & taken


@pytest.mark.parametrize("workers", (0, 2))
def test_chance_goes_on_with_the_loader(workers: int, world: Worlds, tmp_path: Path) -> None:
    """A loader that begins in the middle of a round does not draw the numbers again that it drew at its beginning."""
    how = {"directory": str(tmp_path), "workers": workers}
    wanted = world(2).run(uses.chance_goes_on, resume=False, **how)
    assert len(wanted[0][0]) == 5
    assert world(2).run(uses.chance_goes_on, resume=True, **how) == wanted


def test_a_schedule_goes_on(world: Worlds, tmp_path: Path) -> None:
    for rates, marks, last in world(2).run(uses.schedule_goes_on, directory=str(tmp_path)):
        assert rates and marks and last == pytest.approx(0.0, abs=1e-9)


def test_parts_of_a_checkpoint(world: Worlds, tmp_path: Path) -> None:
    for found in world(2).run(uses.parts, directory=str(tmp_path)):
        assert all(found["again"].values()), found["again"]
        assert found["fresh"] == ((0, 0, 0, 0), True)
        assert (
            "optimizer-0000" in found["missing"] and "is missing" in found["missing"] and "'again'" in found["missing"]
        )
        assert all(found["weights"].values()), found["weights"]
        assert found["module"] == (True, 0, True)
        assert "CheckpointError" not in found["between"]
        assert found["removed"] and found["without optimizer"]


def test_another_model_is_refused_before_anything_changes(world: Worlds, tmp_path: Path) -> None:
    for found in world(2).run(uses.misfit, directory=str(tmp_path)):
        assert "extra.bias, extra.weight" in found["said"] and "load_module_strict=False" in found["said"]
        assert found["same"] == "True" and found["lax"] == ""
