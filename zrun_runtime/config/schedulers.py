"""The section scheduler: which types there are, and what arguments they take."""

from __future__ import annotations

from typing import Any

from zrun_runtime.config.arguments import (
    Argument,
    Check,
    argument,
    flag,
    many,
    number,
    one_of,
    optional,
    per_group,
    read_arguments,
    whole,
)
from zrun_runtime.config.notes import Ledger
from zrun_runtime.config.optimizers import known_name, tell_of_arguments, unknown_name
from zrun_runtime.config.resolved import SchedulerConfig
from zrun_runtime.config.schema import SchedulerSection

_RATES = per_group(number())
_WARM = {
    "warmup_num_steps": argument(whole(), 1000),
    "warmup_type": argument(one_of("log", "linear"), "log"),
    "last_batch_iteration": Argument(whole(-1)),
}
SCHEDULERS: dict[str, dict[str, Argument]] = {
    "WarmupLR": {
        "warmup_min_lr": argument(_RATES, 0.0),
        "warmup_max_lr": argument(optional(_RATES), None),
        **_WARM,
    },
    "WarmupDecayLR": {
        "total_num_steps": Argument(whole(1), required=True),
        "warmup_min_lr": argument(_RATES, 0.0),
        "warmup_max_lr": argument(optional(_RATES), 1e-3),
        **_WARM,
    },
    "WarmupCosineLR": {
        "total_num_steps": Argument(whole(1), required=True),
        "warmup_min_ratio": argument(number(0, 1), 0.0),
        "cos_min_ratio": argument(number(0, 1), 1e-4),
        **_WARM,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": argument(_RATES, 1e-3),
        "lr_range_test_step_size": argument(whole(1), 2000),
        "lr_range_test_step_rate": argument(number(), 1.0),
        "lr_range_test_staircase": argument(flag, False),
        "last_batch_iteration": Argument(whole(-1)),
    },
    "OneCycle": {
        "cycle_min_lr": Argument(_RATES, required=True),
        "cycle_max_lr": Argument(_RATES, required=True),
        "decay_lr_rate": argument(number(), 0.0),
        "cycle_first_step_size": argument(whole(1), 2000),
        "cycle_second_step_size": argument(optional(whole(1)), None),
        "cycle_first_stair_count": argument(whole(), 0),
        "cycle_second_stair_count": argument(optional(whole()), None),
        "decay_step_size": argument(whole(), 0),
        "cycle_momentum": argument(flag, True),
        "cycle_min_mom": argument(number(0, 1), 0.8),
        "cycle_max_mom": argument(number(0, 1), 0.9),
        "decay_mom_rate": argument(number(), 0.0),
        "last_batch_iteration": Argument(whole(-1)),
    },
}


def _needed(check: Check) -> Argument:
    return Argument(check, required=True)


