"""Every tuning key has an effect that can be measured, or says that it has none and changes nothing.

No key may change a bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from . import tuning_uses
from .worlds import World

pytestmark = pytest.mark.slow

Worlds = Callable[..., World]
NONE: dict[str, Any] = {
    "allgather_bucket_size": (2, 5e8),
    "overlap_comm": (True, False),
    "sub_group_size": (1, 1e12),
    "round_robin_gradients": (True, False),
    "contiguous_gradients": (True, False),
    "reduce_scatter": (True, False),
    "stage3_max_reuse_distance": (0, 1e9),
}


def _run(world: Worlds, stage: int, *keys: dict[str, Any]) -> list[dict[str, Any]]:
    ranks = world(2).run(tuning_uses.tuned, stage=stage, keys=list(keys))
    for results in zip(*ranks, strict=True):
        assert len({result["digest"] for result in results}) == 1
    return ranks[0]


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_keys_without_an_effect_say_so_and_have_none(stage: int, world: Worlds) -> None:
    keys = [{name: values[number] for name, values in NONE.items()} for number in (0, 1)]
    nothing, low, high = _run(world, stage, {}, *keys)
    for result in (low, high):
        for name, (kind, why) in result["notes"].items():
            assert kind == "no_effect" and why, name
        assert {**result, "notes": 0} == {**nothing, "notes": 0}


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_reduce_bucket_size_bounds_what_is_reduced_at_once(stage: int, world: Worlds) -> None:
    small, middle, large = _run(world, stage, *[{"reduce_bucket_size": size} for size in (5000, 20_000, 5e8)])
    pieces = [result["reduced"][0] for result in (small, middle, large)]
    if stage < 3:
        assert pieces[0] > pieces[1] >= pieces[2]
        assert small["notes"]["reduce_bucket_size"][0] == "honoured"
    else:
        assert pieces[0] == pieces[2]
        assert small["notes"]["reduce_bucket_size"][0] == "no_effect"
    assert small["reduced"][1] == pytest.approx(large["reduced"][1], rel=0.02)


def test_prefetch_bucket_size_bounds_what_is_gathered_ahead(world: Worlds) -> None:
    none, less, block = _run(world, 3, *[{"stage3_prefetch_bucket_size": size} for size in (0, 4000, 5000)])
    assert none["live"] == less["live"] < block["live"]
    assert block["live"] - none["live"] == pytest.approx(4 * 4160, rel=0.1), "one layer is ahead"
    assert none["gathered"] == block["gathered"] and none["digest"] == block["digest"]
    assert block["notes"]["stage3_prefetch_bucket_size"][0] == "honoured"


def test_max_live_parameters_bounds_what_is_gathered_ahead(world: Worlds) -> None:
    none, some = _run(world, 3, *[{"stage3_max_live_parameters": size} for size in (0, 1e9)])
    assert none["live"] < some["live"]
    assert none["gathered"] == some["gathered"] and none["digest"] == some["digest"]
    assert none["notes"]["stage3_max_live_parameters"][0] == "honoured"


def test_persistence_threshold_keeps_small_groups_and_saves_their_gathers(world: Worlds) -> None:
    none, some = _run(world, 3, *[{"stage3_param_persistence_threshold": size} for size in (0, 1e5)])
    assert some["gathered"][0] < none["gathered"][0]
    assert some["gathered"][1] < none["gathered"][1]
    assert some["notes"]["stage3_param_persistence_threshold"][0] == "honoured"


def test_model_persistence_threshold_bounds_what_stays_in_all(world: Worlds) -> None:
    key = "stage3_model_persistence_threshold"
    none, some = _run(world, 3, *[{key: size} for size in (0, 1e9)])
    assert some["gathered"][0] < none["gathered"][0]
    assert some["digest"] == none["digest"]
    assert none["notes"][key][0] == "honoured"


@pytest.mark.parametrize("stage", (1, 3))
def test_sub_group_size_bounds_an_update_of_offloaded_state(stage: int, world: Worlds) -> None:
    for small, middle, large in world(2).run(tuning_uses.tiles, stage=stage, sizes=[500, 5000, 1e9]):
        assert small[0] > middle[0] >= large[0]
        assert small[1] == middle[1] == large[1]
