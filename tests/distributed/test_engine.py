"""The engine as other frameworks drive it: every way to accumulate gives one result; misuse is told; answers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from . import compare, engine_uses
from .worlds import World

pytestmark = pytest.mark.slow

STAGES = (0, 1, 2, 3)
WAYS = ("plain", "forced", "no_sync", "no_sync plain", "coalesced", "unmanaged", "resized")
Worlds = Callable[..., World]


@pytest.mark.parametrize("dtype", ("", "bf16", "fp16"), ids=("fp32", "bf16", "fp16"))
@pytest.mark.parametrize("stage", STAGES)
def test_every_way_to_accumulate_comes_to_the_same(stage: int, dtype: str, world: Worlds) -> None:
    wanted = world(2).run(engine_uses.ways_to_accumulate, stage=stage, way="counted", dtype=dtype)
    for way in WAYS if not dtype else ("no_sync plain", "coalesced"):
        found = world(2).run(engine_uses.ways_to_accumulate, stage=stage, way=way, dtype=dtype)
        assert found[0]["digest"] == found[1]["digest"]
        limit = 1e-6 if not dtype else 2e-3
        assert not compare.each(f"{way}: weight", found[0]["weights"], wanted[0]["weights"], limit)
        assert found[0]["norm"] == pytest.approx(wanted[0]["norm"], rel=1e-5 if not dtype else 1e-2)
        assert found[0]["steps"] == (3, 0)
        assert found[0]["samples"] == (3 * 4 * 2 * (4 if way in ("plain", "resized", "unmanaged") else 1))
        assert found[0]["grads"] == 0
        groups = wanted[0]["calls"][-1] // (4 if stage >= 2 else 1)
        once = way in ("no_sync", "no_sync plain", "coalesced") or stage < 2
        assert found[0]["calls"][-1] == groups * (1 if once else 4), f"{way} reduces more often than it should"


@pytest.mark.parametrize("stage", STAGES)
def test_misuse_is_told_and_does_no_harm(stage: int, world: Worlds) -> None:
    for said in world(2).run(engine_uses.refusals, stage=stage):
        assert "no_sync" in said["step"]
        assert "already inside" in said["nested"]
        assert "engine.scale(loss)" in said["fp16"]
        assert "managed_gradient_accumulation" in said["boundary"] and "managed" in said["coalesce"]
        assert "not a multiple of 4 (micro batch) x 2 (ranks)" in said["batch"]
        assert said["trains fp32"] == said["trains fp16"] == "True"
        assert "backward: this engine was destroyed" in said["gone"] and "step: this engine" in said["gone"]


@pytest.mark.parametrize("stage", STAGES)
def test_answers(stage: int, world: Worlds) -> None:
    for rank, found in enumerate(world(2).run(engine_uses.answers, stage=stage)):
        assert found["get_lr"] == [0.05] and found["get_mom"] == [0.9] and found["get_type"] == ["SGD"]
        assert found["get_batch_info"] == (16, 4, 2)
        assert found["sizes"] == [(16, 4, 2), (32, 8, 2), (48, 8, 3)]
        assert found["optimizer_name"] == "SGD" and found["scheduler_name"] is None
        assert found["zero_optimization_stage"] == found["config"] == stage
        assert found["zero_optimization"] == (stage > 0)
        assert found["zero_optimization_partition_gradients"] == (stage > 1)
        assert found["zero_optimization_partition_weights"] == (stage > 2)
        assert found["zero_offload_param"] is None and not found["zero_gather_16bit_weights_on_model_save"]
        assert found["get_data_types"] == (torch.float32, torch.float32)
        assert found["loss_scale"] == 1.0 and not found["dynamic_loss_scale"]
        assert not found["was_step_applied"] and found["get_global_grad_norm"] is None
        assert not found["is_gradient_accumulation_boundary"]
        assert found["zero_overlap_comm"] is None and found["zero_prefetch_bucket_size"] == 50_000_000
        assert not found["zero_cpu_offload"] and not found["zero_has_nvme_offload"]
        assert not found["torch_autocast_enabled"] and found["torch_autocast_dtype"] is None
        assert not found["prescale_gradients"] and not found["curriculum_enabled_legacy"]
        assert found["named"] and found["average"] and found["none"] == (None, None) and found["group"] == 2
        ranks = [found[name] for name in ("global_rank", "local_rank", "world_size", "dp_world_size", "mp_world_size")]
        assert ranks == [rank, rank, 2, 2, 1]


@pytest.mark.parametrize("stage", (0, 3))
def test_a_new_number_of_micro_batches_counts_from_the_last_update(stage: int, world: Worlds) -> None:
    wanted = [True] * 3 + [False, True] * 3
    assert world(2).run(engine_uses.window_after_resize, stage=stage) == [wanted] * 2


@pytest.mark.parametrize("dtype", ("", "bf16"), ids=("fp32", "bf16"))
@pytest.mark.parametrize("stage", STAGES)
def test_loaded_weights_are_where_training_goes_on(stage: int, dtype: str, world: Worlds) -> None:
    for found in world(2).run(engine_uses.loaded, stage=stage, dtype=dtype, only_rank_0=bool(dtype)):
        assert found["equal"]
        assert 0 < found["moved"] < 0.2
        assert "does not fit" in found["said"]
        assert not found["names"] or found["names"][0] == "net.stem.weight"


@pytest.mark.parametrize("stage", STAGES)
def test_weights_loaded_between_forward_and_backward_are_never_lost(stage: int, world: Worlds) -> None:
    for said in world(2).run(engine_uses.loads_between_forward_and_backward, stage=stage):
        assert "no error" not in said


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_compile_trains_the_same_or_says_why_not(stage: int, world: Worlds) -> None:
    for said, same in world(2).run(engine_uses.compiled, stage=stage):
        assert same
        assert ("no error" in said) == (stage < 3)
        assert stage < 3 or "compile the blocks" in said


DECAY = {"lr": 0.01, "weight_decay": 0.1}
OPTIMIZERS = {
    "Adam": ("Adam", DECAY),
    "Adam, coupled": ("Adam", {**DECAY, "adam_w_mode": False}),
    "AdamW": ("AdamW", DECAY),
    "Adam of torch": ("Adam", {"lr": 0.01, "torch_adam": True}),
    **{name: (name, DECAY) for name in ("SGD", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Lion", "Lamb")},
    "ASGD": ("ASGD", {"lr": 0.01}),
    "Adadelta": ("Adadelta", {"lr": 0.5}),
    "Rprop": ("Rprop", {"lr": 1e-3, "etas": [0.5, 1.2]}),
    "lamb, clamped": ("lamb", {**DECAY, "max_coeff": 0.7, "min_coeff": 0.1}),
}
KIND = {"Adam": "AdamW", "Adam, coupled": "Adam", "Adam of torch": "AdamW", "lamb, clamped": "Lamb"}


@pytest.mark.parametrize(("stage", "size"), ((0, 2), (1, 2), (2, 2), (3, 2), (3, 4)))
def test_optimizers_of_a_config_are_those_of_torch(stage: int, size: int, world: Worlds) -> None:
    few = ("AdamW", "Lion", "Lamb", "lamb, clamped")
    kinds = OPTIMIZERS if size == 2 else {label: OPTIMIZERS[label] for label in few}
    for found in world(size).run(engine_uses.optimizers_against_torch, stage=stage, kinds=kinds):
        for label, (kind, far) in found.items():
            assert kind == KIND.get(label, label)
            assert far < 1e-2 if kind == "Lion" else far < 2e-5, f"{label} is {far} away"


@pytest.mark.parametrize("stage", (0, 3))
def test_optimizers_and_schedules_of_the_client(stage: int, world: Worlds) -> None:
    for found in world(2).run(engine_uses.clients, stage=stage):
        assert found["rates"] == pytest.approx([0.1 / 2, 0.1 / 3, 0.1 / 4])
        assert found["same"] and found["mine"]
        assert found["plateau"] == [0.1, 0.1, 0.05, 0.05, 0.025], "a measure is the program's to give"
        assert found["moved"] == {"bias"}
        assert "LBFGS" in found["refused"] and "use AdamW" in found["refused"]


@pytest.mark.parametrize("on_cpu", (False, True))
@pytest.mark.parametrize("stage", (0, 3))
def test_checkpointed_blocks_train_the_same(stage: int, on_cpu: bool, world: Worlds) -> None:
    assert world(2).run(engine_uses.checkpointed, stage=stage, on_cpu=on_cpu) == pytest.approx([0.0, 0.0], abs=1e-7)
