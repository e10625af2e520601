"""What the keys of a config lead to: values, defaults, misspelt and foreign keys, old spellings, the effect report."""

import math

import pytest

from zrun_runtime.config import InvalidConfig, load_config, short_report, summary
from zrun_runtime.config.keys import effect_of, field_names, section_of
from zrun_runtime.config.schema import Document

ON = {"enabled": True}
TYPE = "torch_autocast.dtype"


def problems(source, **options):
    """The problems of a config: path -> text."""
    with pytest.raises(InvalidConfig) as caught:
        load_config(source, **options)
    return {problem.path: problem.text for problem in caught.value.problems}


def notes(source, **options):
    """The notes on a config: path -> (kind, text)."""
    return {note.path: (note.kind, note.text) for note in load_config(source, **options).notes}


def test_an_empty_config_has_the_fields_defaults():
    config = load_config({})
    assert (config.world_size, config.train_batch_size, config.micro_batch_size, config.accumulation_steps) == (
        1,
        1,
        1,
        1,
    )
    assert (config.zero.stage, config.precision, config.optimizer, config.scheduler) == (0, "fp32", None, None)
    assert config.gradient_clipping == 1.0
    assert config.steps_per_print == 10
    assert (config.grad_accum_dtype, config.communication_data_type) == (None, None)
    assert config.zero.reduce_bucket_size == 500_000_000
    assert config.zero.prefetch_bucket_size == 50_000_000
    assert config.zero.param_persistence_threshold == 100_000
    assert "gradient_clipping" in notes({})


# ---- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", [500_000_000, 5e8, "5e8", "500000000", "5E+8", 500000000.0])
def test_a_whole_number_however_it_is_spelt(spelling):
    config = load_config({"zero_optimization": {"stage": 1, "reduce_bucket_size": spelling}})
    assert config.zero.reduce_bucket_size == 500_000_000
    assert type(config.zero.reduce_bucket_size) is int


@pytest.mark.parametrize(
    "value", [15099494.4, 1e-3, True, False, None, "many", "", [], {}, "nan", math.inf, -5, "-1e3", 10**40, 1e40]
)
def test_what_is_no_size_is_refused_by_name(value):
    key = "zero_optimization.stage3_prefetch_bucket_size"
    assert key in problems({"zero_optimization": {"stage3_prefetch_bucket_size": value}})


@pytest.mark.parametrize("stage", [4, -1, 2.5, True, None, "three", [0, 1, 2, 3]])
def test_a_stage_that_there_is_not(stage):
    text = problems({"zero_optimization": {"stage": stage}})["zero_optimization.stage"]
    assert "0, 1, 2 or 3" in text or "whole number" in text


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ({"gradient_clipping": -1}, "gradient_clipping"),
        ({"gradient_clipping": "much"}, "gradient_clipping"),
        ({"gradient_clipping": math.inf}, "gradient_clipping"),
        ({"steps_per_print": -3}, "steps_per_print"),
        ({"train_batch_size": 0}, "train_batch_size"),
        ({"bf16": True}, "bf16"),
        ({"bf16": {"enabled": "perhaps"}}, "bf16.enabled"),
        ({"fp16": {"enabled": True, "initial_scale_power": 4, "min_loss_scale": 32}}, "fp16.min_loss_scale"),
        ({"bf16": {"enabled": None}}, "bf16.enabled"),
        ({"zero_optimization": []}, "zero_optimization"),
        ({"zero_optimization": {"offload_optimizer": "cpu"}}, "zero_optimization.offload_optimizer"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "disk"}}},
            "zero_optimization.offload_optimizer.device",
        ),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "zero_optimization.offload_param.nvme_path"),
        ({"communication_data_type": "int8"}, "communication_data_type"),
        ({"data_types": {"grad_accum_dtype": "fp64"}}, "data_types.grad_accum_dtype"),
        ({"optimizer": 5}, "optimizer"),
        ({"optimizer": {"params": {}}}, "optimizer.type"),
        ({"optimizer": {"type": "SGD", "params": [1]}}, "optimizer.params"),
        ({"checkpoint": {"tag_validation": "Maybe"}}, "checkpoint.tag_validation"),
    ],
)
def test_values_that_make_no_sense(source, path):
    assert path in problems(source)


def test_all_problems_are_told_at_once():
    found = problems(
        {
            "gradient_clipp1ng": 1,
            "train_batch_size": 7,
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 4, "reduce_bucket_size": None},
            "optimizer": {"type": "SGD", "params": {"lr": "fast"}},
            "scheduler": {"type": "WarmupDecayLR"},
        }
    )
    assert set(found) == {
        "gradient_clipp1ng",
        "train_batch_size",
        "zero_optimization.stage",
        "zero_optimization.reduce_bucket_size",
        "optimizer.params.lr",
        "scheduler.params.total_num_steps",
    }


