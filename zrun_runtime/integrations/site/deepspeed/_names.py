"""Which names there are, and where each really is. Plain tables: nothing is imported here.

HERE: module (without `deepspeed.`) -> name -> `module` or `module:attribute` that it stands for.
ABSENT: the same -> key of REASONS, for names that can be imported but not used.
EVERYTHING as a name stands for all that are not listed.
"""

from __future__ import annotations

VERSION = "0.19.8+zrun"  # the version whose names these are
EVERYTHING = "*"

_RUNTIME = "zrun_runtime"
_OURS = "zrun_runtime.integrations"


def _each(place: str, names: str) -> dict[str, str]:
    """Names that are called the same in `place`."""
    return {name: f"{place}:{name}" for name in names.split()}


def _all(reason: str, names: str = EVERYTHING) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


_CONFIG = {"DeepSpeedConfig": f"{_OURS}.config:DeepSpeedConfig", "DeepSpeedConfigError": f"{_RUNTIME}:ConfigError"}
_ENGINE = {"DeepSpeedEngine": f"{_RUNTIME}:Engine"}
_ESTIMATES = {
    kind: _each(
        f"{_RUNTIME}.zero.estimate",
        f"estimate_{kind}_model_states_mem_needs estimate_{kind}_model_states_mem_needs_all_cold "
        f"estimate_{kind}_model_states_mem_needs_all_live",
    )
    for kind in ("zero2", "zero3")
}
_BUILDING = {
    **_each(f"{_RUNTIME}.zero", "Init GatheredParameters register_external_parameter unregister_external_parameter"),
    **_each(f"{_RUNTIME}.sharded_parameter", "ZeroParamStatus"),
}
_LEAVES = _each(
    f"{_RUNTIME}.zero",
    "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules unset_z3_leaf_modules z3_leaf_module",
)
_SAFE = _each(
    f"{_RUNTIME}.zero",
    "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_get_local_fp32_param "
    "safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad "
    "safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state "
    "safe_update_full_grad_vectorized",
)
_CHECKPOINTING = _each(f"{_RUNTIME}.checkpointing", "checkpoint configure is_configured non_reentrant_checkpoint reset")
_LOGGING = _each(f"{_OURS}.utils", "logger log_dist")
_ACCELERATOR = _each(f"{_OURS}.accelerator", "get_accelerator is_current_accelerator_supported DeepSpeedAccelerator")
_COMM = {**_each(f"{_OURS}.comm", "init_distributed is_initialized get_local_rank"), EVERYTHING: "torch.distributed"}
_LOADER = _each(f"{_OURS}.utils", "RepeatingLoader")
_OPTIMIZERS = f"{_OURS}.optimizers"
_BUILDERS = {EVERYTHING: f"{_OURS}.ops", **_each(f"{_OURS}.ops", "OpBuilder")}

