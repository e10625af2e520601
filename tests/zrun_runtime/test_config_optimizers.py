"""The sections optimizer and scheduler: types, arguments, what is refused; held against torch's own classes."""

import inspect

import pytest
import torch

from zrun_runtime import schedules
from zrun_runtime.config import AutoHints, InvalidConfig, load_config, optimizers, schedulers
from zrun_runtime.optimizers import OWN


def built(kind, **params):
    return load_config({"optimizer": {"type": kind, "params": params}}).optimizer


def problems(section, kind, **params):
    with pytest.raises(InvalidConfig) as caught:
        load_config({section: {"type": kind, "params": params}})
    return {problem.path: problem.text for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [
        ("Adam", {}, "AdamW"),
        ("adam", {"adam_w_mode": True}, "AdamW"),
        ("Adam", {"adam_w_mode": False}, "Adam"),
        ("AdamW", {"adam_w_mode": False}, "AdamW"),
        ("ADAMW", {}, "AdamW"),
        ("Adam", {"torch_adam": True}, "AdamW"),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, "Adam"),
        ("sgd", {}, "SGD"),
        ("adagrad", {}, "Adagrad"),
    ],
)
def test_which_class_a_type_is(kind, params, expected):
    assert built(kind, **params).type == expected


def test_weight_decay_is_that_of_the_field_unless_torchs_is_asked_for():
    assert built("AdamW").params["weight_decay"] == 0.0
    assert built("AdamW", torch_adam=True).params["weight_decay"] == 0.01
    assert built("AdamW", torch_adam=True, weight_decay=0.2).params["weight_decay"] == 0.2


def test_numbers_that_a_template_left_as_text():
    assert built("Adam", lr="0.0001", betas=["0.8", 0.99], weight_decay="0.1").params == {
        "lr": 1e-4,
        "betas": (0.8, 0.99),
        "eps": 1e-8,
        "weight_decay": 0.1,
    }


@pytest.mark.parametrize("kind", optimizers.OPTIMIZERS)
def test_every_argument_is_one_that_the_class_takes(kind):
    factory = OWN.get(kind) or getattr(torch.optim, kind)
    taken = inspect.signature(factory).parameters
    assert set(optimizers.OPTIMIZERS[kind]) <= set(taken)
    found = built(kind)
    weights = torch.ones(2, requires_grad=True)
    optimizer = (OWN.get(found.type) or getattr(torch.optim, found.type))([weights], **found.params)
    assert optimizer.defaults["lr"] == factory([weights]).defaults["lr"]


@pytest.mark.parametrize(
    "kind", ["OneBitAdam", "OneBitLamb", "ZeroOneAdam", "Muon", "Adafactor", "LBFGS", "SparseAdam"]
)
def test_types_that_are_refused_say_what_to_use(kind):
    assert ": use " in problems("optimizer", kind)["optimizer.type"]


@pytest.mark.parametrize(
    ("kind", "near"),
    [
        *[("AdmW", "AdamW"), ("adamw_torch_fused", "AdamW"), ("SDG", "SGD")],
        *[("FusedAdam", "Adam"), ("DeepSpeedCPUAdam", "Adam"), ("PagedAdamW8bit", "AdamW")],
    ],
)
def test_a_misspelt_type(kind, near):
    assert f"did you mean {near}?" in problems("optimizer", kind)["optimizer.type"]
    assert "there are AdamW" in problems("optimizer", "Whatever")["optimizer.type"]


@pytest.mark.parametrize(
    ("params", "path"),
    [
        ({"lr": -1}, "lr"),
        ({"lr": "fast"}, "lr"),
        ({"lr": None}, "lr"),
        ({"betas": 0.9}, "betas"),
        ({"betas": [0.9, 1.0]}, "betas"),
        ({"betas": [0.9]}, "betas"),
        ({"amsgrad": 1}, "amsgrad"),
        ({"adam_w_mode": "yes"}, "adam_w_mode"),
        ({"bias_correction": False}, "bias_correction"),
        ({"weight_decy": 0.1}, "weight_decy"),
        ({"momentum": 0.9}, "momentum"),
    ],
)
def test_arguments_that_make_no_sense(params, path):
    assert f"optimizer.params.{path}" in problems("optimizer", "AdamW", **params)


def test_what_only_chooses_a_form_has_no_effect():
    config = load_config({"optimizer": {"type": "AdamW", "params": {"fused": True, "foreach": False}}})
    assert not {"fused", "foreach"} & set(config.optimizer.params)
    assert {note.path for note in config.notes if note.kind == "no_effect"} == {
        "optimizer.params.fused",
        "optimizer.params.foreach",
    }


