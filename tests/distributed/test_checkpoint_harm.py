"""Checkpoints and harm: failing disks, damage, crafted files, ranks that disagree. All is told, nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from . import checkpoint_harm as harm
from .worlds import World

pytestmark = pytest.mark.slow
Worlds = Callable[..., World]


@pytest.mark.parametrize(
    ("size", "bad", "background", "again"),
    ((1, 0, False, False), (1, 0, True, True), (2, 0, False, True), (2, 1, True, False)),
)
def test_every_write_may_fail(
    size: int, bad: int, background: bool, again: bool, world: Worlds, tmp_path: Path
) -> None:
    how = {"directory": str(tmp_path / "d"), "bad": bad, "background": background, "again": again}
    found = world(size).run(harm.every_write_fails_once, timeout=400, **how)
    assert len(found[bad]["texts"]) >= (8 if bad else 25)
    assert {"open", "pwrite", "fsync"} <= {call for call, _, _ in found[bad]["texts"]}
    for one in found:
        for number, (_, said, whole) in enumerate(one["texts"]):
            call = found[bad]["texts"][number][0]
            if (call, number) == ("mkdir", 0):
                assert said == ""  # the directory is there already
                continue
            assert said.startswith("CheckpointError"), f"{call} {number}: {said!r}"
            assert f"rank {bad}" in said or size == 1 or bad == 0
            assert str(tmp_path / "d") in said and "No space left" in said and "missing: " in said
            assert whole
        assert one["said"] == ""
    assert found[0]["leftovers"] == []


def test_damage_is_named_and_the_one_before_is_offered(world: Worlds, tmp_path: Path) -> None:
    for found, exploded in world(2).run(harm.damaged, directory=str(tmp_path / "d"), timeout=300):
        assert not exploded
        for what, (said, untouched, instead, right) in found.items():
            assert "CheckpointError" in said, f"{what}: {said!r}"
            assert str(tmp_path / "d" / "global_step2") in said, f"{what}: {said}"
            assert untouched, what
            if what in harm.MISFITS:
                continue
            assert "global_step1" in said and "fallback=True" in said, f"{what}: {said}"
            assert instead == "global_step1" and right, what


def test_odd_tags_and_latest(world: Worlds, tmp_path: Path) -> None:
    (found,) = world(1).run(harm.latest_is_odd, directory=str(tmp_path / "d"))
    directory = str(tmp_path / "d")
    assert found.pop("nothing") == (None, {})
    assert found.pop("no directory") == (None, {})
    assert found.pop("as deepspeed") == (None, None)  # what Lightning looks at
    assert found.pop("the tag's directory") == (directory + "/global_step1", {})
    assert found.pop("a newline")[0] == directory + "/global_step1"
    assert "global_step9" in found["nowhere"] and "global_step1" in found["nowhere"]
    assert "EngineError" in found.pop("no name")
    for what, said in found.items():
        assert "CheckpointError" in said, f"{what}: {said!r}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d"]


def test_ranks_that_do_not_agree_are_named_in_time(world: Worlds, tmp_path: Path) -> None:
    results = world(3).run(harm.disagreeing, directory=str(tmp_path / "d"), timeout=200)
    for rank, (found, names) in enumerate(results):
        for alone in range(3):
            if rank == alone:
                missing = "ranks 1, 2" if alone == 0 else "rank 0"
                assert f"{missing} did not come within" in found[f"only {alone}"]
        assert ("rank 0 did not come" in found["load alone"]) == (rank == 1)
        assert "TagsDifferError" in found["tags"] and "'tag0' on rank 0; 'tag1' on rank 1" in found["tags"]
        assert "rank 1 does not see" in found["directories"] and "use_node_local_storage" in found["directories"]
        assert "rank 0 at save_checkpoint; ranks 1, 2 at load_checkpoint" in found["save and load"]
        assert "client_state['f']" in found["one cannot"]
        assert "different tags" in found["load tags"]
        assert found["all"] == ""
        assert [n for n in names if not n.isdigit()] == [
            "Ignore0",
            "Warn0",
            "global_step1",
            "latest",
            "zero_to_fp32.py",
        ]


def test_saving_in_the_middle_of_a_window_says_where_the_boundary_is(world: Worlds, tmp_path: Path) -> None:
    for found in world(2).run(harm.in_the_middle, directory=str(tmp_path)):
        assert "step() has not used its gradients" in found[0]
        assert "1 of 4" in found[1] and "after 3 more calls" in found[1]
        assert "3 of 4" in found[5] and "after 1 more call " in found[5]
        assert found[7] == ""


def test_a_directory_that_cannot_be_written(world: Worlds, tmp_path: Path) -> None:
    for said, unnamed, steps in world(2).run(harm.read_only, directory=str(tmp_path)):
        assert "CheckpointError" in said and "below" in said
        assert len(unnamed) == 6 and all(": None is no dir" in text or ": '' is no dir" in text for text in unnamed)
        assert steps == 2


def test_what_cannot_be_stored_is_named(world: Worlds, tmp_path: Path) -> None:
    (found,) = world(1).run(harm.stored_kinds, directory=str(tmp_path))
    assert "client_state['a'][1]" in found["function"]
    assert "client_state['b']['c']" in found["object"]
    assert "client_state['d'][0]: it contains itself" in found["cycle"]
