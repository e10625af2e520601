"""TRL's trainers, unchanged, against the same runs without DeepSpeed: `make test-trainers` starts them."""

from __future__ import annotations

from typing import Any

import pytest

from .running import case, close, run_cases

PLAIN = {
    "sft": case("sft", stage=0, plain=True),
    "adapter": case("sft", stage=0, plain=True, adapter=True),
    "dpo": case("dpo", stage=0, plain=True),
    "grpo": case("grpo", stage=0, plain=True),
}
MINE = {
    **{("sft", stage): case("sft", stage=stage) for stage in (0, 1, 2, 3)},
    **{("adapter", stage): case("sft", stage=stage, adapter=True) for stage in (2, 3)},
    **{("dpo", stage): case("dpo", stage=stage) for stage in (2, 3)},
    **{("grpo", stage): case("grpo", stage=stage) for stage in (2, 3)},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cases(tmp_path_factory.mktemp("trl"), "trl_cases.py", [*PLAIN.values(), *MINE.values()])


@pytest.mark.parametrize(("kind", "stage"), MINE)
def test_losses_and_norms_are_those_of_plain_training(kind: str, stage: int, found: Any) -> None:
    mine, plain = found[MINE[kind, stage]], found[PLAIN[kind]]
    assert len(mine["history"]) >= 2 and mine["history"][0]["grad_norm"] > 0.01
    assert close(mine["history"], plain["history"])
    assert mine.get("saved") == plain.get("saved")
