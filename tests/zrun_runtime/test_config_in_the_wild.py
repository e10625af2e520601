"""What is unusual in configs that people publish, a small one of each kind: what it leads to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zrun_runtime.config import AutoHints, Config, InvalidConfig, load_config
from zrun_runtime.errors import ConfigError

ADAM = {"type": "Adam"}
KNOWN = AutoHints(hidden_size=64, device="cpu", bf16_supported=True, learning_rate=0.1, total_steps=50)


def read(source: Any, **options: Any) -> Config:
    return load_config(source, **{"auto": KNOWN, **options})


TOTAL, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("source", "world", "sizes"),
    [
        ({TOTAL: 2048, MICRO: 16}, 8, (2048, 16, 16)),
        ({TOTAL: "auto", MICRO: 1, STEPS: 8}, 2, (16, 1, 8)),
        ({TOTAL: "auto", MICRO: "auto", STEPS: 2}, 2, (4, 1, 2)),
        ({MICRO: "auto", STEPS: 4}, 1, (4, 1, 4)),
        ({TOTAL: 20000, MICRO: 20, STEPS: 100}, None, (20000, 20, 100)),
        ({}, 4, (4, 1, 1)),
    ],
)
def test_batch_sizes(source: dict[str, Any], world: int | None, sizes: tuple[int, int, int]) -> None:
    config = read(source, world_size=world)
    assert (config.train_batch_size, config.micro_batch_size, config.accumulation_steps) == sizes


def test_three_sizes_that_fit_another_number_of_ranks_are_refused_with_the_numbers() -> None:
    source = {TOTAL: 80, MICRO: 16, STEPS: 5}
    assert read(source).world_size == 1
    with pytest.raises(InvalidConfig, match=r"16 \* 5 \* 2 is 160, not 80; set train_batch_size to 160"):
        read(source, world_size=2)


def test_every_auto_of_a_trainers_template() -> None:
    config = read(
        {
            **dict.fromkeys((TOTAL, MICRO, STEPS), "auto"),
            "gradient_clipping": "auto",
            "fp16": {"enabled": "auto", "loss_scale": 0},
            "bf16": {"enabled": "auto"},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
            },
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {
                    **dict.fromkeys(("total_num_steps", "warmup_max_lr", "warmup_num_steps"), "auto"),
                    "warmup_min_lr": 0,
                },
            },
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "none"},
                "offload_param": {"device": "none", "buffer_size": "auto"},
                "sub_group_size": 1e9,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
                "stage3_gather_16bit_weights_on_model_save": "auto",
            },
        }
    )
    assert config.precision == "bf16" and config.gradient_clipping == 1.0
    assert config.optimizer is not None and config.optimizer.params["lr"] == 0.1
    assert config.scheduler is not None
    assert config.scheduler.params["total_num_steps"] == 50 and config.scheduler.params["warmup_max_lr"] is None
    zero = config.zero
    assert (zero.reduce_bucket_size, zero.prefetch_bucket_size, zero.param_persistence_threshold) == (4096, 3686, 640)
    assert not zero.gather_16bit_weights_on_model_save and zero.offload_param.buffer_size == 100_000_000


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_auto_sizes_are_the_same_at_every_stage(stage: int) -> None:
    zero = read(
        {"zero_optimization": {"stage": stage, "reduce_bucket_size": "auto", "allgather_bucket_size": "auto"}}
    ).zero
    assert zero.reduce_bucket_size == zero.allgather_bucket_size == 4096


@pytest.mark.parametrize(
    "source",
    [
        {"optimizer": ADAM},
        {"optimizer": {"type": "Adam", "params": {"lr": 1}}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": "auto"}}},
        {"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 1e9, "offload_param": {"device": "cpu"}}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none", "nvme_path": None}}},
        {"pipeline": {"pipe_partitioned": True}, "zero_optimization": {"stage": 1}},
        {"zero_optimization": {"stage": 3, "mics_shard_size": -1, "zero_hpz_partition_size": 1}},
        {"bf16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}},
        {"communication_data_type": "fp16", "prescale_gradients": False},
        {"steps_per_print": 1e9, "wall_clock_breakdown": "false"},
    ],
)
def test_taken_without_a_warning(source: dict[str, Any]) -> None:
    assert not [note for note in read(source, strict=True).notes if note.kind == "unknown"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"zero_optimization": {"stage": [0, 1, 2, 3]}}, "a list is for trial runs"),
        ({"optimizer": {"type": "OneBitLamb", "params": {"factor_threshold": 0.1}}}, "compressed gradients"),
        ({"optimizer": {"type": "adamw_torch_fused"}}, "did you mean AdamW"),
        ({"amp": {"enabled": True, "opt_level": "O1"}}, "Apex is not supported"),
        ({"curriculum_learning": {"enabled": True, "curriculum_type": "seqlen"}}, "do it in the data loader"),
        ({"fp16": {"enabled": True, "fp16_auto_cast": True}}, "did you mean auto_cast"),
        ({"scheduler": {"type": "WarmupCosineLR"}}, "cannot do without it"),
    ],
)
def test_refused_with_what_to_do(source: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        load_config(source)


@pytest.mark.parametrize(
    "name", ["find_unused_parameters", "stage3_something_new"], ids=["of another framework", "of a newer version"]
)
def test_a_foreign_key_of_zero_is_a_warning(name: str) -> None:
    notes = read({"zero_optimization": {"stage": 2, name: True}}).notes
    assert [note.path for note in notes if note.kind == "unknown"] == [f"zero_optimization.{name}"]


ACCELERATE = """
compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 16
  gradient_clipping: auto
  offload_optimizer_device: none
  zero3_init_flag: {quoted}false{quoted}
  zero3_save_16bit_model: auto
  zero_stage: {stage}
distributed_type: {quoted}DEEPSPEED{quoted}
fsdp_config: {{}}
machine_rank: 0
mixed_precision: bf16
use_cpu: {quoted}false{quoted}
"""


@pytest.mark.parametrize("quoted", ["", "'"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_accelerates_files(stage: int, quoted: str, tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(ACCELERATE.format(stage=stage, quoted=quoted))
    config = read(path)
    assert (config.zero.stage, config.precision, config.accumulation_steps) == (stage, "bf16", 16)
    assert config.gradient_clipping == 1.0


def test_accelerates_file_with_a_config_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text("distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: /path/to/placeholder\n")
    with pytest.raises(ConfigError, match="deepspeed_config_file: no such config file: /path/to/placeholder"):
        read(path)