HERE: dict[str, dict[str, str]] = {
    "": {
        **_each(f"{_OURS}.entry", "initialize add_config_arguments"),
        **_each(f"{_OURS}.comm", "init_distributed"),
        **_each(_OPTIMIZERS, "DeepSpeedOptimizer ZeROOptimizer"),
        **_each(f"{_OURS}.utils", "OnDevice"),
        **_CONFIG,
        **_ENGINE,
        **_LOGGING,
        **_each(f"{_OURS}.accelerator", "get_accelerator"),
        "checkpointing": f"{_RUNTIME}.checkpointing",
        "dist": "deepspeed.comm",
    },
    "accelerator": _ACCELERATOR,
    "accelerator.real_accelerator": _ACCELERATOR,
    "accelerator.abstract_accelerator": _each(f"{_OURS}.accelerator", "DeepSpeedAccelerator"),
    "checkpoint.utils": _each(f"{_OURS}.utils", "clone_tensors_for_torch_save"),
    "checkpointing": _CHECKPOINTING,
    "comm": {
        **_each(f"{_OURS}.comm", "init_distributed is_initialized get_local_rank"),
        EVERYTHING: "torch.distributed",
    },
    "comm.comm": {
        **_each(f"{_OURS}.comm", "init_distributed is_initialized get_local_rank"),
        EVERYTHING: "torch.distributed",
    },
    "env_report": {"cli_main": f"{_OURS}.launcher:report", "main": f"{_OURS}.launcher:report"},
    "git_version_info": _each(f"{_OURS}.versions", "version torch_info git_hash git_branch"),
    "launcher.runner": _each(f"{_OURS}.launcher", "DEEPSPEED_ENVIRONMENT_NAME DLTS_HOSTFILE main"),
    "ops": _each(f"{_OURS}.ops", "__compatible_ops__ __installed_ops__"),
    "ops.adagrad": _each(_OPTIMIZERS, "DeepSpeedCPUAdagrad"),
    "ops.adam": _each(_OPTIMIZERS, "FusedAdam DeepSpeedCPUAdam"),
    "ops.adam.cpu_adam": _each(_OPTIMIZERS, "DeepSpeedCPUAdam"),
    "ops.adam.fused_adam": _each(_OPTIMIZERS, "FusedAdam"),
    "ops.aio": _each(f"{_OURS}.ops", "AsyncIOBuilder"),
    "ops.lamb": _each(_OPTIMIZERS, "FusedLamb"),
    "ops.lion": _each(_OPTIMIZERS, "DeepSpeedCPULion FusedLion"),
    "ops.op_builder": _BUILDERS,
    "ops.op_builder.all_ops": _BUILDERS,
    "runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "runtime.base_optimizer": _each(_OPTIMIZERS, "DeepSpeedOptimizer ZeROOptimizer"),
    "runtime.bf16_optimizer": _each(_OPTIMIZERS, "BF16_Optimizer"),
    "runtime.config": {**_CONFIG, **_each(f"{_OURS}.config", "get_gradient_clipping ADAM_OPTIMIZER ADAMW_OPTIMIZER")},
    "runtime.constants": {EVERYTHING: f"{_OURS}.constants"},
    "runtime.dataloader": _LOADER,
    "runtime.engine": _ENGINE,
    "runtime.fp16.fused_optimizer": _each(_OPTIMIZERS, "FP16_Optimizer"),
    "runtime.fp16.unfused_optimizer": {"FP16_UnfusedOptimizer": f"{_OPTIMIZERS}:FP16_Optimizer"},
    "runtime.lr_schedules": {
        **_each(f"{_RUNTIME}.schedules", "LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR"),
        **_each(f"{_OURS}.schedules", "VALID_LR_SCHEDULES"),
    },
    "runtime.utils": _each(
        f"{_OURS}.utils",
        "see_memory_usage set_random_seed move_to_device prefix_sum_inc partition_uniform partition_balanced",
    ),
    "runtime.zero": {**_BUILDING, **_ESTIMATES["zero2"], **_ESTIMATES["zero3"]},
    "runtime.zero.config": {
        "DeepSpeedZeroConfig": f"{_RUNTIME}.config.zero_schema:ZeroConfig",
        **_each(f"{_OURS}.enums", "ZeroStageEnum"),
    },
    "runtime.zero.offload_config": _each(f"{_OURS}.enums", "OffloadDeviceEnum OffloadStateTypeEnum"),
    "runtime.zero.partition_parameters": _BUILDING,
    "runtime.zero.stage3": {
        **_each(_OPTIMIZERS, "DeepSpeedZeroOptimizer_Stage3"),
        **_ESTIMATES["zero3"],
    },
    "runtime.zero.stage_1_and_2": {**_each(_OPTIMIZERS, "DeepSpeedZeroOptimizer"), **_ESTIMATES["zero2"]},
    "utils": {**_LOGGING, **_SAFE, **_LEAVES, **_LOADER, **_each(f"{_OURS}.utils", "OnDevice")},
    "utils.groups": {EVERYTHING: f"{_OURS}.groups"},
    "utils.init_on_device": _each(f"{_OURS}.utils", "OnDevice"),
    "utils.logging": _LOGGING,
    "utils.tensor_fragment": _SAFE,
    "utils.torch": _each(f"{_OURS}.utils", "required_torch_version"),
    "utils.z3_leaf_module": _LEAVES,
    "utils.zero_to_fp32": _each(
        f"{_RUNTIME}.checkpoint.export",
        "get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint "
        "convert_zero_checkpoint_to_fp32_state_dict",
    ),
    "zero": {**_BUILDING, **_ESTIMATES["zero2"], **_ESTIMATES["zero3"]},
}

