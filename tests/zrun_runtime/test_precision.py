"""The types of numbers, and the loss scale against the rules it follows, over scripted overflows."""

import random

import pytest
import torch

import zrun_runtime
from zrun_runtime.config import Fp16Config, load_config
from zrun_runtime.precision import DtypePolicy, LossScaleError, LossScaler, LossScaleSettings


def policy(**source):
    return DtypePolicy.from_config(load_config(source))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({}, (None, None, None)),
        ({"gradient_accumulation_steps": 4}, (None, None, torch.float32)),
        ({"bf16": {"enabled": True}}, (torch.bfloat16, None, None)),
        ({"bf16": {"enabled": True}, "gradient_accumulation_steps": 2}, (torch.bfloat16, None, torch.float32)),
        (
            {
                "bf16": {"enabled": True},
                "gradient_accumulation_steps": 2,
                "data_types": {"grad_accum_dtype": "bf16"},
                "communication_data_type": "fp32",
            },
            (torch.bfloat16, torch.float32, torch.bfloat16),
        ),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, (None, None, torch.float32)),
    ],
)
def test_types_follow_from_the_config(source, expected):
    found = policy(**source)
    assert (found.param_dtype, found.reduce_dtype, found.accum_dtype) == expected


# ---- loss scale ---------------------------------------------------------------------------------------


def run(settings, overflows):
    """(scale, hysteresis left) after each step; a string of O (overflow) and . (good)."""
    scaler, seen = LossScaler.start(settings), []
    for mark in overflows:
        scaler = scaler.after(mark == "O")
        seen.append((scaler.scale, scaler.hysteresis_left))
    return seen


def test_settings_come_from_the_section_fp16():
    dynamic = LossScaleSettings.from_config(Fp16Config(initial_scale_power=8, loss_scale_window=5, hysteresis=3))
    assert dynamic == LossScaleSettings(256.0, False, 5, 3, False, 1.0)
    assert LossScaleSettings.from_config(Fp16Config()).initial == 65536.0
    assert LossScaleSettings.from_config(Fp16Config(initial_scale_power=32)).initial == 2.0**32
    static = LossScaleSettings.from_config(Fp16Config(loss_scale=128))
    assert (static.initial, static.static) == (128.0, True)


def test_a_static_scale_never_changes():
    assert set(run(LossScaleSettings(128.0, static=True), "OOO....O" * 50)) == {(128.0, 2)}


def test_hysteresis_forgives_once_and_stays_used_up_until_a_window_passed():
    seen = run(LossScaleSettings(16.0, window=3, hysteresis=2), "OOO....O.O")
    assert seen == [
        (16.0, 1),
        (8.0, 1),
        (4.0, 1),
        (4.0, 1),
        (4.0, 1),
        (4.0, 1),
        (8.0, 2),
        (8.0, 1),
        (8.0, 1),
        (4.0, 1),
    ]


def test_consecutive_hysteresis_is_made_up_by_a_good_step():
    seen = run(LossScaleSettings(16.0, window=100, hysteresis=2, consecutive_hysteresis=True), "O.O.OO.")
    assert [scale for scale, _ in seen] == [16.0, 16.0, 16.0, 16.0, 16.0, 8.0, 8.0]


def test_without_overflow_the_scale_first_doubles_at_the_step_of_the_window():
    scales = [scale for scale, _ in run(LossScaleSettings(2.0, window=4), "." * 13)]
    assert scales == [2.0] * 4 + [4.0] * 4 + [8.0] * 4 + [16.0]


def test_at_its_minimum_an_overflow_is_an_error_that_names_the_step():
    scaler = LossScaler.start(LossScaleSettings(2.0, hysteresis=1))
    scaler = scaler.after(False).after(True)
    assert scaler.scale == 1.0
    with pytest.raises(LossScaleError, match=r"step 2: .* minimum 1\b"):
        scaler.after(True)
    odd = LossScaler.start(LossScaleSettings(4.0, hysteresis=1, minimum=3.0)).after(True)
    assert odd.scale == 3.0


def test_a_scaler_is_restored_in_the_middle():
    settings = LossScaleSettings(64.0, window=3)
    before = LossScaler.start(settings)
    for mark in "O..O.":
        before = before.after(mark == "O")
    after = LossScaler.start(settings).restored(before.state_dict())
    assert after == before


class Reference:
    """The rules, written down as they are told: state that changes."""

    def __init__(self, settings):
        self.s, self.scale, self.iter, self.last, self.left = settings, settings.initial, 0, -1, settings.hysteresis

    def update(self, overflow):
        if overflow:
            if self.s.hysteresis == 1 or self.left == 1:
                if self.scale == self.s.minimum:
                    raise OverflowError
                self.scale = max(self.scale / 2, self.s.minimum)
            else:
                self.left -= 1
            self.last = self.iter
        else:
            if self.s.consecutive_hysteresis:
                self.left = self.s.hysteresis
            good = self.iter - self.last - 1
            if good > 0 and good % self.s.window == 0:
                if not self.s.consecutive_hysteresis:
                    self.left = self.s.hysteresis
                self.scale *= 2
        self.iter += 1


@pytest.mark.parametrize("seed", range(200))
def test_any_pattern_follows_the_rules(seed):
    chance = random.Random(seed)
    settings = LossScaleSettings(
        initial=2.0 ** chance.randint(0, 12),
        window=chance.randint(1, 6),
        hysteresis=chance.randint(1, 4),
        consecutive_hysteresis=chance.random() < 0.5,
        minimum=chance.choice([1.0, 2.0, 0.25]),
    )
    reference, scaler, rate = Reference(settings), LossScaler.start(settings), chance.random() * 0.6
    for _ in range(120):
        overflow = chance.random() < rate
        try:
            reference.update(overflow)
        except OverflowError:
            with pytest.raises(LossScaleError):
                scaler.after(overflow)
            return
        scaler = scaler.after(overflow)
        assert (scaler.scale, scaler.hysteresis_left) == (reference.scale, reference.left)


@pytest.mark.parametrize(
    ("dtype", "config", "words"),
    [
        (torch.float16, {}, "warning: the model came in fp16, the config has no section for it"),
        (torch.bfloat16, {}, "info: the model came in bf16, the config has no section for it"),
        (torch.float32, {}, ""),
        (torch.float16, {"fp16": {"enabled": True}}, ""),
    ],
)
def test_a_model_that_comes_in_16_bits_unasked_is_told(
    dtype: torch.dtype, config: dict[str, object], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(2, 2).to(dtype)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **config}
    engine, *_ = zrun_runtime.initialize(model=model, config=config)
    engine.destroy()
    said = capsys.readouterr().err
    assert words in said and ("came in" in said) is bool(words)
