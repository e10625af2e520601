""" "auto": what it becomes, and what is refused because nothing decides it."""

import pytest

from zrun_runtime.config import AutoHints, InvalidConfig, load_config

SIZES = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sizes_follow_from_the_hidden_size_at_every_stage(stage):
    zero = {"stage": stage, "allgather_bucket_size": "auto", **dict.fromkeys(SIZES, "auto")}
    config = load_config({"zero_optimization": zero}, auto=AutoHints(hidden_size=1000))
    assert config.zero.reduce_bucket_size == config.zero.allgather_bucket_size == 1_000_000
    assert config.zero.prefetch_bucket_size == 900_000
    assert config.zero.param_persistence_threshold == 10_000


def test_without_a_hidden_size_a_size_is_an_upper_bound():
    source = {"zero_optimization": {"stage": 3, **dict.fromkeys(SIZES, "auto")}}
    assert load_config(source).zero == load_config({"zero_optimization": {"stage": 3}}).zero
    known = load_config(source, auto=AutoHints(model_numel=12345)).zero
    assert (known.reduce_bucket_size, known.param_persistence_threshold) == (12345, 100_000)


@pytest.mark.parametrize(
    ("fp16", "bf16", "device", "able", "expected"),
    [
        ("auto", "auto", "cuda", None, "bf16"),
        ("auto", "auto", "cuda", True, "bf16"),
        ("auto", "auto", "cuda", False, "fp16"),
        ("auto", "auto", "cpu", None, "fp32"),
        ("auto", "auto", "cpu", True, "bf16"),
        ("auto", "auto", None, None, "fp32"),
        (False, "auto", "cuda", None, "bf16"),
        ("auto", True, "cpu", None, "bf16"),
        ("auto", False, "cuda", None, "fp16"),
    ],
)
def test_precision_follows_from_the_device(fp16, bf16, device, able, expected):
    source = {"fp16": {"enabled": fp16}, "bf16": {"enabled": bf16}}
    assert load_config(source, auto=AutoHints(device=device, bf16_supported=able)).precision == expected


def test_rates_and_lengths_follow_from_the_program():
    source = {
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(["lr", "betas", "eps", "weight_decay"], "auto")},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": dict.fromkeys(["total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"], "auto"),
        },
    }
    config = load_config(source, auto=AutoHints(learning_rate=3e-4, total_steps=500))
    assert config.gradient_clipping == 1.0
    assert config.optimizer.params == {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    assert config.scheduler.params["total_num_steps"] == 500
    assert config.scheduler.params["warmup_max_lr"] is None
    assert (config.scheduler.params["warmup_min_lr"], config.scheduler.params["warmup_num_steps"]) == (0.0, 0)


def test_what_nothing_decides_is_one_error_with_every_path():
    source = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
        "zero_optimization": {"stage": "auto"},
    }
    with pytest.raises(InvalidConfig) as caught:
        load_config(source)
    paths = ["optimizer.params.lr", "scheduler.params.total_num_steps", "zero_optimization.stage"]
    assert [problem.path for problem in caught.value.problems] == paths
    deferred = load_config(source, defer=True)
    assert {note.path for note in deferred.notes if "left to the program" in note.text} == set(paths)


def test_any_other_auto_is_the_default():
    source = {
        "steps_per_print": "auto",
        "wall_clock_breakdown": "auto",
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": "auto",
            "stage3_gather_16bit_weights_on_model_save": "auto",
            "offload_optimizer": {"device": "auto"},
            "offload_param": {"buffer_size": "auto"},
        },
    }
    config = load_config(source)
    assert config.zero == load_config({"zero_optimization": {"stage": 3}}).zero
    assert config.steps_per_print == 10
    assert all(note.kind == "assumed" for note in config.notes if note.text.startswith("auto"))
