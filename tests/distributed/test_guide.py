"""Four configs of a practitioner's guide, verbatim, and two variations of each, train with two workers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from . import guide_uses
from .worlds import World

pytestmark = pytest.mark.slow

FILES = sorted((Path(__file__).parent / "guide").glob("*.json"))
VARIATIONS: dict[str, dict[str, Any]] = {
    "verbatim": {},
    "clipped": {"gradient_clipping": 1.0},
    "bf16": {"fp16": {"enabled": False}, "bf16": {"enabled": True}},
}
# train batch, micro batch, accumulation at two workers; without any batch key a micro-batch is one sample
BATCHES = {"1": (32, 16, 1), "2": (64, 16, 2), "3": (2, 1, 1), "4": (2, 1, 1)}


def test_all_four_are_here() -> None:
    assert [path.name.split("-")[1] for path in FILES] == ["1", "2", "3", "4"]


@pytest.mark.parametrize("variation", VARIATIONS)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_config_of_the_guide_trains(path: Path, variation: str, world: Callable[..., World]) -> None:
    case, changes = guide_uses.plain_loop, VARIATIONS[variation]
    written = json.loads(path.read_text())
    steps = 120 if "optimizer" in written else 40  # its learning rate is small
    results = world(2).run(case, path=str(path), changes=changes, steps=steps)
    half = "fp16" in written
    wanted = torch.bfloat16 if variation == "bf16" else torch.float16 if half else torch.float32
    for found in results:
        losses = found["losses"]
        assert sum(losses[-5:]) < 0.98 * sum(losses[:5])
        assert found["skipped"] <= 6, "the loss scale finds its place"
        assert found["batch"] == BATCHES[path.name.split("-")[1]]
        assert found["clip"] == 1.0, "clipping is on, whether the config says so or not"
        assert found["dtype"] is wanted
        assert found["digest"] == results[0]["digest"]
    report = "\n".join(results[0]["report"])
    for section, tier in results[0]["tiers"].items():
        assert tier == ("cpu" if section in written["zero_optimization"] else "device"), "offloading is honoured"
    assert ("gradient_clipping = 1.0" in report) == (variation != "clipped"), "a default that surprises is told"
    assumed = re.search(r"train_micro_batch_size_per_gpu = 1\b", report) is not None
    assert assumed == (path.name.split("-")[1] in "34"), "a micro-batch of one sample is told when it is assumed"
