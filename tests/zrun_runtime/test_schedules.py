"""Learning rates against closed forms, step by step."""

import math

import pytest
import torch

from zrun_runtime.config import SchedulerConfig, load_config
from zrun_runtime.errors import ConfigError
from zrun_runtime.schedules import SCHEDULES, OneCycle, WarmupLR, build_scheduler


def optimizer(*rates, kind=torch.optim.SGD):
    return kind([{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates or (0.5,)], lr=1.0)


def curve(kind, steps=30, rate=0.5, **params):
    """The rate of each update: before step 0, 1, 2, ..."""
    target = optimizer(rate)
    schedule = build_scheduler(SchedulerConfig(kind, params), target)
    seen = []
    for _ in range(steps):
        seen.append(target.param_groups[0]["lr"])
        assert schedule.get_last_lr() == schedule.get_lr() == [seen[-1]]
        schedule.step()
    return seen


def expected(formula, steps=30):
    """The rate of update n is the formula at i = n - 1."""
    return pytest.approx([formula(n - 1) for n in range(steps)], rel=1e-12, abs=1e-15)


def log_part(i, width):
    return 0.0 if i < 0 else 1.0 if i >= width else math.log(i + 1) / math.log(width)


def line_part(i, width):
    return 0.0 if i < 0 else min(1.0, i / width)


PARTS = {"log": log_part, "linear": line_part}


@pytest.mark.parametrize("width", [2, 3, 4, 10, 50])
@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warm_up(kind, width):
    found = curve("WarmupLR", warmup_min_lr=0.1, warmup_max_lr=0.9, warmup_num_steps=width, warmup_type=kind)
    assert found == expected(lambda i: 0.1 + 0.8 * PARTS[kind](i, width))


def test_the_first_rates_of_a_linear_warm_up():
    found = curve("WarmupLR", 6, warmup_max_lr=0.1, warmup_num_steps=4, warmup_type="linear")
    assert found == pytest.approx([0.0, 0.0, 0.025, 0.05, 0.075, 0.1])


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("kind", ["log", "linear"])
def test_no_warm_up_is_the_full_rate_from_the_first_update(steps, kind):
    warm = {"warmup_num_steps": steps, "warmup_type": kind}
    assert curve("WarmupLR", 5, **warm) == [0.5] * 5
    decay = curve("WarmupDecayLR", 12, warmup_max_lr=0.5, total_num_steps=10, **warm)
    assert decay == expected(lambda i: 0.5 * min(1.0, max(0.0, (10 - i) / 8)), 12)
    cosine = curve("WarmupCosineLR", 12, total_num_steps=10, cos_min_ratio=0.0, **warm)
    assert cosine[:3] == [0.5, 0.5, 0.5]
    assert cosine[-1] == 0.0


def test_without_a_highest_rate_each_group_has_its_own():
    target = optimizer(1e-3, 5e-7)
    schedule = WarmupLR(target, warmup_num_steps=3)
    assert schedule.get_last_lr() == [0.0, 0.0]
    for _ in range(5):
        schedule.step()
    assert schedule.get_last_lr() == [1e-3, 5e-7]


@pytest.mark.parametrize(("width", "total"), [(2, 10), (5, 20), (10, 10), (20, 10), (3, 1)])
@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warm_up_and_decay(kind, width, total):
    def formula(i):
        part = PARTS[kind](i, width) if i < width else max(0.0, (total - i) / max(1, total - width))
        return 0.1 + 0.8 * part

    found = curve(
        "WarmupDecayLR",
        total_num_steps=total,
        warmup_min_lr=0.1,
        warmup_max_lr=0.9,
        warmup_num_steps=width,
        warmup_type=kind,
    )
    assert found == expected(formula)


@pytest.mark.parametrize(("width", "total"), [(2, 10), (5, 20), (10, 10), (20, 10)])
def test_warm_up_and_cosine(width, total):
    def formula(i):
        if i < width:
            return 0.5 * (0.1 + 0.9 * log_part(i, width))
        gone = min(1.0, (i - width + 1) / max(1, total - width))
        return 0.5 * (0.01 + 0.99 * (1 + math.cos(math.pi * gone)) / 2)

    params = {"total_num_steps": total, "warmup_min_ratio": 0.1, "warmup_num_steps": width, "cos_min_ratio": 0.01}
    assert curve("WarmupCosineLR", **params) == expected(formula)


@pytest.mark.parametrize("stairs", [False, True])
def test_range_test(stairs):
    params = {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 3.0}
    found = curve("LRRangeTest", lr_range_test_staircase=stairs, **params)
    assert found == expected(lambda i: 0.01 * (1 + 3.0 * ((i + 1) // 4 if stairs else (i + 1) / 4)))


def test_one_cycle():
    def rate(i):
        if i >= 10:
            return 0.1 / (1 + 0.5 * (i - 10 + 1) / 2)
        return 0.1 + 0.9 * ((i + 1) / 4 if i + 1 <= 4 else (10 - (i + 1)) / 6)

    found = curve(
        "OneCycle",
        cycle_min_lr=0.1,
        cycle_max_lr=1.0,
        cycle_first_step_size=4,
        cycle_second_step_size=6,
        decay_lr_rate=0.5,
        decay_step_size=2,
    )
    assert found == expected(rate)


def test_one_cycle_without_decay_stays_at_the_lowest_rate():
    found = curve("OneCycle", 12, cycle_min_lr=0.1, cycle_max_lr=1.0, cycle_first_step_size=3, decay_lr_rate=0.5)
    assert found[6:] == pytest.approx([0.1] * 6)


def test_one_cycle_moves_momentum_the_other_way():
    target = optimizer(0.5, kind=torch.optim.AdamW)
    schedule = OneCycle(target, 0.1, 1.0, cycle_first_step_size=2, decay_step_size=2, decay_mom_rate=0.2)
    seen = []
    for _ in range(7):
        seen.append(target.param_groups[0]["betas"])
        schedule.step()
    first = [0.9, 0.85, 0.8, 0.85, 0.9, 0.9 * 1.1, 0.9 * 1.2]
    assert [beta for beta, _ in seen] == pytest.approx(first)
    assert {beta for _, beta in seen} == {0.99}
    still = optimizer(0.5, kind=torch.optim.AdamW)
    OneCycle(still, 0.1, 1.0, cycle_momentum=False)
    assert still.param_groups[0]["betas"] == (0.9, 0.999)


# ---- every schedule ---------------------------------------------------------------------------------------

EXAMPLES = {
    "WarmupLR": {"warmup_num_steps": 5},
    "WarmupDecayLR": {"warmup_num_steps": 5, "total_num_steps": 20},
    "WarmupCosineLR": {"warmup_num_steps": 5, "total_num_steps": 20},
    "LRRangeTest": {"lr_range_test_step_size": 3},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 7},
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_one_number_restores_a_schedule(kind):
    straight = curve(kind, 20, **EXAMPLES[kind])
    first = build_scheduler(SchedulerConfig(kind, EXAMPLES[kind]), optimizer(0.5))
    for _ in range(8):
        first.step()
    second_target = optimizer(0.5)
    second = build_scheduler(SchedulerConfig(kind, EXAMPLES[kind]), second_target)
    second.load_state_dict(first.state_dict())
    assert first.state_dict() == {"last_batch_iteration": 7}
    rest = []
    for _ in range(12):
        rest.append(second_target.param_groups[0]["lr"])
        second.step()
    assert rest == straight[8:]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_may_start_in_the_middle(kind):
    later = build_scheduler(SchedulerConfig(kind, {**EXAMPLES[kind], "last_batch_iteration": 6}), optimizer(0.5))
    assert later.get_last_lr() == [curve(kind, 8, **EXAMPLES[kind])[7]]


def test_an_optimizer_in_wrappers_and_a_rate_that_is_a_tensor():
    class Wrapper:
        def __init__(self, inner):
            self.optimizer = inner

    target = optimizer(torch.tensor(0.5))
    rate = target.param_groups[0]["lr"]
    schedule = WarmupLR(Wrapper(Wrapper(target)), warmup_num_steps=2)
    for _ in range(3):
        schedule.step()
    assert target.param_groups[0]["lr"] is rate
    assert float(rate) == 0.5
    with pytest.raises(TypeError, match="needs a torch optimizer"):
        WarmupLR(object())


def test_a_rate_for_each_group():
    schedule = WarmupLR(optimizer(1.0, 1.0), warmup_max_lr=[0.1, 0.2], warmup_num_steps=0)
    assert schedule.get_last_lr() == [0.1, 0.2]
    with pytest.raises(ConfigError, match="3 values for 2 parameter groups"):
        WarmupLR(optimizer(1.0, 1.0), warmup_max_lr=[0.1, 0.2, 0.3])
    with pytest.raises(ConfigError, match="warmup_type"):
        WarmupLR(optimizer(1.0), warmup_type="cubic")


def test_a_schedule_of_torch():
    target = optimizer(1.0)
    config = load_config({"scheduler": {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.1}}}).scheduler
    schedule = build_scheduler(config, target)
    target.step()
    schedule.step()
    schedule.step()
    assert schedule.get_last_lr() == [pytest.approx(0.1)]


@pytest.mark.parametrize(
    ("kind", "params"), [("Nothing", {}), ("StepLR", {}), ("StepLR", {"step": 2}), ("Optimizer", {})]
)
def test_a_schedule_that_torch_does_not_have_or_does_not_take(kind, params):
    with pytest.raises(ConfigError):
        build_scheduler(SchedulerConfig(kind, params), optimizer(1.0))
