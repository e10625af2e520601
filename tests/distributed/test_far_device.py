"""Where the device's memory is not the host's: nothing mixes the two, and each place holds what `zrun plan` says.

One rank in a fake world, with the meta device in the place of a GPU; see far_device.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
WORLD, KIB = 4, 1024
KEYS = ("stage", "optimizer", "params", "dtype", "accumulation", "world")
NO_PREFETCH = {"stage3_prefetch_bucket_size": 0}


def _case(*values: Any, **more: Any) -> dict[str, Any]:
    return {**dict(zip(KEYS, values, strict=True)), **more}


EVERYTHING = [
    _case(3, "cpu", "cpu", "bf16", 1, WORLD),
    _case(3, "nvme", "nvme", "fp32", 1, WORLD),
    _case(3, "cpu", "nvme", "bf16", 2, 1),
]
HALF = _case(2, "cpu", "none", "bf16", 1, WORLD, ratio=0.5)
ONE_BY_ONE = _case(3, "cpu", "cpu", "bf16", 1, WORLD, zero=NO_PREFETCH)
CASES = [
    *EVERYTHING,
    *(_case(3, "none", tier, dtype, 1, WORLD) for tier, dtype in (("cpu", "fp32"), ("nvme", "bf16"), ("none", "bf16"))),
    _case(3, "cpu", "cpu", "fp32", 1, WORLD),
    _case(3, "nvme", "cpu", "fp32", 2, WORLD),
    _case(3, "cpu", "none", "fp32", 1, WORLD),
    _case(2, "cpu", "none", "bf16", 2, WORLD),
    _case(2, "nvme", "none", "fp16", 1, 1),
    _case(1, "cpu", "none", "bf16", 2, WORLD),
    _case(1, "nvme", "none", "fp32", 1, WORLD),
]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What a rank holds, by case: those of CASES, then HALF and ONE_BY_ONE."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("far_device.py")), json.dumps([*CASES, HALF, ONE_BY_ONE])],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


def test_every_place_holds_what_was_planned(found: list[dict[str, Any]]) -> None:
    for case, got in zip(CASES, found, strict=False):
        for place in ("device", "device_with_grads"):
            held, planned = got[place]
            assert held == pytest.approx(planned, rel=0.01, abs=KIB), (case, place)
        held, planned = got["host"]
        assert 0.99 * planned <= held <= 1.01 * planned + KIB + 1.05 * got["host_buffers"], case
        held, planned = got["disk"]
        assert held == pytest.approx(planned, rel=0.02, abs=KIB), case  # a tensor of a tile begins on a page
        held, planned = got["host_grads"]
        assert held == pytest.approx(planned, rel=0.01, abs=KIB) or (case["stage"] == 1 and case["accumulation"] > 1), (
            case
        )


def test_the_most_of_a_step_is_what_was_planned(found: list[dict[str, Any]]) -> None:
    """At every operation of a step."""
    for case, got in zip(CASES, found, strict=False):
        most, planned = got["device_most"]
        assert 0.6 * planned <= most <= 1.03 * planned, case


def test_with_everything_offloaded_a_device_has_two_groups_and_their_gradients(found: list[dict[str, Any]]) -> None:
    for case, got in zip(EVERYTHING, found, strict=False):
        weight, grad = 4 if case["dtype"] == "fp32" else 2, 4 if case["dtype"] == "fp32" else 2 * case["accumulation"]
        *_, second, largest = got["groups"]
        slices = 2 / case["world"] if case["world"] > 1 else 0
        assert got["device"][0] < KIB
        assert got["forward_most"] <= 1.02 * weight * (largest + second)
        assert got["device_most"][0] <= 1.02 * (weight * (largest + second) + (2 + slices) * grad * largest)


def test_without_prefetching_it_has_one_group_in_forward(found: list[dict[str, Any]]) -> None:
    assert found[-1]["forward_most"] == pytest.approx(2 * found[-1]["groups"][-1], rel=0.05)


def test_a_ratio_is_split_as_planned(found: list[dict[str, Any]]) -> None:
    """Up to half a group, as groups stay whole."""
    got = found[-2]
    group = 12 * got["groups"][-1] / WORLD
    for place in ("device", "host"):
        assert got[place][0] == pytest.approx(got[place][1], abs=group), place
