"""transformers' Trainer, unchanged, with DeepSpeed configs: against the same run without DeepSpeed, under plain DDP."""

from __future__ import annotations

from typing import Any

import pytest

from .running import case, close, run_cases

pytestmark = pytest.mark.slow

STAGES = (0, 1, 2, 3)
PLAIN = {
    "train": case("train"),
    "accumulate": case("train", gradient_accumulation_steps=2),
    "recompute": case("train", gradient_checkpointing=True),
    "adapter": case("adapter", stage=0),
    "bf16": case("train", bf16=True, use_cpu=True),  # last: transformers 4 leaves that in the environment
}
MINE = [
    *(case("train", stage=stage) for stage in STAGES),
    *(case("train", stage=stage, offload="cpu") for stage in (2, 3)),
    *(case("train", stage=stage, kind=kind) for stage in (2, 3) for kind in ("optimizer", "scheduler", "both")),
    *(case("train", stage=stage, gradient_accumulation_steps=2) for stage in STAGES),
    *(case("train", stage=stage, gradient_checkpointing=True) for stage in (2, 3)),
    *(case("train", stage=stage, bf16=True, use_cpu=True) for stage in (2, 3)),
    *(case("generate", stage=stage) for stage in STAGES),
    *(case("adapter", stage=stage) for stage in STAGES),
    *(case("bad_gradient", stage=stage) for stage in (0, 3)),
    *(case("pretrained", stage=stage) for stage in (2, 3)),
    case("pretrained", stage=3, dtype="bf16"),
    case("memory", stage=3),
    case("from_config", stage=3),
    case("evaluate_only", stage=3),
]
SAVING = [
    *(case("save_model", stage=stage) for stage in STAGES),
    *(case("resume", stage=stage) for stage in (0, 2, 3)),
    case("resume", stage=3, kind="both"),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("plain")
    found = run_cases(directory, "hf_cases.py", list(PLAIN.values()), "--plain", facade=False)
    return {name: found[key] for name, key in PLAIN.items()}


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cases(tmp_path_factory.mktemp("mine"), "hf_cases.py", MINE)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cases(tmp_path_factory.mktemp("saved"), "hf_cases.py", SAVING)


@pytest.mark.parametrize("stage", STAGES)
def test_losses_and_norms_are_those_of_plain_training(stage: int, mine: Any, plain: Any) -> None:
    found = mine[case("train", stage=stage)]
    assert (found["world"], found["rank"]) == (2, 0), "the script says nothing of the CPU, and every rank counts"
    assert len(found["history"]) == 4 + 2
    assert close(found["history"], plain["train"]["history"])


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_holds_its_share(stage: int, mine: Any) -> None:
    share = mine[case("train", stage=stage)]["share"]
    whole, padding = share["model"], 0.05 * share["model"]
    assert share["params"] <= (whole / 2 if stage == 3 else whole) + padding
    assert share["optimizer"] <= 2 * (whole / 2 if stage >= 1 else whole) + 2 * padding


@pytest.mark.parametrize("stage", (2, 3))
def test_offload_changes_no_number(stage: int, mine: Any, plain: Any) -> None:
    assert close(mine[case("train", stage=stage, offload="cpu")]["history"], plain["train"]["history"])


@pytest.mark.parametrize("stage", (2, 3))
def test_optimizers_and_schedulers_of_either_side(stage: int, mine: Any, plain: Any) -> None:
    """The rates that a config's schedule logs are those after the step, so only the other numbers are compared."""
    reference = plain["train"]["history"]
    for kind in ("optimizer", "scheduler", "both"):
        found = mine[case("train", stage=stage, kind=kind)]["history"]
        assert [log["learning_rate"] for log in found if "learning_rate" in log][-1] <= 1e-3
        if kind == "optimizer":  # the schedule is transformers'
            assert close(_without_rates(found), _without_rates(reference))
        assert abs(found[0]["grad_norm"] - reference[0]["grad_norm"]) <= 1e-5
    both, scheduler = (mine[case("train", stage=stage, kind=kind)]["history"] for kind in ("both", "scheduler"))
    assert close(both, scheduler), "the optimizer of the config is the one that transformers would make"


@pytest.mark.parametrize("stage", STAGES)
def test_accumulation(stage: int, mine: Any, plain: Any) -> None:
    found = mine[case("train", stage=stage, gradient_accumulation_steps=2)]["history"]
    assert close(found, plain["accumulate"]["history"])


@pytest.mark.parametrize("stage", (2, 3))
def test_recomputation_and_half_precision(stage: int, mine: Any, plain: Any) -> None:
    assert close(
        mine[case("train", stage=stage, gradient_checkpointing=True)]["history"], plain["recompute"]["history"]
    )
    halved = mine[case("train", stage=stage, bf16=True, use_cpu=True)]["history"]
    assert close(halved, plain["bf16"]["history"], 2e-2)


@pytest.mark.parametrize("stage", STAGES)
def test_generating(stage: int, mine: Any) -> None:
    found, reference = mine[case("generate", stage=stage)], mine[case("generate", stage=0)]
    assert found["tokens"] == found["through the engine"] == reference["tokens"]
    assert abs(found["predicted"] - reference["predicted"]) <= 1e-5


@pytest.mark.parametrize("stage", STAGES)
def test_a_frozen_base_with_an_adapter(stage: int, mine: Any, plain: Any) -> None:
    found = mine[case("adapter", stage=stage)]
    assert close(found["history"], plain["adapter"]["history"])
    assert found["saved"] == 4
    assert all(total > 0.01 for total in found["second matrices"]), "they are zero at first, and were trained"


@pytest.mark.parametrize("stage", (0, 3))
def test_a_skipped_step_does_not_move_the_schedule(stage: int, mine: Any) -> None:
    found = mine[case("bad_gradient", stage=stage)]
    rates = [log["learning_rate"] for log in found["history"]]
    assert found["history"][1]["grad_norm"] == float("inf")
    assert rates[1] == rates[2] != rates[3]
    assert found["schedule"] == 3


@pytest.mark.parametrize("stage", (2, 3))
def test_from_pretrained(stage: int, mine: Any, plain: Any) -> None:
    found = mine[case("pretrained", stage=stage)]
    assert found["sharded"] == (stage == 3)
    assert found["tied"] and found["names"] == 29
    assert close(found["history"], [log for log in plain["train"]["history"] if "loss" in log])


def test_from_pretrained_leaves_a_rank_its_share(mine: Any) -> None:
    found = mine[case("memory", stage=3)]
    assert found["model"] > 70e6
    assert found["used"] <= 0.5 * found["model"] + 15e6


def test_from_pretrained_in_half_precision(mine: Any) -> None:
    found = mine[case("pretrained", stage=3, dtype="bf16")]
    assert found["sharded"] and found["tied"] and found["dtype"] == "torch.bfloat16"


def test_from_config_and_new_tokens(mine: Any) -> None:
    found = mine[case("from_config", stage=3)]
    assert found["shape"] == [103, 32]
    assert all(3.5 < log["loss"] < 5.0 for log in found["history"])


def test_evaluating_a_sharded_model_that_was_never_trained(mine: Any) -> None:
    assert 4.0 < mine[case("evaluate_only", stage=3)]["loss"] < 5.0


@pytest.mark.parametrize("stage", STAGES)
def test_save_model_gives_what_plain_transformers_loads(stage: int, saved: Any) -> None:
    found = saved[case("save_model", stage=stage)]
    assert len(found["names"]) == 28, "tied weights are there once"
    assert found["equal"] and found["tied"]
    assert abs(found["loss"] - found["trainer's"]) <= 1e-5


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_going_on_from_a_checkpoint_changes_nothing(stage: int, saved: Any) -> None:
    _check_resumed(saved[case("resume", stage=stage)])


def test_going_on_with_a_config_that_has_both_optimizer_and_schedule(saved: Any) -> None:
    _check_resumed(saved[case("resume", stage=3, kind="both")])


def _check_resumed(found: Any) -> None:
    assert found["checkpoints"] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert close(found["resumed"], found["whole"], 0.0)
    assert found["consolidated"]
    assert found["best loss"] == found["least"], "the best model was loaded at the end"


def _without_rates(history: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{key: value for key, value in log.items() if key != "learning_rate"} for log in history]
