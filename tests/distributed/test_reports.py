"""What users of runtimes like this one have reported as broken, and what has to happen instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from . import report_uses
from .worlds import World

pytestmark = pytest.mark.slow

STAGES = (0, 1, 2, 3)
Worlds = Callable[..., World]


@pytest.mark.parametrize("stage", (0, 3))
def test_what_the_program_passes_goes_before_the_config_and_is_told(stage: int, world: Worlds) -> None:
    for rank, found in enumerate(world(2).run(report_uses.schedules, stage=stage)):
        assert found["kind"] == "LambdaLR"
        assert found["rate"] == [1e-5] and found["applied"] <= 1e-7
        for line in ("scheduler.type WarmupLR: not used", "optimizer.type SGD: not used"):
            assert found["said"].count(line) == (rank == 0)


@pytest.mark.parametrize(("how", "told", "count"), [("every time", 1, 6), ("never", 0, 3), ("restored", 0, 51)])
def test_a_schedule_that_the_program_steps_too_is_told_once(how: str, told: int, count: int, world: Worlds) -> None:
    for rank, (said, at) in enumerate(world(2).run(report_uses.stepped_twice, stage=2, how=how)):
        assert said.count("goes twice as fast") == (told if rank == 0 else 0)
        assert at == count


def test_an_overflow_says_what_it_changed(world: Worlds) -> None:
    first, other = world(2).run(report_uses.overflow_in_words)
    assert "loss scale stays 16; hysteresis 2 -> 1" in first
    assert first.index("loss scale 16 -> 8") < first.index("loss scale 8 -> 4")
    assert "step 3 skipped on every rank: a gradient is not finite (3 skipped so far)" in first
    assert not other


@pytest.mark.parametrize("stage", STAGES)
def test_the_engine_divides_and_a_tail_is_carried_over(stage: int, world: Worlds) -> None:
    for rank, found in enumerate(world(2).run(report_uses.accumulation, stage=stage)):
        assert found["steps"] == 2 and found["far"] <= 1e-6
        assert found["tail"][0] == 3 and found["tail"][1] <= 1e-6
        said, steps, boundary = found["rare"]
        assert steps == 0 and not boundary
        assert said.count("step() was called once after 4 backwards") == (rank == 0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_from_a_vector(stage: int, world: Worlds) -> None:
    assert all(far <= 1e-6 for far in world(2).run(report_uses.vector_backward, stage=stage))


@pytest.mark.parametrize("uneven", (False, True), ids=("even", "uneven"))
@pytest.mark.parametrize("stage", STAGES)
def test_branches_that_some_steps_skip(stage: int, uneven: bool, world: Worlds) -> None:
    for found in world(2).run(report_uses.branches, stage=stage, uneven=uneven):
        assert found["far"] <= 1e-6
        assert found["rest"] == 1, "nothing that was fetched ahead stays"


@pytest.mark.parametrize("stage", STAGES)
def test_each_rank_has_an_order_of_gradients_of_its_own(stage: int, world: Worlds) -> None:
    assert all(far <= 1e-6 for far in world(2).run(report_uses.orders, stage=stage))


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_checkpoints_drop_what_the_forward_dropped(stage: int, world: Worlds) -> None:
    assert all(max(far) <= 1e-6 for far in world(2).run(report_uses.dropouts, stage=stage))


@pytest.mark.parametrize("stage", STAGES)
def test_three_elements_on_four_ranks(stage: int, world: Worlds) -> None:
    assert all(far <= 1e-6 for far in world(4).run(report_uses.tiny, stage=stage))


@pytest.mark.parametrize("stage", STAGES)
def test_buffers_keep_their_types_and_the_state_dict_its_names(stage: int, world: Worlds) -> None:
    for rank, found in enumerate(world(2).run(report_uses.buffers, stage=stage)):
        assert found["angles"] and found["back"]
        if stage == 3 and rank:
            assert not found["dtypes"]
            continue
        assert found["dtypes"] == {
            **dict.fromkeys(("linear.weight", "linear.bias"), "torch.bfloat16"),
            **dict.fromkeys(("norm.running_mean", "norm.running_var", "angles"), "torch.float32"),
            **dict.fromkeys(("norm.num_batches_tracked", "counts"), "torch.int64"),
        }


@pytest.mark.parametrize("accumulation", (1, 3))
@pytest.mark.parametrize("stages", ((1, 3), (3, 2), (0, 3)))
def test_two_engines_under_one_loss(stages: tuple[int, int], accumulation: int, world: Worlds) -> None:
    for found in world(2).run(report_uses.two_engines, stages=stages, accumulation=accumulation):
        assert max(found["far"]) <= 1e-6
        assert found["steps"] == 3


def test_the_loader_gives_each_rank_its_own_micro_batches(world: Worlds) -> None:
    (length, sizes, mine), (_, _, others) = world(2).run(report_uses.loader)
    assert length == 40 and sizes == {3}
    assert not mine & others and mine | others == set(range(240))


def test_a_rank_with_more_batches_is_told_within_the_time_out() -> None:
    own = World(2)  # with a time-out of its own
    results = own.run(report_uses.uneven_batches, stage=3, timeout=60, last=True)
    assert results[0][0] == ""
    kind, said = results[1]
    assert kind == "RanksDivergedError"
    assert "rank 1 waited for rank 0 at " in said and "<- behind" in said


@pytest.mark.parametrize("drop_last", (False, True))
def test_epochs_of_the_loader(drop_last: bool, world: Worlds) -> None:
    results = world(2).run(report_uses.epochs, drop_last=drop_last)
    for epoch in range(3):
        shares = [[item for batch in found["seen"][epoch] for item in batch] for found in results]
        everything = sorted(shares[0] + shares[1])
        if drop_last:
            assert len(everything) == len(set(everything)) == 20, "ten micro-batches of two, nothing twice"
        else:
            assert set(everything) == set(range(23)) and len(everything) == 24, "one item twice, none left out"
    for found in results:
        assert found["seen"][0] == found["seen"][2] != found["seen"][1], "set_epoch alone decides the order"
        assert {len(found["seen"][epoch]) for epoch in range(3)} == {found["length"]} == {5 if drop_last else 6}


def test_monitors_get_every_step_from_rank_0(world: Worlds, tmp_path: Path) -> None:
    (mine, loss, samples, said), (other, _, _, nothing) = world(2).run(report_uses.monitored, folder=str(tmp_path))
    assert mine and not other and samples == 3 * 4 * 2 * 2
    rows = {path.stem: path.read_text().splitlines() for path in (tmp_path / "run").iterdir()}
    times = [f"elapsed_time_ms_{part}" for part in ("forward", "backward", "step")]
    names = ("train_loss", "lr", "grad_norm", "loss_scale", *times)
    assert set(rows) == {f"Train_Samples_{name}" for name in names} | {"Mine_best"}
    assert all(float(row.split(",")[1]) > 0 for name in times for row in rows[f"Train_Samples_{name}"][1:])
    (line,) = said
    assert re.search(r"step 2 took [\d.]+ ms on rank 0: forward [\d.]+ ms, backward [\d.]+ ms, step [\d.]+ ms$", line)
    assert not nothing
    assert [row.split(",")[0] for row in rows["Train_Samples_lr"]] == ["step", "16", "32", "48"]
    assert float(rows["Train_Samples_train_loss"][-1].split(",")[1]) == loss
    assert len(rows["Train_Samples_grad_norm"]) == 3, "a skipped step has none"
    assert rows["Mine_best"] == ["step,best", "48,1.5"]
