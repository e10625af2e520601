"""`deepspeed.DeepSpeedConfig`: a config that was read, under the names that scripts ask it by."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from zrun_runtime.config import load_config

ADAM_OPTIMIZER, ADAMW_OPTIMIZER, ADAGRAD_OPTIMIZER = "adam", "adamw", "adagrad"
LAMB_OPTIMIZER, LION_OPTIMIZER = "lamb", "lion"
DEEPSPEED_OPTIMIZERS = [ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER, LION_OPTIMIZER]
ADAM_W_MODE, TORCH_ADAM_PARAM = "adam_w_mode", "torch_adam"  # keys of its parameters

_PLACES = {
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "accumulation_steps",
    "zero_config": "zero",
    "float16_config": "fp16",
    "bfloat16_config": "bf16",
    "activation_checkpointing_config": "activation_checkpointing",
    "_param_dict": "raw",
}


class DeepSpeedConfig:
    """What `initialize` would read from this source on this many ranks.

    Args:
        config: a path, dict or base64 string.
        mpu, mesh_device: have no effect: every rank is a data-parallel rank.

    Raises:
        ConfigError: it cannot be read, or asks for what cannot be.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        self.global_rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.settings = load_config(config, world_size=self.world_size)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "settings":
            raise AttributeError(name)
        return getattr(self.settings, _PLACES.get(name, name))

    @property
    def zero_enabled(self) -> bool:
        """Something is sharded."""
        return self.settings.zero.stage > 0

    @property
    def zero_optimization_stage(self) -> int:
        """0 to 3."""
        return self.settings.zero.stage

    @property
    def optimizer_name(self) -> str | None:
        """The class of the optimizer; None if the config names none."""
        return self.settings.optimizer.type if self.settings.optimizer else None

    @property
    def optimizer_params(self) -> dict[str, Any] | None:
        """Its arguments."""
        return self.settings.optimizer.params if self.settings.optimizer else None

    @property
    def scheduler_name(self) -> str | None:
        """The class of the schedule; None if the config names none."""
        return self.settings.scheduler.type if self.settings.scheduler else None

    @property
    def scheduler_params(self) -> dict[str, Any] | None:
        """Its arguments."""
        return self.settings.scheduler.params if self.settings.scheduler else None

    @property
    def fp16_enabled(self) -> bool:
        """Parameters are fp16."""
        return self.settings.precision == "fp16"

    @property
    def bfloat16_enabled(self) -> bool:
        """Parameters are bf16."""
        return self.settings.precision == "bf16"


def get_gradient_clipping(param_dict: dict[str, Any]) -> float:
    """The clipping that a config asks for."""
    return load_config({"train_micro_batch_size_per_gpu": 1, **param_dict}, defer=True).gradient_clipping


def get_log_level(param_dict: dict[str, Any]) -> str | None:
    """The level of the log that a config asks for."""
    return param_dict.get("log_level")