@pytest.mark.parametrize(
    ("value", "every"), [(None, None), (0, None), (math.inf, None), ("inf", None), (5, 5), (2e16, 2 * 10**16)]
)
def test_steps_per_print(value, every):
    assert load_config({"steps_per_print": value}).steps_per_print == every


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "torch.bfloat16", "BF16"])
def test_types_of_numbers_by_any_of_their_names(name):
    config = load_config({"communication_data_type": name, "data_types": {"grad_accum_dtype": name}})
    assert (config.communication_data_type, config.grad_accum_dtype) == ("bf16", "bf16")


def test_null_stands_for_a_section_that_is_not_there():
    empty = {"optimizer": None, "scheduler": None, "bf16": None, "zero_optimization": {"offload_param": None}}
    config = load_config(empty)
    assert (config.optimizer, config.scheduler, config.precision) == (None, None, "fp32")
    assert config.zero.offload_param.device == "none"


# ---- keys that are not known ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "path", "near"),
    [
        ({"gradient_clipp1ng": 1}, "gradient_clipp1ng", "gradient_clipping"),
        ({"gradient_cliping": 1}, "gradient_cliping", "gradient_clipping"),
        ({"zero_optimisation": {}}, "zero_optimisation", "zero_optimization"),
        ({"Train_Batch_Size": 8}, "Train_Batch_Size", "train_batch_size"),
        ({"gradient-accumulation-steps": 8}, "gradient-accumulation-steps", "gradient_accumulation_steps"),
        ({"train_micro_batch_size": 8}, "train_micro_batch_size", "train_micro_batch_size_per_gpu"),
        (
            {"train_micro_batch_size_per_device": 8},
            "train_micro_batch_size_per_device",
            "train_micro_batch_size_per_gpu",
        ),
        ({"zero_optimization": {"overlap_com": True}}, "zero_optimization.overlap_com", "overlap_comm"),
        ({"zero_optimization": {"stgae": 2}}, "zero_optimization.stgae", "stage"),
        ({"fp16": {"enable": True}}, "fp16.enable", "enabled"),
        ({"fp16": {"fp16_auto_cast": True}}, "fp16.fp16_auto_cast", "auto_cast"),
        (
            {"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}},
            "zero_optimization.offload_optimizer.devise",
            "device",
        ),
    ],
)
def test_a_misspelt_key_is_refused_and_the_near_one_named(source, path, near):
    assert problems(source)[path] == f"unknown key; did you mean {near}?"


@pytest.mark.parametrize("name", ["my_key", "logging", "fp8", "checkpointing", "hidden_size", "log", "norm", "comment"])
def test_a_foreign_key_is_noted_and_refused_only_if_asked(name):
    assert notes({name: {"a": "auto"}})[name][0] == "unknown"
    assert "unknown key" in problems({name: 1}, strict=True)[name]


@pytest.mark.parametrize(
    ("source", "path", "place"),
    [
        ({"stage": 3}, "stage", "zero_optimization.stage"),
        ({"zero_stage": 3}, "zero_stage", "zero_optimization.stage"),
        ({"max_grad_norm": 0.5}, "max_grad_norm", "gradient_clipping"),
        ({"grad_accum_dtype": "fp32"}, "grad_accum_dtype", "data_types.grad_accum_dtype"),
        ({"optimizer": {"type": "AdamW", "lr": 1e-4}}, "optimizer.lr", "optimizer.params.lr"),
        (
            {"scheduler": {"type": "WarmupLR", "warmup_type": "log"}},
            "scheduler.warmup_type",
            "scheduler.params.warmup_type",
        ),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "deepspeed", "at the top level"),
    ],
)
def test_a_key_in_the_wrong_place_is_told_where_it_belongs(source, path, place):
    assert place in notes(source)[path][1]


def test_a_key_that_is_null_is_not_missing_too():
    assert list(problems({"scheduler": {"type": None}})) == ["scheduler.type"]


def test_strict_takes_what_is_known():
    known = {"train_batch_size": 8, "zero_optimization": {"stage": 2, "cpu_offload": True}, "pipeline": {"chunks": 2}}
    assert load_config(known, strict=True).zero.stage == 2


