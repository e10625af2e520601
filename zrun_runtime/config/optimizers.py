"""The sections optimizer and scheduler: which types there are, and what arguments they take."""

from __future__ import annotations

from typing import Any

from zrun_runtime.config.arguments import (
    Argument,
    argument,
    flag,
    number,
    one_of,
    optional,
    pair,
    per_group,
    read_arguments,
    whole,
)
from zrun_runtime.config.names import nearest
from zrun_runtime.config.notes import Ledger
from zrun_runtime.config.resolved import OptimizerConfig, SchedulerConfig
from zrun_runtime.config.schema import OptimizerSection, SchedulerSection

_PARAMS = "optimizer.params"
_RATE, _DECAY, _EPS = argument(number(), 1e-3), Argument(number()), Argument(number())
_BETAS = Argument(pair())
_ADAM = {
    "lr": _RATE,
    "betas": argument(pair(), (0.9, 0.999)),
    "eps": argument(number(), 1e-8),
    "weight_decay": argument(number(), 0.0),
    "amsgrad": Argument(flag),
    "maximize": Argument(flag),
}
OPTIMIZERS: dict[str, dict[str, Argument]] = {
    "AdamW": _ADAM,
    "Adam": _ADAM,
    "SGD": {
        "lr": _RATE,
        "momentum": Argument(number()),
        "dampening": Argument(number()),
        "weight_decay": _DECAY,
        "nesterov": Argument(flag),
        "maximize": Argument(flag),
    },
    "Adagrad": {
        "lr": argument(number(), 1e-2),
        "lr_decay": Argument(number()),
        "weight_decay": _DECAY,
        "initial_accumulator_value": Argument(number()),
        "eps": _EPS,
    },
    "RMSprop": {
        "lr": argument(number(), 1e-2),
        "alpha": Argument(number()),
        "eps": _EPS,
        "weight_decay": _DECAY,
        "momentum": Argument(number()),
        "centered": Argument(flag),
    },
    "Adamax": {"lr": argument(number(), 2e-3), "betas": _BETAS, "eps": _EPS, "weight_decay": _DECAY},
    "NAdam": {
        "lr": argument(number(), 2e-3),
        "betas": _BETAS,
        "eps": _EPS,
        "weight_decay": _DECAY,
        "momentum_decay": Argument(number()),
        "decoupled_weight_decay": Argument(flag),
    },
    "RAdam": {
        "lr": _RATE,
        "betas": _BETAS,
        "eps": _EPS,
        "weight_decay": _DECAY,
        "decoupled_weight_decay": Argument(flag),
    },
    "Lion": {"lr": _RATE, "betas": argument(pair(), (0.9, 0.99)), "weight_decay": argument(number(), 0.0)},
    "Lamb": {
        "lr": _RATE,
        "bias_correction": Argument(flag),
        "betas": argument(pair(), (0.9, 0.999)),
        "eps": argument(number(), 1e-8),
        "weight_decay": argument(number(), 0.0),
        "max_coeff": Argument(number()),
        "min_coeff": Argument(number()),
    },
    "ASGD": {
        "lr": argument(number(), 1e-2),
        "lambd": Argument(number()),
        "alpha": Argument(number()),
        "t0": Argument(number()),
        "weight_decay": _DECAY,
    },
    "Adadelta": {"lr": argument(number(), 1.0), "rho": Argument(number(0, 1)), "eps": _EPS, "weight_decay": _DECAY},
}

_COMPRESSED = "sends compressed gradients, which changes the result: use AdamW"
_WHOLE_MATRICES = "needs whole matrices, which no rank has when they are sharded: use AdamW"
_REFUSED = {
    "onebitadam": _COMPRESSED,
    "onebitlamb": _COMPRESSED,
    "zerooneadam": _COMPRESSED,
    "muon": _WHOLE_MATRICES,
    "adafactor": _WHOLE_MATRICES,
    "lbfgs": "looks along one direction through the whole model, which shards cannot: use AdamW",
    "sparseadam": "needs sparse gradients, and they are reduced as dense ones: use Adam",
    "muadam": "is not supported: use AdamW with a learning rate for each parameter group",
    "muadamw": "is not supported: use AdamW with a learning rate for each parameter group",
    "musgd": "is not supported: use SGD with a learning rate for each parameter group",
}
_CHOSEN_HERE = ("foreach", "fused", "capturable", "differentiable", "fp32_optimizer_states", "set_grad_none")