# ---- schedules ---------------------------------------------------------------------------------------


def scheduled(kind, total_steps=None, **params):
    source = {"scheduler": {"type": kind, "params": params}}
    return load_config(source, auto=AutoHints(total_steps=total_steps)).scheduler


@pytest.mark.parametrize("kind", schedulers.SCHEDULERS)
def test_the_arguments_are_those_of_the_classes(kind):
    taken = inspect.signature(schedules.SCHEDULES[kind]).parameters
    assert set(schedulers.SCHEDULERS[kind]) == set(taken) - {"optimizer"}
    for name, item in schedulers.SCHEDULERS[kind].items():
        assert item.required == (taken[name].default is inspect.Parameter.empty)
        if item.has_default:
            assert item.default == taken[name].default


def test_there_are_five_and_those_of_torch():
    assert set(schedulers.SCHEDULERS) == set(schedules.SCHEDULES)
    assert scheduled("warmuplr").type == "WarmupLR"
    assert scheduled("StepLR", step_size=3).params == {"step_size": 3}
    assert "did you mean WarmupLR?" in problems("scheduler", "WarmpLR")["scheduler.type"]
    for kind, known in schedulers.TORCH_SCHEDULERS.items():
        factory = getattr(torch.optim.lr_scheduler, kind)
        assert issubclass(factory, torch.optim.lr_scheduler.LRScheduler)
        taken = dict(inspect.signature(factory).parameters)
        del taken["optimizer"]
        taken.pop("scale_fn", None)
        assert set(known) == set(taken)
        assert all(item.required == (taken[name].default is inspect.Parameter.empty) for name, item in known.items())


@pytest.mark.parametrize("kind", ["LambdaLR", "SequentialLR", "ReduceLROnPlateau"])
def test_a_schedule_that_json_cannot_hold_is_the_programs(kind):
    assert "initialize(lr_scheduler=...)" in problems("scheduler", kind)["scheduler.type"]


@pytest.mark.parametrize(
    ("kind", "params", "path"),
    [
        ("StepLR", {"step_size": [2]}, "step_size"),
        ("StepLR", {"step_sise": 2}, "step_sise"),
        ("StepLR", {}, "step_size"),
        ("CosineAnnealingLR", {"T_max": 5, "eta_min": {}}, "eta_min"),
        ("MultiStepLR", {"milestones": 5}, "milestones"),
        ("MultiStepLR", {"milestones": [1, "x"]}, "milestones"),
    ],
)
def test_arguments_of_a_torch_schedule_that_make_no_sense(kind, params, path):
    assert f"scheduler.params.{path}" in problems("scheduler", kind, **params)


def test_a_length_that_is_missing_is_asked_for_unless_the_program_knows_it():
    assert "is missing" in problems("scheduler", "WarmupDecayLR")["scheduler.params.total_num_steps"]
    assert scheduled("WarmupCosineLR", total_steps=70).params["total_num_steps"] == 70
    assert set(problems("scheduler", "OneCycle")) == {"scheduler.params.cycle_min_lr", "scheduler.params.cycle_max_lr"}


def test_which_rate_a_warm_up_ends_at_is_told():
    told = {n.path: n.text for n in load_config({"scheduler": {"type": "WarmupLR"}}).notes}
    assert "optimizer's learning rate" in told["scheduler.params.warmup_max_lr"]
    source = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}}
    told = {n.path: n.text for n in load_config(source).notes}
    assert "0.001, which overrides" in told["scheduler.params.warmup_max_lr"]
    assert "at once" in told["scheduler.params.warmup_num_steps"]


@pytest.mark.parametrize(
    ("params", "path"),
    [
        ({"warmup_num_steps": -1}, "warmup_num_steps"),
        ({"warmup_num_steps": 1.5}, "warmup_num_steps"),
        ({"warmup_type": "cubic"}, "warmup_type"),
        ({"warmup_min_lr": "low"}, "warmup_min_lr"),
        ({"warmup_steps": 5}, "warmup_steps"),
        ({"total_num_steps": 5}, "total_num_steps"),
    ],
)
def test_arguments_of_a_schedule_that_make_no_sense(params, path):
    assert f"scheduler.params.{path}" in problems("scheduler", "WarmupLR", **params)


def test_one_rate_for_each_group():
    assert scheduled("WarmupLR", warmup_max_lr=[1, "2e-1"]).params["warmup_max_lr"] == [1.0, 0.2]