# ---- old spellings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "path", "check"),
    [
        ({"bfloat16": {"enabled": True}}, "bfloat16", lambda c: c.precision == "bf16"),
        ({"zero_optimization": True}, "zero_optimization", lambda c: c.zero.stage == 1),
        ({"zero_optimization": False}, "zero_optimization", lambda c: c.zero.stage == 0),
        (
            {"zero_optimization": True, "allgather_size": 200},
            "zero_optimization.allgather_size",
            lambda c: c.zero.allgather_bucket_size == 200,
        ),
        (
            {"zero_optimization": {"stage": 2, "cpu_offload": True}},
            "zero_optimization.cpu_offload",
            lambda c: c.zero.offload_optimizer.device == "cpu",
        ),
        (
            {"zero_optimization": {"stage": 2, "cpu_offload": False}},
            "zero_optimization.cpu_offload",
            lambda c: c.zero.offload_optimizer.device == "none",
        ),
        (
            {"zero_optimization": {"stage": 3, "cpu_offload_params": True}},
            "zero_optimization.cpu_offload_params",
            lambda c: c.zero.offload_param.device == "cpu",
        ),
        (
            {"zero_optimization": {"stage": 3, "cpu_offload_param": True}},
            "zero_optimization.cpu_offload_param",
            lambda c: c.zero.offload_param.device == "cpu",
        ),
        (
            {"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}},
            "zero_optimization.stage3_gather_fp16_weights_on_model_save",
            lambda c: c.zero.gather_16bit_weights_on_model_save,
        ),
        ({"fp32_allreduce": True}, "fp32_allreduce", lambda c: c.communication_data_type == "fp32"),
        (
            {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 0.5}}},
            "optimizer.params.max_grad_norm",
            lambda c: c.gradient_clipping == 0.5,
        ),
    ],
)
def test_old_spellings_are_read_and_noted(old, path, check):
    assert check(load_config(old))
    assert notes(old)[path][0] == "migrated"


@pytest.mark.parametrize(
    ("both", "path"),
    [
        ({"bfloat16": {"enabled": True}, "bf16": {"enabled": False}}, "bfloat16"),
        (
            {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "nvme", "nvme_path": "/n"}}},
            "zero_optimization.cpu_offload",
        ),
        (
            {"gradient_clipping": 1.0, "optimizer": {"type": "Adam", "params": {"max_grad_norm": 0.5}}},
            "optimizer.params.max_grad_norm",
        ),
        (
            {"zero_optimization": {"max_live_parameters": 1, "stage3_max_live_parameters": 2}},
            "zero_optimization.max_live_parameters",
        ),
        ({"zero_optimization": {"cpu_offload": "yes"}}, "zero_optimization.cpu_offload"),
    ],
)
def test_an_old_spelling_against_the_new_one_is_refused(both, path):
    assert path in problems(both)


def test_the_short_names_of_stage_3_keys():
    assert load_config({"zero_optimization": {"stage": 3, "prefetch_bucket_size": 7}}).zero.prefetch_bucket_size == 7


# ---- effects ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "fp16.fp16_master_weights_and_grads"),
        ({"amp": {"enabled": True}}, "amp.enabled"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size"),
        ({"tensor_parallel": {"tp": {"tp_size": 2, "tp_grain_size": 1}}}, "tensor_parallel.tp.tp_size"),
        ({"elasticity": {"enabled": True}}, "elasticity.enabled"),
        ({"data_efficiency": {"enabled": True}}, "data_efficiency.enabled"),
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning.enabled"),
        ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention"),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
            "zero_optimization.zero_quantized_gradients",
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}},
            "zero_optimization.zero_hpz_partition_size",
        ),
        ({"zero_optimization": {"stage": 3, "zenflow": {"topk_ratio": 0.1}}}, "zero_optimization.zenflow"),
        (
            {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}},
            "compression_training.weight_quantization.shared_parameters.enabled",
        ),
    ],
)
def test_what_would_change_the_result_is_refused_with_what_to_use(source, path):
    text = problems(source)[path]
    assert "not supported" in text
    assert ":" in text


@pytest.mark.parametrize(
    "source",
    [
        {"fp16": {"enabled": False, "loss_scale": 0}},
        {"amp": {"enabled": False, "opt_level": "O1"}},
        {"tensor_parallel": {"autotp_size": 1, "tp": {"tp_size": 1, "tp_grain_size": 64}}},
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1, "zero_quantized_weights": False}},
        {"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 8, "zero_quantized_gradients": True}},
        {"zero_optimization": {"stage": 3, "offload_optimizer": False, "offload_param": False}, "fp16": False},
        {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False, "groups": 2}}}},
        {"elasticity": {"enabled": False, "micro_batch_sizes": [1, 2]}},
        {"bf16": {"enabled": True, "loss_scale": 0, "hysteresis": 2}},
        {"pipeline": {"stages": 4}, "autotuning": {"enabled": True}},
    ],
)
def test_what_is_off_is_taken(source):
    assert load_config(source, strict=True)


def test_contradictions():
    assert "bf16.enabled" in problems({"fp16": {"enabled": True}, "bf16": {"enabled": True}})
    assert "data_types.param_dtype" in problems({"data_types": {"param_dtype": "bf16"}})
    assert load_config({"data_types": {"param_dtype": "bf16"}, "bf16": {"enabled": True}}).precision == "bf16"


