"""What scripts hand to save and load, when they call them, and engines that are not like the one that saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from . import checkpoint_odd as odd
from .worlds import World

pytestmark = pytest.mark.slow
Worlds = Callable[..., World]

# What is said, and whether master weights and moments are then those that were saved.
OTHERS = {
    "Adam": ("", (True, True)),
    "SGD": ("AdamW, and this engine trains with SGD", None),
    "SGD weights": ("", (True, False)),
    "three groups": ("", (True, True)),
    "one group": ("", (True, True)),
    "groups changed": ("", (True, True)),
    "fp16": ("", (True, True)),
    "bf16 module": ("", (True, False)),
    "renamed": ("not in the checkpoint: convolution.bias, convolution.weight; not in the model: conv.bias", None),
    "renamed, lax": ("", (False, False)),
    "more were saved": ("not in the model: extra.bias, extra.weight", None),
    "more were saved, lax": ("", None),
    "without frozen ones": ("", None),
    "more is trained": ("", None),
    "no schedule here": ("", (True, True)),
    "another schedule": ("a WarmupLR, and this engine has a WarmupCosineLR", None),
}

# What rank 0 is told beside.
TOLD = {
    "renamed, lax": "these stay as they are: not in the checkpoint: convolution.bias, convolution.weight",
    "more were saved, lax": "not in the model: extra.bias, extra.weight",
    "three groups": "2 optimizer groups were saved, here are 3",
    "groups changed": "were in another optimizer group",
    "more is trained": "optimizer state begins at zero: blocks.0",
    "no schedule here": "",
}


@pytest.mark.parametrize(("size", "background"), ((1, False), (2, True)))
def test_client_states_come_back_or_are_refused_by_place(
    size: int, background: bool, world: Worlds, tmp_path: Path
) -> None:
    for found in world(size).run(odd.client_states, directory=str(tmp_path), background=background):
        assert {what: found[what] for what in odd.STATES} == dict.fromkeys(odd.STATES, True)
        for what in odd.REFUSED:
            assert found[what].startswith("CheckpointError") and "client_state" in found[what], what


def test_odd_tags_and_directories(world: Worlds, tmp_path: Path) -> None:
    for found in world(2).run(odd.odd_places, directory=str(tmp_path / "d")):
        for what, tag in odd.TAGS.items():
            assert found[f"tag {what}"] == (str(tag), str(tag))
        assert found["home"] == ["ck", "relative"]
        assert found["relative"] and found["chdir"] and found["link"] and found["same"]


def test_odd_times(world: Worlds, tmp_path: Path) -> None:
    for found in world(2).run(odd.odd_times, directory=str(tmp_path)):
        assert "a backward is running" in found.pop("in a backward")
        assert found.pop("of the other") == ("", True)
        for what in ("thread", "no_grad", "inference", "eval"):
            assert found.pop(what) == "", what
        assert all(found.values()), found


def test_only_so_many_are_kept_in_the_background_too(world: Worlds, tmp_path: Path) -> None:
    for found in world(2).run(odd.kept_in_background, directory=str(tmp_path)):
        tags = [[name for name in names if name.startswith(("global", "mine"))] for names in found]
        assert tags == [["global_step1"], ["global_step1", "mine"], ["global_step3", "mine"], ["global_step4", "mine"]]


@pytest.mark.parametrize("background", (False, True))
def test_a_network_disk(background: bool, world: Worlds, tmp_path: Path) -> None:
    for right, hidden in world(2).run(odd.on_a_network_disk, directory=str(tmp_path), background=background):
        assert right and hidden == []


def test_load_returns_when_all_have_read(world: Worlds, tmp_path: Path) -> None:
    for found in world(2).run(odd.removed_right_after, directory=str(tmp_path)):
        assert found == [(True, True)] * 2


def test_engines_that_are_not_like_the_one_that_saved(world: Worlds, tmp_path: Path) -> None:
    ranks = world(2).run(odd.other_engines, directory=str(tmp_path))
    for what, text in TOLD.items():
        assert text in ranks[0][1][what], what
    for found, _ in ranks:
        assert found.keys() == OTHERS.keys()
        for what, (said, untouched, loaded) in found.items():
            wanted, right = OTHERS[what]
            assert wanted in said if wanted else said == "", f"{what}: {said!r}"
            assert untouched or not wanted, what
            assert right is None or loaded == right, what
