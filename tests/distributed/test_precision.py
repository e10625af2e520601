"""fp16 and bf16 through the engine: the loss scale by its rules, parity of stages, types on the wire, clashes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from . import compare, precision_uses
from .worlds import World

pytestmark = pytest.mark.slow

STAGES = (0, 1, 2, 3)
Worlds = Callable[..., World]


@dataclass
class Rules:
    """The loss scale as its rules tell it."""

    scale: float
    minimum: float
    window: int
    hysteresis: int
    consecutive: bool
    left: int = 0
    step: int = 0
    last: int = -1

    def __post_init__(self) -> None:
        self.left = self.hysteresis

    def overflow(self) -> bool:
        """False: it was at its minimum already."""
        if self.hysteresis > 1 and self.left > 1:
            self.left -= 1
        elif self.scale == self.minimum:
            return False
        else:
            self.scale = max(self.scale / 2, self.minimum)
        self.last, self.step = self.step, self.step + 1
        return True

    def good(self) -> None:
        if self.consecutive:
            self.left = self.hysteresis
        count = self.step - self.last - 1
        if count > 0 and count % self.window == 0:
            self.left, self.scale = self.hysteresis, self.scale * 2
        self.step += 1


def _scripts(seed: int, count: int, size: int) -> list[tuple[str, dict[str, Any]]]:
    """Patterns of overflows, each on one rank, with the settings that they run under."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        rate = draw.choice((0.1, 0.3, 0.6))
        pattern = "".join(str(draw.randrange(size)) if draw.random() < rate else "." for _ in range(10))
        found.append(
            (
                pattern,
                {
                    "initial_scale_power": draw.randrange(3, 9),
                    "loss_scale_window": draw.randrange(1, 5),
                    "hysteresis": draw.randrange(1, 4),
                    "consecutive_hysteresis": draw.random() < 0.5,
                    "min_loss_scale": draw.choice((1, 2, 4)),
                },
            )
        )
    return found


@pytest.mark.parametrize("size", (1, 2))
@pytest.mark.parametrize("stage", STAGES)
def test_two_hundred_scripts_of_overflows_follow_the_rules(stage: int, size: int, world: Worlds) -> None:
    scripts = _scripts(10 * size + stage, 200, size)
    for results in world(size).run(precision_uses.scripted, stage=stage, scripts=scripts):
        ended = 0
        for (pattern, fp16), found in zip(scripts, results, strict=True):
            rules = Rules(
                2.0 ** fp16["initial_scale_power"],
                fp16["min_loss_scale"],
                fp16["loss_scale_window"],
                fp16["hysteresis"],
                fp16["consecutive_hysteresis"],
            )
            expected, skipped, applied = [], 0, 0
            for mark in pattern:
                if mark != "." and not rules.overflow():
                    assert f"minimum {rules.minimum:g}" in found["said"] and "that is not: stem.weight" in found["said"]
                    assert f"step {len(expected)}:" in found["said"]
                    ended += 1
                    break
                if mark == ".":
                    rules.good()
                skipped += mark != "."
                applied += mark == "."
                expected.append((rules.scale, skipped, mark == ".", pytest.approx(1e-3 * (1 + applied))))
            else:
                assert not found["said"]
            assert found["steps"] == expected, f"{pattern} under {fp16}"
        assert 5 < ended < 190, "some end at the minimum, some do not"


@pytest.mark.parametrize("stage", (0, 3))
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("WarmupLR", {"warmup_max_lr": 0.1, "warmup_num_steps": 5}),
        ("WarmupDecayLR", {"warmup_max_lr": 0.1, "warmup_num_steps": 3, "total_num_steps": 9}),
        ("WarmupCosineLR", {"warmup_num_steps": 3, "total_num_steps": 9}),
        ("LRRangeTest", {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2}),
        ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4}),
    ],
)
def test_a_skipped_step_holds_every_schedule(stage: int, kind: str, options: dict[str, Any], world: Worlds) -> None:
    skipping, plain = ".0..00...", "........."
    scripts = [(pattern, {"loss_scale": 8.0}) for pattern in (skipping, plain)]
    scheduler = {"type": kind, "params": options}
    for found in world(2).run(precision_uses.scripted, stage=stage, scripts=scripts, scheduler=scheduler):
        held, curve = ([rate for *_, rate in script["steps"]] for script in found)
        applied = [skipping[: step + 1].count(".") for step in range(len(skipping))]
        assert len(set(curve)) > 4
        assert held == [curve[count - 1] for count in applied]


@pytest.mark.parametrize("size", (1, 2))
@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_on_one_rank_in_one_micro_batch_skips_on_all(stage: int, size: int, world: Worlds) -> None:
    pattern, fp16 = "OOO....O.O..", {"initial_scale_power": 4, "loss_scale_window": 3, "min_loss_scale": 2}
    for (found,) in world(size).run(precision_uses.trajectories, stage=stage, patterns=[pattern], fp16=fp16):
        assert found["scales"] == [16, 16, 8, 4, 4, 4, 4, 8, 8, 8, 4, 4, 4]
        assert not found["said"] and found["counters"] == (12, 5)
        assert found["changed"] == [mark == "." for mark in pattern]
        rates = [0.01 + 0.04 * max(0, pattern[: i + 1].count(".") - 1) / 50 for i in range(len(pattern))]
        assert found["rates"] == pytest.approx(rates), "a skipped step does not advance the schedule"


@pytest.mark.parametrize("dtype", ("bf16", "fp16"))
@pytest.mark.parametrize("size", (1, 2, 4))
def test_stages_agree_in_sixteen_bits(size: int, dtype: str, world: Worlds) -> None:
    case = precision_uses.sixteen_bits
    limit = {"bf16": 0.06, "fp16": 0.02}[dtype]
    for accumulation in (1, 8):
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
