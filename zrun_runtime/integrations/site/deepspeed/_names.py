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
_ZERO = _each(
    f"{_RUNTIME}.zero",
    "Init GatheredParameters register_external_parameter unregister_external_parameter "
    "estimate_zero2_model_states_mem_needs estimate_zero2_model_states_mem_needs_all_cold "
    "estimate_zero2_model_states_mem_needs_all_live estimate_zero3_model_states_mem_needs "
    "estimate_zero3_model_states_mem_needs_all_cold estimate_zero3_model_states_mem_needs_all_live",
)
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
_SCHEDULES = _each(f"{_RUNTIME}.schedules", "LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR")
_OPTIMIZERS = f"{_OURS}.optimizers"

HERE: dict[str, dict[str, str]] = {
    "": {
        **_each(f"{_OURS}.entry", "initialize add_config_arguments"),
        **_each(f"{_OURS}.comm", "init_distributed"),
        **_CONFIG,
        **_ENGINE,
        **_LOGGING,
        "zero": "deepspeed.zero",
        "checkpointing": f"{_RUNTIME}.checkpointing",
        "dist": "deepspeed.comm",
        "get_accelerator": f"{_OURS}.accelerator:get_accelerator",
    },
    "comm": {
        **_each(f"{_OURS}.comm", "init_distributed is_initialized"),
        EVERYTHING: "torch.distributed",
    },
    "zero": {**_ZERO},
    "utils": {**_LOGGING, **_SAFE, **_LEAVES},
    "utils.logging": {**_LOGGING},
    "checkpoint.utils": _each(f"{_OURS}.utils", "clone_tensors_for_torch_save"),
    "launcher.runner": _each(f"{_OURS}.launcher", "DEEPSPEED_ENVIRONMENT_NAME"),
    "runtime.engine": {**_ENGINE},
    "runtime.config": {**_CONFIG},
    "runtime.lr_schedules": {**_SCHEDULES, "VALID_LR_SCHEDULES": f"{_OURS}.schedules:VALID_LR_SCHEDULES"},
    "ops.adam": _each(_OPTIMIZERS, "FusedAdam DeepSpeedCPUAdam"),
}

REASONS = {
    "moe": "mixture-of-experts layers are model code, which the runtime trains like any other",
}

ABSENT: dict[str, dict[str, str]] = {
    "moe": _all("moe"),
    "moe.layer": _all("moe"),
}
