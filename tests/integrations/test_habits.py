"""What people do with transformers' Trainer beyond a plain run: against the same under plain DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .running import case, close, run_cases

pytestmark = pytest.mark.slow

REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
NOT_REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
ODD = {"train_sampling_strategy": "group_by_length", "label_smoothing_factor": 0.1, **REENTRANT}
ALIKE: dict[str, dict[str, Any]] = {
    "quantized_base": {},
    "best_adapter": {},
    "generate": {},
    "uneven": ODD,
    "own_loss": NOT_REENTRANT,
    "stopped_early": {},
    "one_after_another": {},
    "arguments": {},
    "elsewhere": {"save": True},
}


PLAIN = {name: case(name, stage=0, plain=True, **changes) for name, changes in ALIKE.items()}
MINE = {name: case(name, stage=3, **changes) for name, changes in ALIKE.items()} | {"alone": case("alone")}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("habits")


@pytest.fixture(scope="module")
def found(place: Path) -> dict[str, Any]:
    return run_cases(place, "hf_habits.py", [*PLAIN.values(), *MINE.values()])


@pytest.fixture(scope="module")
def plain(found: Any) -> dict[str, Any]:
    return {name: found[key] for name, key in PLAIN.items()}


@pytest.fixture(scope="module")
def mine(found: Any) -> dict[str, Any]:
    return {name: found[key] for name, key in MINE.items()}


def test_an_adapter_over_a_frozen_base_of_8_bits(mine: Any, plain: Any) -> None:
    """As QLoRA: whole numbers are sharded like anything else that is not trained."""
    assert close(mine["quantized_base"]["history"], plain["quantized_base"]["history"])


def test_the_best_adapter_is_loaded_and_training_goes_on_from_one(mine: Any, plain: Any) -> None:
    found = mine["best_adapter"]
    assert found["loss"] == found["least"]
    assert close(found["whole"], plain["best_adapter"]["whole"])
    assert close(found["resumed"], found["whole"], 0.0)


def test_ranks_generate_by_beams_and_chance_to_lengths_of_their_own(mine: Any, plain: Any) -> None:
    assert mine["generate"] == plain["generate"]


@pytest.mark.parametrize("kind", ("uneven", "own_loss"))
def test_rows_and_numbers_of_rows_that_do_not_come_out_even(kind: str, mine: Any, plain: Any) -> None:
    """Also by length, with smoothed labels, a loss of one's own, and both kinds of recomputation."""
    found, reference = mine[kind], plain[kind]
    assert close(found["history"], reference["history"]) and found["steps"] == reference["steps"] == 12
    assert found["rows"] == [7, 7] and found["predicted"][0] == 5
    assert abs(found["predicted"][1] - reference["predicted"][1]) <= 1e-5


def test_a_run_is_stopped_early_and_keeps_what_it_should(mine: Any, plain: Any) -> None:
    found = mine["stopped_early"]
    assert close(found["history"], plain["stopped_early"]["history"])
    assert found["kept"] == plain["stopped_early"]["kept"] and len(found["kept"]) <= 2
    assert len(found["rows"]) == 2 < 5


def test_trainers_that_take_turns_in_one_process(mine: Any, plain: Any) -> None:
    first, other, again = mine["one_after_another"]["losses"]
    assert first == again != other
    reference = plain["one_after_another"]["losses"]
    assert [*first, *other] == pytest.approx([*reference[0], *reference[1]], abs=1e-5)


def test_a_config_named_on_the_command_line_and_weights_in_several_files(mine: Any, plain: Any) -> None:
    found = mine["arguments"]
    assert found["files"] > 1 and found["sharded"]
    assert found["loss"] == pytest.approx(plain["arguments"]["loss"], abs=1e-3), "in bf16"


def test_sharded_from_pretrained_without_a_trainer(mine: Any) -> None:
    found = mine["alone"]
    assert found["sharded"]
    assert found["losses"][0] == pytest.approx(found["first"], abs=0.1), "four tokens are new"
    assert found["losses"] == sorted(found["losses"], reverse=True)


def test_going_on_with_another_number_of_ranks(mine: Any, place: Path) -> None:
    """Saved by two ranks, two rows each; gone on with by one, with four."""
    key = case("elsewhere", stage=3, per_device_train_batch_size=4)
    alone = run_cases(place, "hf_habits.py", [key], ranks=1)[key]
    assert (mine["elsewhere"]["world"], alone["world"]) == (2, 1)
    assert close(alone["history"], mine["elsewhere"]["history"])
