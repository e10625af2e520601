"""The section optimizer: which types there are, and what arguments they take."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

from zrun_runtime.config.arguments import (
    Argument,
    argument,
    flag,
    number,
    pair,
    read_arguments,
)
from zrun_runtime.config.names import nearest
from zrun_runtime.config.notes import Ledger
from zrun_runtime.config.resolved import OptimizerConfig
from zrun_runtime.config.schema import OptimizerSection

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
        "maximize": Argument(flag),
    },
    "RMSprop": {
        "lr": argument(number(), 1e-2),
        "alpha": Argument(number()),
        "eps": _EPS,
        "weight_decay": _DECAY,
        "momentum": Argument(number()),
        "centered": Argument(flag),
        "maximize": Argument(flag),
    },
    "Adamax": {
        "lr": argument(number(), 2e-3),
        "betas": _BETAS,
        "eps": _EPS,
        "weight_decay": _DECAY,
        "maximize": Argument(flag),
    },
    "NAdam": {
        "lr": argument(number(), 2e-3),
        "betas": _BETAS,
        "eps": _EPS,
        "weight_decay": _DECAY,
        "momentum_decay": Argument(number()),
        "decoupled_weight_decay": Argument(flag),
        "maximize": Argument(flag),
    },
    "RAdam": {
        "lr": _RATE,
        "betas": _BETAS,
        "eps": _EPS,
        "weight_decay": _DECAY,
        "decoupled_weight_decay": Argument(flag),
        "maximize": Argument(flag),
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
        "alpha": Argument(number(0, 10)),
        "t0": Argument(number()),
        "weight_decay": _DECAY,
        "maximize": Argument(flag),
    },
    "Adadelta": {
        "lr": argument(number(), 1.0),
        "rho": Argument(number(0, 1)),
        "eps": _EPS,
        "weight_decay": _DECAY,
        "maximize": Argument(flag),
    },
    "Rprop": {
        "lr": argument(number(), 1e-2),
        "etas": Argument(pair(0, math.inf)),
        "step_sizes": Argument(pair(0, math.inf)),
        "maximize": Argument(flag),
    },
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
    name = known_name(section.type, OPTIMIZERS)
    if name is None:
        ledger.problem("optimizer.type", unknown_name("optimizer", section.type, OPTIMIZERS))
        return None
    given = dict(section.params)
    for other in _CHOSEN_HERE:
        if other in given:
            ledger.note(f"{_PARAMS}.{other}", "no_effect", "the fastest exact form is chosen here", given.pop(other))
    if name in ("Adam", "AdamW"):
        name = _adam_kind(name, given, ledger)
    params = read_arguments(section.type, given, OPTIMIZERS[name], _PARAMS, ledger)
    ledger.note("optimizer.type", "honoured", _about_type(section.type, name), name)
    tell_of_arguments(_PARAMS, params, section.params, ledger)
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


def tell_of_arguments(path: str, params: dict[str, Any], given: dict[str, Any], ledger: Ledger) -> None:
    """A note for each argument: given, or a default."""
    for name, value in params.items():
        place = f"{path}.{name}"
        if ledger.has_note(place):
            continue
        if name in given:
            ledger.note(place, "honoured", "as given", value)
        elif value is not None:
            ledger.note(place, "assumed", "not given: its default", value)


def known_name(name: str, names: Iterable[str]) -> str | None:
    """The one of these that `name` is, whatever its case."""
    return next((known for known in names if known.lower() == name.lower()), None)


def unknown_name(what: str, name: str, known: Collection[str]) -> str:
    """What to say of a type that there is not."""
    inside = [item for item in known if item.lower() in name.lower()]  # FusedAdam, adamw_torch_fused
    near = nearest(name, known) or max(inside, key=len, default=None)
    hint = f"did you mean {near}?" if near else f"there are {', '.join(known)}"
    return f"{name} is not a known {what}; {hint}"
