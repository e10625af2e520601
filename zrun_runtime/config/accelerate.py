"""The YAML that `accelerate config` writes: its training part is read, its launch part is the launcher's business."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zrun_runtime.config.notes import Ledger
from zrun_runtime.config.source import read_source
from zrun_runtime.errors import ConfigError

BLOCK = "deepspeed_config"
ZERO = "zero_optimization"
DEFAULT_STAGE = 2  # accelerate's own

_PLACES: dict[str, tuple[str, ...]] = {
    "zero_stage": (ZERO, "stage"),
    "zero3_save_16bit_model": (ZERO, "stage3_gather_16bit_weights_on_model_save"),
    "offload_optimizer_device": (ZERO, "offload_optimizer", "device"),
    "offload_optimizer_nvme_path": (ZERO, "offload_optimizer", "nvme_path"),
    "offload_param_device": (ZERO, "offload_param", "device"),
    "offload_param_nvme_path": (ZERO, "offload_param", "nvme_path"),
    "deepspeed_moe_layer_cls_names": (ZERO, "leaf_module", "classes"),
}
_NOT_READ = {
    "deepspeed_config_file": "",
    "deepspeed_hostfile": "hosts are given to `zrun --hostfile`",
    "deepspeed_multinode_launcher": "`zrun` starts every host the same way",
    "deepspeed_inclusion_filter": "hosts are chosen by `zrun --include`",
    "deepspeed_exclusion_filter": "hosts are left out by `zrun --exclude`",
    "zero3_init_flag": "a model is sharded whether it was built inside zero.Init or not",
}


def is_accelerate(data: dict[str, Any]) -> bool:
    """Whether this is a file of accelerate's, not a config of the runtime."""
    return "distributed_type" in data or BLOCK in data


def from_accelerate(data: dict[str, Any], folder: Path | None, ledger: Ledger) -> dict[str, Any]:
    """The config that an accelerate file stands for.

    Args:
        data: the whole file. Its block deepspeed_config holds accelerate's own names, real config keys, or both.
        folder: where a relative deepspeed_config_file starts.

    Raises:
        ConfigError: the file it names cannot be read.
    """
    block = data.get(BLOCK) or {}
    if not isinstance(block, dict):
        ledger.problem(BLOCK, "must be a section")
        return {}
    ledger.note(BLOCK, "migrated", "the training part of this accelerate file was read, the launch part was not")
    result = _named_file(block, folder)
    for name, value in block.items():
        if name not in _PLACES and name not in _NOT_READ:
            result[name] = value
            ledger.moved(f"{BLOCK}.{name}", name)
    for name, value in block.items():
        if name in _PLACES:
            _put(result, name, value, ledger)
        elif _NOT_READ.get(name):
            ledger.note(f"{BLOCK}.{name}", "no_effect", _NOT_READ[name], value)
    if data.get("distributed_type") == "DEEPSPEED" and isinstance(result.setdefault(ZERO, {}), dict):
        result[ZERO].setdefault("stage", DEFAULT_STAGE)
    _mixed_precision(data.get("mixed_precision"), result, ledger)
    return result


def _put(result: dict[str, Any], name: str, value: Any, ledger: Ledger) -> None:
    *sections, key = _PLACES[name]
    target: Any = result
    for section in sections:
        target = target.setdefault(section, {}) if isinstance(target, dict) else None
    path = ".".join(_PLACES[name])
    if isinstance(target, dict) and target.setdefault(key, value) != value:
        ledger.problem(f"{BLOCK}.{name}", f"is {value}, but {path} is {target[key]}: remove one")
    else:
        for count in range(1, len(sections) + 1):  # sections that only this name asks for
            ledger.places.written.setdefault(".".join(sections[:count]), f"{BLOCK}.{name}")
        ledger.moved(f"{BLOCK}.{name}", path)


def _named_file(block: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """The config file that the block names, if it does."""
    name = block.get("deepspeed_config_file")
    if name is None:
        return {}
    if not isinstance(name, str):
        raise ConfigError(f"{BLOCK}.deepspeed_config_file: must be a path")
    try:
        return dict(read_source((folder or Path()) / name).data)
    except ConfigError as error:
        raise ConfigError(f"{BLOCK}.deepspeed_config_file: {error.message}", error.hint) from None


def _mixed_precision(value: Any, result: dict[str, Any], ledger: Ledger) -> None:
    if value in (None, "no", False):
        return
    if value not in ("fp16", "bf16"):
        ledger.problem("mixed_precision", f"{value!r} is not supported: use bf16")
    elif value not in result:
        result[value] = {"enabled": True}
        ledger.note("mixed_precision", "migrated", f"is now {value}.enabled", True)