REASONS = {
    "autocast": "the section torch_autocast of the config works, its inside is another one. Not planned.",
    "compiled": "compiled extensions have no place here, torch's own kernels are used. Not planned.",
    "compression": "compression and quantization of models are not part of training. Not planned; use torchao.",
    "cores": "use `zrun --bind_cores_to_rank`. Not planned.",
    "curriculum": "data order is the script's business. Not planned.",
    "elastic": "use `zrun --max_restarts` with --min_nodes: the batch size is kept. This interface is not planned.",
    "export": "a checkpoint has other files here: `zrun checkpoint export DIR` writes its weights. Not planned.",
    "groups": "expert and model parallel groups: every rank is a data-parallel rank. Not planned.",
    "hybrid": "the hybrid engine joins training to an inference engine. Not planned.",
    "inference": "this is a training runtime. Not planned; use vLLM or transformers.",
    "launcher": "zrun is the launcher, see `zrun --help`; its inside is another one. Not planned.",
    "mics": "sharding within a part of the ranks. Not planned; ZeRO 3 shards over all.",
    "models": "how a config is read is another matter here: use DeepSpeedConfig, or `zrun config check`. Not planned.",
    "moe": "mixture-of-experts layers of its own are not planned: such models of other libraries train like any other.",
    "monitor": "tensorboard, csv_monitor, wandb and comet of the config work; write to `engine.monitor`. Not planned.",
    "onebit": "compressed optimizers are not planned: gradients are sent as they are.",
    "pipe": "pipeline parallelism is not planned: use ZeRO 3, which shards the same state.",
    "profiler": "not planned: use torch.profiler, or torch.utils.flop_counter.",
    "scaler": "the engine scales the loss by itself: see the section fp16 of the config, and engine.loss_scale().",
    "sequence": "sequence parallelism is not planned: use activation checkpointing, or more ranks.",
    "tensor": "tensor parallelism is not planned: use ZeRO 3.",
    "tiling": "tiled layers are not planned: a block that is too large is split by the model.",
    "timer": "every step is timed anyway, see the console. Not planned.",
    "transformer": "its fused transformer layers are not planned: use the model's own, or torch.compile.",
    "tuning": "tuning by trial runs is not planned: bucket sizes are chosen to suit the model.",
    "universal": "every checkpoint loads at any world size and stage, so nothing is converted. Not planned.",
}

ABSENT: dict[str, dict[str, str]] = {
    "": {
        **_all("inference", "init_inference InferenceEngine default_inference_config DeepSpeedInferenceConfig"),
        **_all("tensor", "tp_model_init"),
        **_all("pipe", "PipelineModule PipelineEngine"),
        **_all("hybrid", "DeepSpeedHybridEngine"),
        **_all(
            "transformer",
            "DeepSpeedTransformerLayer DeepSpeedTransformerConfig replace_transformer_layer revert_transformer_layer",
        ),
    },
    "autotuning": _all("tuning"),
    "checkpoint": _all("universal"),
    "checkpoint.ds_to_universal": _all("universal"),
    "compression": _all("compression"),
    "compression.compress": _all("compression"),
    "elasticity": _all("elastic"),
    "inference": _all("inference"),
    "inference.config": _all("inference"),
    "inference.engine": _all("inference"),
    "inference.v2": _all("inference"),
    "launcher.constants": _all("launcher"),
    "launcher.launch": _all("launcher"),
    "launcher.multinode_runner": _all("launcher"),
    "launcher.runner": _all("launcher"),
    "linear": _all("compression"),
    "model_implementations": _all("inference"),
    "module_inject": _all("inference"),
    "moe": _all("moe"),
    "moe.layer": _all("moe"),
    "moe.sharded_moe": _all("moe"),
    "moe.utils": _all("moe"),
    "monitor": _all("monitor"),
    "monitor.config": _all("monitor"),
    "monitor.monitor": _all("monitor"),
    "ops.fp_quantizer": _all("compression"),
    "ops.sparse_attention": _all("transformer"),
    "ops.transformer": _all("transformer"),
    "ops.adam": _all("onebit", "ZenFlowCPUAdam ZenFlowSelectiveAdamW"),
    "pipe": _all("pipe"),
    "profiling.flops_profiler": _all("profiler"),
    "profiling.flops_profiler.profiler": _all("profiler"),
    "runtime.compiler": _all("compiled"),
    "runtime.config_utils": _all("models"),
    "runtime.data_pipeline": _all("curriculum"),
    "runtime.data_pipeline.data_sampling.data_sampler": _all("curriculum"),
    "runtime.dataloader": _all("curriculum", "DeepSpeedDataLoader"),
    "runtime.engine": _all("groups", "MEMORY_OPT_ALLREDUCE_SIZE"),
    "runtime.fp16.loss_scaler": _all("scaler"),
    "runtime.fp16.onebit": _all("onebit"),
    "runtime.hybrid_engine": _all("hybrid"),
    "runtime.pipe": _all("pipe"),
    "runtime.pipe.engine": _all("pipe"),
    "runtime.pipe.module": _all("pipe"),
    "runtime.pipe.topology": _all("pipe"),
    "runtime.precision_config": _all("models"),
    "runtime.sequence_parallel.ulysses_sp": _all("sequence"),
    "runtime.tensor_parallel": _all("tensor"),
    "runtime.torch_autocast": _all("autocast"),
    "runtime.utils": _all("pipe", "PartitionedTensor"),
    "runtime.zero": _all("tiling", "TiledLinear TiledLinearReturnBias"),
    "runtime.zero.mics": _all("mics"),
    "runtime.zero.tiling": _all("tiling"),
    "sequence.layer": _all("sequence"),
    "utils.numa": _all("cores"),
    "utils.timer": _all("timer"),
    "utils.zero_to_fp32": _all("export"),
    "zero": {**_all("tiling", "TiledLinear TiledLinearReturnBias"), **_all("mics", "MiCS_Init")},
}