_FACTOR = Argument(number())
_LAST = {"last_epoch": Argument(whole(-1))}
TORCH_SCHEDULERS: dict[str, dict[str, Argument]] = {
    "ConstantLR": {"factor": Argument(number(0, 1)), "total_iters": Argument(whole()), **_LAST},
    "CosineAnnealingLR": {"T_max": _needed(whole(1)), "eta_min": Argument(number()), **_LAST},
    "CosineAnnealingWarmRestarts": {
        "T_0": _needed(whole(1)),
        "T_mult": Argument(whole(1)),
        "eta_min": Argument(number()),
        **_LAST,
    },
    "CyclicLR": {
        "base_lr": _needed(_RATES),
        "max_lr": _needed(_RATES),
        "step_size_up": Argument(whole(1)),
        "step_size_down": Argument(optional(whole(1))),
        "mode": Argument(one_of("triangular", "triangular2", "exp_range")),
        "gamma": _FACTOR,
        "scale_mode": Argument(one_of("cycle", "iterations")),
        "cycle_momentum": Argument(flag),
        "base_momentum": Argument(number(0, 1)),
        "max_momentum": Argument(number(0, 1)),
        **_LAST,
    },
    "ExponentialLR": {"gamma": _needed(number()), **_LAST},
    "LinearLR": {
        "start_factor": Argument(number(1e-30, 1)),
        "end_factor": Argument(number(0, 1)),
        "total_iters": Argument(whole(1)),
        **_LAST,
    },
    "MultiStepLR": {"milestones": _needed(many(whole())), "gamma": _FACTOR, **_LAST},
    "OneCycleLR": {
        "max_lr": _needed(_RATES),
        "total_steps": Argument(optional(whole(1))),
        "epochs": Argument(optional(whole(1))),
        "steps_per_epoch": Argument(optional(whole(1))),
        "pct_start": Argument(number(0, 1)),
        "anneal_strategy": Argument(one_of("cos", "linear")),
        "cycle_momentum": Argument(flag),
        "base_momentum": Argument(per_group(number(0, 1))),
        "max_momentum": Argument(per_group(number(0, 1))),
        "div_factor": Argument(number(1e-30)),
        "final_div_factor": Argument(number(1e-30)),
        "three_phase": Argument(flag),
        **_LAST,
    },
    "PolynomialLR": {"total_iters": Argument(whole(1)), "power": _FACTOR, **_LAST},
    "StepLR": {"step_size": _needed(whole(1)), "gamma": _FACTOR, **_LAST},
}
_OF_THE_PROGRAM = {
    "lambdalr": "takes functions",
    "multiplicativelr": "takes functions",
    "sequentiallr": "is made of other schedules",
    "chainedscheduler": "is made of other schedules",
    "reducelronplateau": "needs a measure of yours at every step",
}


def read_scheduler(
    section: SchedulerSection | None, total_steps: int | None, deferred: frozenset[str], ledger: Ledger
) -> SchedulerConfig | None:
    """The schedule to build, or None if the section names none. Faults become problems.

    Args:
        total_steps: optimizer steps of the whole run, for a schedule that is not told; None if not known.
        deferred: paths whose value the program will fill in.
    """
    if section is None:
        return None
    if section.type.lower() in _OF_THE_PROGRAM:
        why = f"{section.type} {_OF_THE_PROGRAM[section.type.lower()]}, which JSON cannot hold"
        ledger.problem("scheduler.type", f"{why}: build it in the program and pass it to initialize(lr_scheduler=...)")
        return None
    known = {**SCHEDULERS, **TORCH_SCHEDULERS}
    name = known_name(section.type, known)
    if name is None:
        ledger.problem("scheduler.type", unknown_name("schedule", section.type, known))
        return None
    known_arguments = known[name]
    params = read_arguments(section.type, section.params, known_arguments, "scheduler.params", ledger)
    for argument_name, item in known_arguments.items():
        path = f"scheduler.params.{argument_name}"
        if not item.required or argument_name in section.params or path in deferred:
            continue
        if argument_name == "total_num_steps" and total_steps is not None:
            params[argument_name] = total_steps
            ledger.note(path, "assumed", "not given: the steps of the whole run", total_steps)
        else:
            ledger.problem(path, f"is missing: {section.type} cannot do without it")
    _tell_of_warm_up(name, section, params, ledger)
    _tell_of(name, params, section.params, ledger)
    return SchedulerConfig(name, params)


def _tell_of(name: str, params: dict[str, Any], given: dict[str, Any], ledger: Ledger) -> None:
    ledger.note("scheduler.type", "honoured", "the schedule; one given to initialize() goes first", name)
    tell_of_arguments("scheduler.params", params, given, ledger)


def _tell_of_warm_up(name: str, section: SchedulerSection, params: dict[str, Any], ledger: Ledger) -> None:
    path = "scheduler.params.warmup_max_lr"
    if name == "WarmupLR" and "warmup_max_lr" not in section.params:
        ledger.note(path, "assumed", "not given: the optimizer's learning rate")
    if name == "WarmupDecayLR" and "warmup_max_lr" not in section.params:
        ledger.note(path, "assumed", "not given: 0.001, which overrides the optimizer's learning rate", 1e-3)
    if params.get("warmup_num_steps", 0) > params.get("total_num_steps", float("inf")):
        text = "is more than total_num_steps: the rate falls to its end at once when the warm-up ends"
        ledger.note("scheduler.params.warmup_num_steps", "honoured", text, params["warmup_num_steps"])