def read_optimizer(section: OptimizerSection | None, ledger: Ledger) -> OptimizerConfig | None:
    """The optimizer to build, or None if the section names none. Faults become problems.

    "Adam" is decoupled weight decay (AdamW) unless adam_w_mode is false, as in DeepSpeed.
    """
    if section is None:
        return None
    lower = section.type.lower()
    if lower in _REFUSED:
        ledger.problem("optimizer.type", f"{section.type} {_REFUSED[lower]}")
        return None
    name = _known(section.type, OPTIMIZERS)
    if name is None:
        ledger.problem("optimizer.type", _unknown("optimizer", section.type, OPTIMIZERS))
        return None
    given = dict(section.params)
    for other in _CHOSEN_HERE:
        if other in given:
            ledger.note(f"{_PARAMS}.{other}", "no_effect", "the fastest exact form is chosen here", given.pop(other))
    if name in ("Adam", "AdamW"):
        name = _adam_kind(name, given, ledger)
    params = read_arguments(section.type, given, OPTIMIZERS[name], _PARAMS, ledger)
    ledger.note("optimizer.type", "honoured", _about_type(section.type, name), name)
    _tell_of_arguments(_PARAMS, params, section.params, ledger)
    return OptimizerConfig(name, params)


def _about_type(given: str, name: str) -> str:
    if given.lower() == name.lower():
        return "the optimizer; one given to initialize() goes first"
    return f'{given} decays weights as {name} does, unless "adam_w_mode" is false'


def _adam_kind(name: str, given: dict[str, Any], ledger: Ledger) -> str:
    """Adam or AdamW, and what DeepSpeed's own arguments of it lead to; they are removed from `given`."""
    flags = {"torch_adam": False, "adam_w_mode": True, "bias_correction": True}
    for argument_name in flags:
        value = given.pop(argument_name, flags[argument_name])
        if isinstance(value, bool):
            flags[argument_name] = value
        else:
            ledger.problem(f"{_PARAMS}.{argument_name}", f"must be true or false, not {value!r}")
    if not flags["bias_correction"]:
        ledger.problem(f"{_PARAMS}.bias_correction", "Adam without bias correction is not supported: remove it")
    kind = "AdamW" if name == "AdamW" or flags["adam_w_mode"] else "Adam"
    if flags["torch_adam"] and kind == "AdamW":
        given.setdefault("weight_decay", 0.01)  # torch's own default, which torch_adam asks for
    return kind


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
TORCH_SCHEDULERS = (
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialLR",
    "LinearLR",
    "MultiStepLR",
    "OneCycleLR",
    "PolynomialLR",
    "StepLR",
)


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
    name = _known(section.type, SCHEDULERS)
    if name is None:
        torch_name = _known(section.type, TORCH_SCHEDULERS)
        if torch_name is None:
            known = (*SCHEDULERS, *TORCH_SCHEDULERS)
            ledger.problem("scheduler.type", _unknown("schedule", section.type, known))
            return None
        _tell_of_schedule(torch_name, section.params, section.params, ledger)
        return SchedulerConfig(torch_name, dict(section.params))
    known_arguments = SCHEDULERS[name]
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
    _tell_of_schedule(name, params, section.params, ledger)
    return SchedulerConfig(name, params)


def _tell_of_arguments(path: str, params: dict[str, Any], given: dict[str, Any], ledger: Ledger) -> None:
    for name, value in params.items():
        place = f"{path}.{name}"
        if ledger.has_note(place):
            continue
        if name in given:
            ledger.note(place, "honoured", "as given", value)
        elif value is not None:
            ledger.note(place, "assumed", "not given: its default", value)


def _tell_of_schedule(name: str, params: dict[str, Any], given: dict[str, Any], ledger: Ledger) -> None:
    ledger.note("scheduler.type", "honoured", "the schedule; one given to initialize() goes first", name)
    _tell_of_arguments("scheduler.params", params, given, ledger)


def _tell_of_warm_up(name: str, section: SchedulerSection, params: dict[str, Any], ledger: Ledger) -> None:
    path = "scheduler.params.warmup_max_lr"
    if name == "WarmupLR" and "warmup_max_lr" not in section.params:
        ledger.note(path, "assumed", "not given: the optimizer's learning rate")
    if name == "WarmupDecayLR" and "warmup_max_lr" not in section.params:
        ledger.note(path, "assumed", "not given: 0.001, which overrides the optimizer's learning rate", 1e-3)
    if params.get("warmup_num_steps", 0) > params.get("total_num_steps", float("inf")):
        text = "is more than total_num_steps: the rate falls to its end at once when the warm-up ends"
        ledger.note("scheduler.params.warmup_num_steps", "honoured", text, params["warmup_num_steps"])


def _known(name: str, names: Any) -> str | None:
    return next((known for known in names if known.lower() == name.lower()), None)


def _unknown(what: str, name: str, known: Any) -> str:
    near = nearest(name, known) or next((item for item in known if name.lower().startswith(f"{item.lower()}_")), None)
    hint = f"did you mean {near}?" if near else f"there are {', '.join(known)}"
    return f"{name} is not a known {what}; {hint}"
