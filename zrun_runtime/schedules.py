"""Learning rate schedules: DeepSpeed's five by their formulas, and torch's own by name.

[Note: Schedules]
A schedule counts optimizer steps. i is the number of the last applied step, -1 before the first; the rate in force is a
pure function of i, so a schedule is restored by one number. step() is called after each applied step, never after a
skipped one. DeepSpeed's formulas give i = -1 and i = 0 the same rate in a warm-up, so its first two updates run at the
lowest rate; that is kept. A warm-up of 0 or 1 steps is none: the full rate from the first update on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler

from zrun_runtime.config import SchedulerConfig
from zrun_runtime.errors import ConfigError

PerGroup = float | Sequence[float]


class Schedule:
    """Base: sets the rate of every parameter group of a torch optimizer after each step.

    Args:
        optimizer: a torch optimizer, or anything that holds one as `.optimizer`.
        last_batch_iteration: i to start from; see [Note: Schedules].
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int = -1) -> None:
        self.optimizer = _torch_optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))
        self._apply()

    def rates_at(self, i: int) -> list[float]:
        """The learning rate of each parameter group after i + 1 applied steps."""
        raise NotImplementedError

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go on by one step, or to the given one."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._apply()

    def get_lr(self) -> list[float]:
        """The learning rate in force, of each parameter group."""
        return self.rates_at(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """The learning rate last set, of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint has to hold."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to where state_dict was taken, rates included."""
        self.last_batch_iteration = int(state_dict["last_batch_iteration"])
        self._apply()

    def _apply(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _initial_rates(self) -> list[float]:
        return [float(group["initial_lr"]) for group in self.optimizer.param_groups]

    def _per_group(self, name: str, value: PerGroup) -> list[float]:
        groups = len(self.optimizer.param_groups)
        if isinstance(value, (int, float)):
            return [float(value)] * groups
        if len(value) != groups:
            raise ConfigError(f"scheduler.params.{name}: {len(value)} values for {groups} parameter groups")
        return [float(item) for item in value]


class _WarmUp:
    """The part of the way up, 0 to 1, that a warm-up has gone: ln(i+1)/ln(W) or i/W while i < W."""

    def __init__(self, steps: int, kind: str) -> None:
        if kind not in ("log", "linear"):
            raise ConfigError(f"scheduler.params.warmup_type: got {kind!r}, expected log or linear")
        self.steps = max(2, steps)
        self.none = steps <= 1
        self.linear = kind == "linear"

    def done(self, i: int) -> bool:
        return i >= self.steps

    def part(self, i: int) -> float:
        if self.none or self.done(i):
            return 1.0
        if i < 0:
            return 0.0
        return i / self.steps if self.linear else math.log(i + 1) / math.log(self.steps)


class WarmupLR(Schedule):
    """From warmup_min_lr up to warmup_max_lr in warmup_num_steps steps, then level.

    warmup_max_lr None is each group's own rate. The way up is logarithmic or linear (warmup_type).
    """

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.warm_up = _WarmUp(warmup_num_steps, warmup_type)
        self.bounds = (warmup_min_lr, warmup_max_lr)
        super().__init__(optimizer, last_batch_iteration)

    def rates_at(self, i: int) -> list[float]:
        low = self._per_group("warmup_min_lr", self.bounds[0])
        high = self.bounds[1]
        highs = self._initial_rates() if high is None else self._per_group("warmup_max_lr", high)
        part = self.part_at(i)
        return [a + (b - a) * part for a, b in zip(low, highs, strict=True)]

    def part_at(self, i: int) -> float:
        """Where between the lowest (0) and the highest rate (1)."""
        return self.warm_up.part(i)


class WarmupDecayLR(WarmupLR):
    """As WarmupLR, then straight down to warmup_min_lr at step total_num_steps."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def part_at(self, i: int) -> float:
        if not self.warm_up.done(i):
            return self.warm_up.part(i)
        return max(0.0, (self.total - i) / max(1, self.total - self.warm_up.steps))


class WarmupCosineLR(Schedule):
    """A part of each group's rate: from warmup_min_ratio up to 1, then down to cos_min_ratio along a cosine."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total = total_num_steps
        self.warm_up = _WarmUp(warmup_num_steps, warmup_type)
        self.lowest = (warmup_min_ratio, cos_min_ratio)
        super().__init__(optimizer, last_batch_iteration)

    def rates_at(self, i: int) -> list[float]:
        ratio = self.ratio_at(i)
        return [rate * ratio for rate in self._initial_rates()]

    def ratio_at(self, i: int) -> float:
        """The part of its own rate that every group has."""
        start, end = self.lowest
        if not self.warm_up.done(i):
            return start + (1.0 - start) * self.warm_up.part(i)
        gone = min(1.0, (i - self.warm_up.steps + 1) / max(1, self.total - self.warm_up.steps))
        return max(0.0, end + (1.0 - end) * (1.0 + math.cos(math.pi * gone)) / 2)


class LRRangeTest(Schedule):
    """A rate that rises without end, to find the largest that trains: min * (1 + step_rate * steps / step_size)."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.lowest = lr_range_test_min_lr
        self.size, self.rate, self.stairs = lr_range_test_step_size, lr_range_test_step_rate, lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def rates_at(self, i: int) -> list[float]:
        k = (i + 1) / self.size
        factor = 1.0 + self.rate * (math.floor(k) if self.stairs else k)
        return [low * factor for low in self._per_group("lr_range_test_min_lr", self.lowest)]


class OneCycle(Schedule):
    """One triangle min -> max -> min (Smith 2018, arXiv:1803.09820), then a decay below the minimum.

    Momentum (betas[0], with betas[1] held at 0.99) goes the other way, for optimizers that have betas. Stair counts
    are taken and, as in DeepSpeed, have no effect.
    """

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        self.first, self.total = cycle_first_step_size, cycle_first_step_size + second
        self.lr_bounds, self.mom_bounds = (cycle_min_lr, cycle_max_lr), (cycle_min_mom, cycle_max_mom)
        self.decay_size, self.lr_decay, self.mom_decay = decay_step_size, decay_lr_rate, decay_mom_rate
        self.cycles_momentum = cycle_momentum
        super().__init__(optimizer, last_batch_iteration)

    def rates_at(self, i: int) -> list[float]:
        low = self._per_group("cycle_min_lr", self.lr_bounds[0])
        high = self._per_group("cycle_max_lr", self.lr_bounds[1])
        height, decay = self._height(i), 1.0 + self.lr_decay * self._intervals(i)
        return [(a + (b - a) * height) / decay for a, b in zip(low, high, strict=True)]

    def momentum_at(self, i: int) -> float:
        """betas[0] after i + 1 applied steps."""
        low, high = self.mom_bounds
        return (high - (high - low) * self._height(i)) * (1.0 + self.mom_decay * self._intervals(i))

    def _height(self, i: int) -> float:
        """Where in the triangle: 0 at its feet, 1 at its top; 0 when it is over."""
        n = i + 1
        if n >= self.total:
            return 0.0
        return n / self.first if n <= self.first else (self.total - n) / (self.total - self.first)

    def _intervals(self, i: int) -> float:
        """How many decay intervals have gone since the triangle was over."""
        if self.decay_size == 0 or i < self.total:
            return 0.0
        return (i - self.total + 1) / self.decay_size

    def _apply(self) -> None:
        super()._apply()
        if not self.cycles_momentum:
            return
        for group in self.optimizer.param_groups:
            if "betas" in group:
                group["betas"] = (self.momentum_at(self.last_batch_iteration), 0.99, *group["betas"][2:])


SCHEDULES: dict[str, type[Schedule]] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def build_scheduler(config: SchedulerConfig, optimizer: Any) -> Any:
    """The schedule that a config names: one of SCHEDULES, or a class of torch.optim.lr_scheduler.

    Raises:
        ConfigError: there is no such class, or it does not take these arguments.
    """
    if config.type in SCHEDULES:
        return SCHEDULES[config.type](optimizer, **config.params)
    kind = getattr(lr_scheduler, config.type, None)
    if not (isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler)):
        raise ConfigError(f"scheduler.type: torch.optim.lr_scheduler has no schedule {config.type}")
    try:
        return kind(_torch_optimizer(optimizer), **config.params)
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"scheduler.params: {config.type} does not take these: {error}") from error


def _torch_optimizer(optimizer: Any) -> Optimizer:
    """The torch optimizer in a wrapper, however deep.

    Raises:
        TypeError: there is none.
    """
    found = optimizer
    while not isinstance(found, Optimizer):
        if not hasattr(found, "optimizer"):
            raise TypeError(f"a schedule needs a torch optimizer, not {type(optimizer).__name__}")
        found = found.optimizer
    return found