def test_every_key_that_is_given_is_answered():
    given = {
        "train_batch_size": 8,
        "prescale_gradients": True,
        "flops_profiler": {"enabled": True, "profile_step": 2},
        "wandb": {"enabled": False},
        "zero_optimization": {
            "stage": 2,
            "contiguous_gradients": True,
            "stage3_max_live_parameters": 5,
            "offload_optimizer": {"device": "cpu"},
        },
    }
    found = notes(given)
    assert found["train_batch_size"][0] == found["zero_optimization.stage"][0] == "honoured"
    for path in (
        "prescale_gradients",
        "flops_profiler",
        "wandb",
        "zero_optimization.contiguous_gradients",
        "zero_optimization.stage3_max_live_parameters",
    ):
        assert found[path][0] == "no_effect"
    assert found["zero_optimization.offload_optimizer.device"][0] == "honoured"
    assert "stage 3 only" in found["zero_optimization.stage3_max_live_parameters"][1]


def test_a_key_that_needs_another_one():
    for offload, kind in (({}, "no_effect"), ({"offload_optimizer": {"device": "cpu"}}, "honoured")):
        found = notes({"zero_optimization": {"stage": 2, "sub_group_size": 1e6, **offload}})
        assert found["zero_optimization.sub_group_size"][0] == kind


def test_every_key_of_the_schema_has_a_default_that_is_accepted_and_a_sentence():
    def look(kind, path):
        for name, field in field_names(kind).items():
            effect, inner = effect_of(field), section_of(field)
            if inner is not None:
                look(inner, f"{path}{name}.")
            elif effect is not None:
                assert effect.sentence.strip(), f"{path}{name}"

    look(Document, "")
    assert Document.model_validate(Document().model_dump(by_alias=True)) == Document()


def test_a_short_report_for_the_start_of_a_run():
    config = load_config(
        {
            "bfloat16": {"enabled": True},
            "my_key": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": 2, "reduce_scatter": True},
            "wall_clock_breakdown": True,
            "wandb": {"enabled": False},
        },
        world_size=4,
    )
    assert summary(config) == "ZeRO stage 2, bf16, AdamW; batch 4 = 1 x 1 accumulated x 4 rank(s)"
    lines = short_report(config)
    assert len(lines) == 4
    assert "my_key" in lines[0]
    assert "reduce_scatter" in lines[1]
    assert "wandb" not in lines[1]
    assert "bfloat16" in lines[2]
    assert "gradient_clipping = 1.0" in lines[3]
    assert "betas" not in lines[3]


@pytest.mark.parametrize(
    ("section", "dtype", "expected", "scales"),
    [
        ({}, "bfloat16", "bf16", False),
        ({}, None, "bf16", False),
        ({}, "fp16", "fp16", True),
        ({"bf16": {"enabled": True}}, None, "bf16", False),
        ({"bf16": {"enabled": True}}, "bf16", "bf16", False),
        ({"fp16": {"enabled": True}}, None, "fp16", True),
    ],
)
def test_autocast(section, dtype, expected, scales):
    config = load_config({"torch_autocast": {"enabled": True, "dtype": dtype}, **section})
    assert (config.autocast_dtype, config.scales_loss) == (expected, scales)
    assert load_config({}).autocast_dtype is None


def test_autocast_that_makes_no_sense():
    assert "make them the same" in problems({"torch_autocast": {"enabled": True, "dtype": "fp16"}, "bf16": ON})[TYPE]
    assert "turn it off" in problems({"torch_autocast": {"enabled": True, "dtype": "fp32"}})[TYPE]


def test_modules_that_stay_fp32():
    assert load_config({}).keep_in_fp32_modules == ()
    for value, expected in (("norm", ("norm",)), (["a", "b.c"], ("a", "b.c")), ("auto", "auto")):
        found = load_config({"data_types": {"keep_in_fp32_modules": value}}).keep_in_fp32_modules
        assert found == expected
    assert "data_types.keep_in_fp32_modules" in problems({"data_types": {"keep_in_fp32_modules": [1]}})


def test_what_only_the_run_can_tell_is_left_open():
    source = {"bf16": {"enabled": "auto"}, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    config = load_config(source, defer=True)
    assert summary(config) == "ZeRO stage 0, precision auto, the program's optimizer; batch sizes auto"
    told = [note for note in config.notes if note.path.startswith("bf16")]
    assert [note.path for note in told] == ["bf16.enabled"] and "the device of the run decides" in told[0].text
    assert not load_config(source).left_open
    assert not load_config({**source, "bf16": ON, "train_batch_size": 8}, defer=True).left_open
