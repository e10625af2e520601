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
_LOGGING = _each(f"{_OURS}.logs", "logger log_dist log_dist_once warning_once set_log_level_from_string")
_ACCELERATOR = _each(f"{_OURS}.accelerator", "get_accelerator is_current_accelerator_supported DeepSpeedAccelerator")
_COMM = {
    **_each(
        f"{_OURS}.comm",
        "init_distributed is_initialized get_local_rank get_world_group get_all_ranks_from_group "
        "has_all_gather_into_tensor has_reduce_scatter_tensor",
    ),
    "inference_all_reduce": "torch.distributed:all_reduce",
    EVERYTHING: "torch.distributed",
}
_CONSTANTS = _each(f"{_OURS}.comm", "TORCH_DISTRIBUTED_DEFAULT_PORT default_pg_timeout")
_LOADER = _each(f"{_OURS}.utils", "RepeatingLoader")
_OPTIMIZERS = f"{_OURS}.optimizers"
_BUILDERS = {EVERYTHING: f"{_OURS}.ops", **_each(f"{_OURS}.ops", "OpBuilder")}

HERE: dict[str, dict[str, str]] = {
    "": {
        **_each(f"{_OURS}.entry", "initialize add_config_arguments"),
        **_each(f"{_OURS}.comm", "init_distributed"),
        **_each(_OPTIMIZERS, "DeepSpeedOptimizer ZeROOptimizer"),
        **_each(f"{_OURS}.utils", "OnDevice"),
        **_each(f"{_OURS}.versions", "version git_hash git_branch"),
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
    "comm": _COMM,
    "comm.comm": _COMM,
    "comm.constants": _CONSTANTS,
    "constants": _CONSTANTS,
    "env_report": {"cli_main": f"{_OURS}.launcher:report", "main": f"{_OURS}.launcher:report"},
    "git_version_info": _each(
        f"{_OURS}.versions", "version torch_info git_hash git_branch installed_ops compatible_ops"
    ),
    "launcher.runner": _each(f"{_OURS}.launcher", "DEEPSPEED_ENVIRONMENT_NAME DLTS_HOSTFILE main"),
    "ops": _each(f"{_OURS}.ops", "__compatible_ops__ __installed_ops__"),
    "ops.adagrad": _each(_OPTIMIZERS, "DeepSpeedCPUAdagrad"),
    "ops.adagrad.cpu_adagrad": _each(_OPTIMIZERS, "DeepSpeedCPUAdagrad"),
    "ops.adam": _each(_OPTIMIZERS, "FusedAdam DeepSpeedCPUAdam"),
    "ops.adam.cpu_adam": _each(_OPTIMIZERS, "DeepSpeedCPUAdam"),
    "ops.adam.fused_adam": _each(_OPTIMIZERS, "FusedAdam"),
    "ops.aio": _each(f"{_OURS}.ops", "AsyncIOBuilder"),
    "ops.lamb": _each(_OPTIMIZERS, "FusedLamb"),
    "ops.lamb.fused_lamb": _each(_OPTIMIZERS, "FusedLamb"),
    "ops.lion": _each(_OPTIMIZERS, "DeepSpeedCPULion FusedLion"),
    "ops.lion.cpu_lion": _each(_OPTIMIZERS, "DeepSpeedCPULion"),
    "ops.lion.fused_lion": _each(_OPTIMIZERS, "FusedLion"),
    "ops.op_builder": _BUILDERS,
    "ops.op_builder.all_ops": _BUILDERS,
    "ops.op_builder.builder": _each(f"{_OURS}.ops", "OpBuilder"),
    "runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "runtime.base_optimizer": _each(_OPTIMIZERS, "DeepSpeedOptimizer ZeROOptimizer"),
    "runtime.bf16_optimizer": _each(_OPTIMIZERS, "BF16_Optimizer"),
    "runtime.config": {
        **_CONFIG,
        **_each(
            f"{_OURS}.config",
            "get_gradient_clipping get_log_level ADAM_OPTIMIZER ADAMW_OPTIMIZER ADAGRAD_OPTIMIZER LAMB_OPTIMIZER "
            "LION_OPTIMIZER DEEPSPEED_OPTIMIZERS ADAM_W_MODE TORCH_ADAM_PARAM",
        ),
    },
    "runtime.constants": {EVERYTHING: f"{_OURS}.constants"},
    "runtime.dataloader": _LOADER,
    "runtime.engine": _ENGINE,
    "runtime.fp16.fused_optimizer": _each(_OPTIMIZERS, "FP16_Optimizer"),
    "runtime.fp16.unfused_optimizer": {"FP16_UnfusedOptimizer": f"{_OPTIMIZERS}:FP16_Optimizer"},
    "runtime.lr_schedules": {
        **_each(f"{_RUNTIME}.schedules", "LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR"),
        **_each(f"{_OURS}.schedules", "VALID_LR_SCHEDULES"),
    },
    "runtime.utils": {
        **_each(
            f"{_OURS}.utils",
            "see_memory_usage set_random_seed move_to_device prefix_sum_inc partition_uniform partition_balanced "
            "get_only_unique_item empty_cache required_torch_version",
        ),
        "clip_grad_norm_": "torch.nn.utils:clip_grad_norm_",
    },
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
    "runtime.zero.utils": _each(f"{_OURS}.utils", "is_zero_param is_zero_supported_optimizer ZeRORuntimeException"),
    "runtime.zero.stage_1_and_2": {**_each(_OPTIMIZERS, "DeepSpeedZeroOptimizer"), **_ESTIMATES["zero2"]},
    "utils": {**_LOGGING, **_SAFE, **_LEAVES, **_LOADER, **_each(f"{_OURS}.utils", "OnDevice instrument_w_nvtx")},
    "utils.groups": {EVERYTHING: f"{_OURS}.groups"},
    "utils.init_on_device": _each(f"{_OURS}.utils", "OnDevice"),
    "utils.logging": {
        **_LOGGING,
        **_each(
            f"{_OURS}.logs",
            "LoggerFactory log_levels get_log_level_from_string get_current_level should_log_le print_json_dist",
        ),
    },
    "utils.nvtx": _each(f"{_OURS}.utils", "instrument_w_nvtx"),
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
    "accelerator": "there are cpu and cuda, chosen by where the process runs: ask get_accelerator(). Not planned.",
    "autocast": "the section torch_autocast of the config works, its inside is another one. Not planned.",
    "compiled": "compiled extensions have no place here, torch's own kernels are used. Not planned.",
    "compression": "compression and quantization of models are not part of training. Not planned; use torchao.",
    "comm": "process groups and their log are torch.distributed's; engine.traffic() counts bytes. Not planned.",
    "cores": "use `zrun --bind_cores_to_rank`. Not planned.",
    "curriculum": "data order is the script's business. Not planned.",
    "elastic": "use `zrun --max_restarts` with --min_nodes: the batch size is kept. This interface is not planned.",
    "export": "a checkpoint has other files here: `zrun checkpoint export DIR` writes its weights. Not planned.",
    "groups": "expert and model parallel groups: every rank is a data-parallel rank. Not planned.",
    "hybrid": "the hybrid engine joins training to an inference engine. Not planned.",
    "inference": "this is a training runtime. Not planned; use vLLM or transformers.",
    "inside": "what is inside is another matter here: see zrun_runtime.zero, and docs/semantics.md. Not planned.",
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
    "accelerator": _all("accelerator", "set_accelerator"),
    "accelerator.cpu_accelerator": _all("accelerator"),
    "accelerator.cuda_accelerator": _all("accelerator"),
    "autotuning": _all("tuning"),
    "checkpoint": _all("universal"),
    "checkpoint.ds_to_universal": _all("universal"),
    "comm": _all("comm", "configure initialize_mesh_device log_summary mpi_discovery set_backend"),
    "comm.torch": _all("comm"),
    "comm.utils": _all("comm"),
    "compile": _all("compiled"),
    "compression": _all("compression"),
    "elasticity": _all("elastic"),
    "inference": _all("inference"),
    "io": _all("inside"),
    "launcher.constants": _all("launcher"),
    "launcher.launch": _all("launcher"),
    "launcher.multinode_runner": _all("launcher"),
    "launcher.runner": _all("launcher"),
    "linear": _all("compression"),
    "model_implementations": _all("inference"),
    "module_inject": _all("inference"),
    "moe": _all("moe"),
    "monitor": _all("monitor"),
    "nebula": _all("inside"),
    "nvme": _all("inside"),
    "ops.fp_quantizer": _all("compression"),
    "ops.sparse_attention": _all("transformer"),
    "ops.transformer": _all("transformer"),
    "ops.adam": _all("onebit", "ZenFlowCPUAdam ZenFlowSelectiveAdamW"),
    "ops.adam.zenflow_cpu_adam": _all("onebit"),
    "ops.aio": _all("inside", "aio_handle"),
    "pipe": _all("pipe"),
    "profiling": _all("profiler"),
    "runtime.activation_checkpointing.checkpointing": _all(
        "tensor", "CheckpointFunction get_cuda_rng_tracker model_parallel_cuda_manual_seed"
    ),
    "runtime.activation_checkpointing.config": _all("models"),
    "runtime.checkpoint_engine": _all("inside"),
    "runtime.comm": _all("comm"),
    "runtime.compiler": _all("compiled"),
    "runtime.config": _all("models", "DtypeEnum MUON_OPTIMIZER"),
    "runtime.config_utils": _all("models"),
    "runtime.data_pipeline": _all("curriculum"),
    "runtime.dataloader": _all("curriculum", "DeepSpeedDataLoader"),
    "runtime.eigenvalue": _all("compression"),
    "runtime.engine": _all("groups", "MEMORY_OPT_ALLREDUCE_SIZE"),
    "runtime.fp16.loss_scaler": _all("scaler"),
    "runtime.fp16.onebit": _all("onebit"),
    "runtime.hybrid_engine": _all("hybrid"),
    "runtime.lr_schedules": _all("models", "LR_SCHEDULE add_tuning_arguments get_lr_from_config"),
    "runtime.pipe": _all("pipe"),
    "runtime.precision_config": _all("models"),
    "runtime.progressive_layer_drop": _all("curriculum"),
    "runtime.quantize": _all("compression"),
    "runtime.sequence_parallel": _all("sequence"),
    "runtime.sparse_tensor": _all("inside"),
    "runtime.state_dict_factory": _all("inference"),
    "runtime.swap_tensor": _all("inside"),
    "runtime.tensor_parallel": _all("tensor"),
    "runtime.torch_autocast": _all("autocast"),
    "runtime.utils": {
        **_all("pipe", "PartitionedTensor call_to_str"),
        **_all("inside", "get_global_norm get_grad_norm memory_status noop_decorator bwc_tensor_model_parallel_rank"),
    },
    "runtime.weight_quantizer": _all("compression"),
    "runtime.zero": _all("tiling", "TiledLinear TiledLinearReturnBias"),
    **dict.fromkeys(
        ("runtime.zero.leaf_module_config", "runtime.zero.linear", "runtime.zero.offload_states"), _all("inside")
    ),
    "runtime.zero.mics": _all("mics"),
    "runtime.zero.offload_config": _all(
        "models", "DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig"
    ),
    "runtime.zero.parameter_offload": _all("inside"),
    "runtime.zero.partition_parameters": _all("inside", "ZeroParamType"),
    "runtime.zero.partitioned_param_coordinator": _all("inside"),
    "runtime.zero.tiling": _all("tiling"),
    "runtime.zero.utils": _all("inside", "assert_ints_same_as_other_ranks"),
    "sequence": _all("sequence"),
    "utils": _all(
        "inside", "get_full_hp_grad get_full_hp_param get_hp_fragment_mapping link_hp_params z3_leaf_parameter"
    ),
    "utils.bwc": _all("tensor"),
    "utils.debug": _all("inside"),
    "utils.numa": _all("cores"),
    "utils.timer": _all("timer"),
    "utils.zero_to_fp32": _all("export"),
    "zero": {**_all("tiling", "TiledLinear TiledLinearReturnBias"), **_all("mics", "MiCS_Init")},
}
