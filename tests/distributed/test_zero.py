"""The names of the zero namespace: models built sharded, edits, single states, leaves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from zrun_runtime import zero

from . import compare, zero_uses
from .worlds import World

pytestmark = pytest.mark.slow

STAGES = (0, 1, 2, 3)
Worlds = Callable[..., World]


@pytest.mark.parametrize(
    ("stage", "size", "dtype"),
    ((0, 2, ""), (1, 2, "bf16"), (2, 2, ""), (3, 1, ""), (3, 2, ""), (3, 2, "bf16"), (3, 4, ""), (3, 2, "fp16")),
)
def test_a_model_built_in_init_trains_as_one_that_was_not(stage: int, size: int, dtype: str, world: Worlds) -> None:
    results = world(size).run(zero_uses.built_in_init, stage=stage, dtype=dtype, client=not dtype)
    wanted = {"": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}[dtype]
    for found in results:
        assert found["dtypes"] == {wanted, "torch.float32"}, "parameters are cast, buffers are not"
        assert found["shapes"] and found["tied"]
        assert found["start"] == 0.0, "every rank has rank 0's values"
        assert found["end"] <= (1e-6 if not dtype else 1e-2)
        assert found["digest"] == results[0]["digest"]
        if size > 1:
            assert found["full bytes"] == 0
            assert "initialize() first" in found["stray"]


@pytest.mark.parametrize(("stage", "size"), ((2, 2), (3, 2), (3, 1)))
def test_edits_before_initialize_are_kept(stage: int, size: int, world: Worlds) -> None:
    for found in world(size).run(zero_uses.edited_before_initialize, stage=stage):
        assert found["stem"] and found["head"] and found["loaded"] and found["module form"]
        assert "GatheredParameters" in found["outside"] or size == 1
        assert found["outside in place"] or size == 1
        assert "leave GatheredParameters" in found["gathered"] or size == 1
        assert found["end"] <= 1e-6


def test_init_leaves_all_but_parameters_as_they_are(world: Worlds) -> None:
    assert all(world(2).run(zero_uses.constants))


def test_building_never_holds_the_whole_model(world: Worlds) -> None:
    mib = 2**20
    for building, whole in world(4).run(zero_uses.bytes_while_building):
        assert building <= (4 + 3) * mib, "a rank's share, and a layer on its way"
        assert whole <= (4 + 3) * mib, "a rank's share, and two groups"


def test_init_shares_out_over_all_ranks_or_says_no(world: Worlds) -> None:
    for rank, found in enumerate(world(2).run(zero_uses.parts_and_autos)):
        assert "quantized slices are not supported" in found["quantized"]
        assert "zero_param_parallel_group is not supported" in found["within"]
        assert "zero.Init: mpu has a model parallel size of 2" in found["mpu"]
        assert rank or "data_parallel_group is a part of the ranks" in found["group"]
        assert found["dtype"] == "torch.bfloat16", "auto is what the device has"
        assert "remote_device is 'disk'" in found["device"]
        assert found["tiers"] == ["device", "cpu", "cpu", "cpu"]


@pytest.mark.parametrize("apart", (False, True))
@pytest.mark.parametrize("size", (1, 2))
def test_a_model_built_in_host_memory_trains_as_another(size: int, apart: bool, world: Worlds) -> None:
    for far, dtypes in world(size).run(zero_uses.built_on_the_host, apart=apart):
        assert far == 0.0 and dtypes == {"torch.bfloat16"}


@pytest.mark.parametrize("modifier", (None, 0, 1))
@pytest.mark.parametrize("dtype", ("", "bf16"), ids=("fp32", "bf16"))
@pytest.mark.parametrize("stage", STAGES)
def test_edits_of_gathered_parameters_stay(stage: int, dtype: str, modifier: int | None, world: Worlds) -> None:
    results = world(2).run(zero_uses.edits, stage=stage, dtype=dtype, modifier=modifier)
    for found in results:
        assert found["agree"] == [True, True], "the master weights are what was written"
        assert found["filled"]
        assert all(moved < 0.1 for moved in found["moved"]), "the next step starts from the edit"
        assert found["digest"] == results[0]["digest"]


def test_what_cannot_be_gathered_is_told(world: Worlds) -> None:
    for module, other in world(2).run(zero_uses.odd_gatherings):
        assert "give its parameters()" in module
        assert "modifier_rank 2 is no rank: there are 2" in other


@pytest.mark.parametrize("dtype", ("", "bf16"), ids=("fp32", "bf16"))
@pytest.mark.parametrize("stage", STAGES)
def test_edits_in_passing_are_followed_and_gatherings_round_nothing(stage: int, dtype: str, world: Worlds) -> None:
    for found in world(2).run(zero_uses.edits_in_passing, stage=stage, dtype=dtype):
        assert found["kept"]
        if stage < 3:
            assert found["clamped"] < 0.05 and found["near"] < 0.5
            assert found["others"] < 0.1


@pytest.mark.parametrize(("stage", "dtype"), ((0, ""), (1, "bf16"), (2, ""), (3, ""), (3, "fp16"), (0, "bf16")))
def test_single_states_are_what_was_set(stage: int, dtype: str, world: Worlds) -> None:
    results = world(2).run(zero_uses.states, stage=stage, dtype=dtype)
    for found in results:
        assert found["nobody's"] == [None, None] and found["too early"] == [None, None]
        assert "run a step first" in found["no state"]
        for name in ("master", "state", "shown", "local master", "local state"):
            assert found[name], name
        assert found["grad"] == pytest.approx([0.5, 0.5, 0.5 * (24 * 16) ** 0.5])
        assert found["norm"] == pytest.approx(0.5 * (24 * 16) ** 0.5)
        assert found["step"] <= 1e-6
        assert "of shape (16, 24) for (24, 16)" in found["shape"]
    whole = 24 * 16
    assert sum(found["parts"] for found in results) == (whole if stage else 2 * whole)


@pytest.mark.parametrize("stage", (0, 1, 2))
def test_master_values_set_before_the_first_step_keep_their_digits(stage: int, world: Worlds) -> None:
    for dtype in ("bf16", "fp16"):
        assert world(2).run(zero_uses.set_before_the_first_step, stage=stage, dtype=dtype) == [(True, True)] * 2


@pytest.mark.parametrize("how", ("marked", "config"))
def test_ranks_may_use_different_experts_of_a_leaf(how: str, world: Worlds) -> None:
    wanted = world(2).run(zero_uses.experts, stage=0, how="")[0]
    for found in world(2).run(zero_uses.experts, stage=3, how=how):
        assert not compare.each("weight", found, wanted, 1e-6)


@pytest.mark.parametrize("stage", (2, 3))
def test_a_model_outlives_its_engine(stage: int, world: Worlds) -> None:
    for said, same in world(2).run(zero_uses.taken_over, stage=stage):
        assert same
        assert stage < 3 or "call destroy() on that engine first" in said


def test_no_leaf_is_found() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(zero_uses.zrun_runtime.ParameterError, match="no module of the model is Conv2d"):
        zero.set_z3_leaf_modules(model, [torch.nn.Conv2d])
    assert zero.set_z3_leaf_modules(model, ["Conv2d"], raise_if_not_found=False) == []
    assert zero.set_z3_leaf_modules(model, ["Linear", "0"]) == [model[0]]
    assert zero.z3_leaf_module(model[0]) and zero.get_z3_leaf_modules(model) == [model[0]]
    assert zero.unset_z3_leaf_modules(model, ["0"]) == [model[0]] and not zero.get_z3_leaf_modules(model)


def test_leaves_by_path() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert zero.set_z3_leaf_modules_by_name(model, ["1.0"]) == [model[1][0]] == zero.get_z3_leaf_modules(model)
    assert zero.set_z3_leaf_modules_by_suffix(model, [".0"]) == [model[1][0]]
    with pytest.raises(zero_uses.zrun_runtime.ParameterError, match="no module of the model is 2"):
        zero.set_z3_leaf_modules_by_name(model, ["2"])
    with pytest.raises(zero_uses.zrun_runtime.ParameterError, match=r"no module of the model is \.9"):
        zero.set_z3_leaf_modules_by_suffix(model, [".9"])


@pytest.mark.parametrize("stage", (2, 3))
def test_generating_with_the_whole_model_between_steps(stage: int, world: Worlds) -> None:
    for found in world(2).run(zero_uses.generating, stage=stage):
        assert found["same"], "values are full, whatever the order of calls"
        assert found["steps"] == 2


def test_estimates_are_those_of_this_runtime(capsys: pytest.CaptureFixture[str]) -> None:
    """In bytes a parameter: weights 2, master and moments 12, gradients 4 reduced, 2 on their way to the host."""
    billion = 10**9
    two, three = zero.estimate_zero2_model_states_mem_needs, zero.estimate_zero3_model_states_mem_needs

    def near(found: tuple[int, ...], *each: float) -> bool:
        return all(abs(n / billion - e) < 0.03 for n, e in zip(found, each, strict=True))  # beside some buffers

    assert near(two(billion, 4, 2, cpu_offload=True), 4 * 4 * 1.5, 2)  # the model as it is built, on every rank
    assert near(two(billion, 1, 1, cpu_offload=True), 14 * 1.5, 2)
    assert near(two(billion, 4, 2, cpu_offload=False), 4 * 4 * 1.5, 2 + 16 / 8)
    layer = 10**6
    assert near(three(billion, layer, 4, 2), 16 / 2 * 1.5, 0.004, 0.004)
    assert near(three(billion, layer, 4, 2, zero_init=False), 4 * 4 * 1.5, 0.004, 0.004)
    assert near(three(billion, layer, 4, 2, cpu_offload_params=False), 14 / 2 * 1.5, 0.004 + 2 / 8, 0.004)
    assert near(three(billion, layer, 4, 2, cpu_offload=False), 0.02, 0.004 + 18 / 8, 0.004)
    model = torch.nn.Linear(1000, 1000, bias=False)
    zero.estimate_zero2_model_states_mem_needs_all_live(model, 4, 2)
    zero.estimate_zero3_model_states_mem_needs_all_live(model, 4, 2)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3 + 7 and all("GiB" in line for line in (said[1], said[9]))
