"""fp16 and bf16 through the engine: the loss scale by its rules, parity of stages, types on the wire, clashes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from . import compare, precision_uses
from .worlds import World

pytestmark = pytest.mark.slow

STAGES = (0, 1, 2, 3)
Worlds = Callable[..., World]


class Rules:
    """The loss scale as its rules tell it; hysteresis 2, window 3, no consecutive hysteresis."""

    def __init__(self, scale: float, minimum: float) -> None:
        self.scale, self.minimum, self.left, self.step, self.last = scale, minimum, 2, 0, -1

    def overflow(self) -> bool:
        """False: it was at its minimum already."""
        if self.left > 1:
            self.left -= 1
        elif self.scale == self.minimum:
            return False
        else:
            self.scale = max(self.scale / 2, self.minimum)
        self.last, self.step = self.step, self.step + 1
        return True

    def good(self) -> None:
        count = self.step - self.last - 1
        if count > 0 and count % 3 == 0:
            self.left, self.scale = 2, self.scale * 2
        self.step += 1


def _patterns(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    return ["OOO....O.O..", *("".join(draw.choice("O..") for _ in range(12)) for _ in range(count - 1))]


@pytest.mark.parametrize("size", (1, 2))
@pytest.mark.parametrize("stage", STAGES)
def test_the_loss_scale_follows_its_rules(stage: int, size: int, world: Worlds) -> None:
    patterns = _patterns(10 * size + stage, 3)
    fp16 = {"initial_scale_power": 4, "loss_scale_window": 3, "min_loss_scale": 2}
    for results in world(size).run(precision_uses.trajectories, stage=stage, patterns=patterns, fp16=fp16):
        for pattern, found in zip(patterns, results, strict=True):
            rules, scales, skipped = Rules(16.0, 2.0), [16.0], 0
            for mark in pattern:
                if mark == "O" and not rules.overflow():
                    assert "minimum 2" in found["said"] and "that is not: stem.weight" in found["said"]
                    break
                if mark == ".":
                    rules.good()
                skipped += mark == "O"
                scales.append(rules.scale)
            else:
                assert not found["said"] and found["counters"] == (12, skipped)
            assert found["scales"] == scales
            done = pattern[: len(found["changed"])]
            assert found["changed"] == [mark == "." for mark in done], "an overflow on one rank skips on all"
            rates = [0.01 + 0.04 * max(0, done[: i + 1].count(".") - 1) / 50 for i in range(len(done))]
            assert found["rates"] == pytest.approx(rates), "a skipped step does not advance the schedule"


@pytest.mark.parametrize("dtype", ("bf16", "fp16"))
@pytest.mark.parametrize("size", (1, 2, 4))
def test_stages_agree_in_sixteen_bits(size: int, dtype: str, world: Worlds) -> None:
    case = precision_uses.sixteen_bits
    limit = {"bf16": 0.06, "fp16": 0.02}[dtype]
    for accumulation in (1, 8) if size < 4 else (8,):
        wanted = world(size).run(case, stage=0, dtype=dtype, accumulation=accumulation)[0]
        for stage in (1, 2, 3):
            results = world(size).run(case, stage=stage, dtype=dtype, accumulation=accumulation)
            assert {found["digest"] for found in results} == {results[0]["digest"]}
            assert compare.distance(results[0]["moved"], wanted["moved"]) < limit
            assert results[0]["norms"] == pytest.approx(wanted["norms"], rel=0.02)
            assert results[0]["skipped"] == 0
    merged = world(size).run(case, stage=2, dtype=dtype, accumulation=8, merged=True)[0]
    assert compare.distance(wanted["moved"], merged["moved"]) < limit, "eight sums are one sum"


@pytest.mark.parametrize("stage", STAGES)
def test_types_on_the_wire_and_of_the_sums(stage: int, world: Worlds) -> None:
    for found in world(2).run(precision_uses.travel, stage=stage):
        halves = {name: wire for name, (wire, _) in found.items()}
        assert halves["fp32/"] == halves["/"] == halves["fp32/bf16"], "sums are fp32 and travel as they are"
        assert halves["bf16/"] == halves["/bf16"] == halves["fp16/fp32"] == halves["/"] // 2
        held = {name: kept for name, (_, kept) in found.items()}
        if stage < 2:
            assert held["/bf16"] == held["fp32/bf16"] == held["/"] // 2
        else:
            assert len(set(held.values())) == 1, "slices are added up in fp32, the type of the master weights"


@pytest.mark.parametrize("dtype", ("bf16", "fp16"))
@pytest.mark.parametrize("stage", (0, 3))
def test_a_clash_of_types_names_the_module(stage: int, dtype: str, world: Worlds) -> None:
    for found in world(2).run(precision_uses.clashes, stage=stage, dtype=dtype):
        assert found["said"].startswith("stem: tensors of different types")
        assert '"auto_cast": true' in found["said"]
        assert found["cast"] is {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
        assert "stranger: RuntimeError" in found["other"], "other errors stay what they are"
        assert found["goes on"]


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_autocast_of_the_engine_is_that_of_torch(stage: int, world: Worlds) -> None:
    for found in world(2).run(precision_uses.under_autocast, stage=stage):
        assert found["output"] is torch.bfloat16 and found["weights"] is torch.float32
        assert found["far"] == 0.0


@pytest.mark.parametrize("dtype", ("", "bf16", "fp16"), ids=("fp32", "bf16", "fp16"))
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_are_all_zero_change_nothing(stage: int, dtype: str, world: Worlds) -> None:
    for found in world(2).run(precision_uses.empty_gradients, stage=stage, dtype=dtype):
        assert found == {"same": True, "norm": 0.0, "skipped": 0}


@pytest.mark.parametrize(("stage", "dtype"), ((0, "bf16"), (2, "fp16"), (3, "bf16"), (3, "fp16")))
def test_modules_that_stay_in_fp32(stage: int, dtype: str, world: Worlds) -> None:
    half = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[dtype]
    for found in world(2).run(precision_uses.kept_in_fp32, stage=stage, dtype=dtype):
        assert found["types"] == {
            **dict.fromkeys(("body.weight", "body.bias"), half),
            **dict.fromkeys(("norm.weight", "norm.bias", "head.weight", "head.bias"), "torch.float32"),
        }
        assert found["buffers"] == [half, "torch.int64"]
        assert found["far"] == 0.0, "what zero.Init builds is not rounded first"
        assert "the model has no module norms" in found["said"]
        kept = {"norm.weight", "norm.bias"}
        assert found["auto"] == (kept if dtype == "bf16" else kept | {"head.weight", "head.bias"})


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_summed_over_ranks(stage: int, world: Worlds) -> None:
    for found in world(2).run(precision_uses.summed, stage=stage):
        for clip in (0.0, 0.3):
            assert found[clip]["norms"] == pytest.approx(2.0, rel=1e-6)
            assert found[clip]["moved"] < 1e-5, "what is clipped is as long either way"


@pytest.mark.parametrize("stage", STAGES)
def test_fp16_under_autocast_scales_the_loss(stage: int, world: Worlds) -> None:
    for found in world(2).run(precision_uses.autocast_and_fp16, stage=stage):
        assert found["scales"] == [64.0, 64.0, 32.0, 32.0]
        assert found["changed"] == [True, False, True]
        assert found["outputs"] == {"torch.float16"} and found["weights"] == "torch.float32"
        assert "engine.scale(loss)" in found["plain"] and found["dynamic"]


@pytest.mark.parametrize(("stage", "dtype"), ((0, "fp16"), (2, "bf16"), (3, "bf16")))
def test_autocast_over_sixteen_bit_parameters(stage: int, dtype: str, world: Worlds) -> None:
    half = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[dtype]
    assert (
        world(2).run(precision_uses.autocast_over_sixteen_bits, stage=stage, dtype=dtype)
        == [{"output": half, "weights": half}] * 2
    )
