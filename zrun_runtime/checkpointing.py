"""Activation checkpointing under the names of `deepspeed.checkpointing`, by torch's own (non-reentrant) means."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from zrun_runtime.config import load_config
from zrun_runtime.errors import ConfigError


@dataclass
class _Settings:
    configured: bool = False
    on_cpu: bool = False  # what a checkpoint keeps, its inputs, is kept in host memory


_settings = _Settings()


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set what `checkpoint` does. `initialize` does so too, by the section activation_checkpointing of its config.

    Args:
        mpu_: must be None, or say that nothing is model parallel.
        deepspeed_config: a config in any form that `initialize` takes; arguments go before what it says.
        checkpoint_in_cpu: keep the inputs of checkpointed functions in host memory.
        partition_activations, contiguous_checkpointing, num_checkpoints, synchronize, profile: have no effect.

    Raises:
        ConfigError: mpu_ speaks of model parallelism.
    """
    size = getattr(mpu_, "get_model_parallel_world_size", lambda: 1)()
    if size > 1:
        raise ConfigError(f"checkpointing.configure: mpu_ has a model parallel size of {size}", "it is not supported")
    if deepspeed_config is not None:
        section = load_config(deepspeed_config, defer=True).activation_checkpointing
        _settings.on_cpu = section.cpu_checkpointing
    if checkpoint_in_cpu is not None:
        _settings.on_cpu = checkpoint_in_cpu
    _settings.configured = True


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` without keeping what its backward needs; it is called again then."""
    keep = save_on_cpu(pin_memory=torch.cuda.is_available()) if _settings.on_cpu else nullcontext()
    with keep:
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


def is_configured() -> bool:
    """`configure` was called."""
    return _settings.configured


def reset() -> None:
    """Has no effect: nothing is kept between steps."""
