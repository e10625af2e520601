"""zero.Init: a model that never exists in full on any rank, not even while it is built."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zrun_runtime.call import refuse_model_parallelism
from zrun_runtime.casting import device_hints
from zrun_runtime.collectives import Collectives
from zrun_runtime.config import Config, load_config
from zrun_runtime.distributed import World, current_world, first_world_size
from zrun_runtime.early import Building
from zrun_runtime.errors import ConfigError
from zrun_runtime.plan import StatePlan, TierKind
from zrun_runtime.precision import DtypePolicy


class Init:
    """Shard parameters as the modules inside the context are built; `initialize` takes them over.

    Every rank gets slices of rank 0's values, whatever its own seed. Initialising again works inside the context as it
    does outside; after it, `GatheredParameters` is the way. `module` is sharded at once, without a context.
    The arguments are those of `deepspeed.zero.Init`; `mem_efficient_linear`, `pin_memory`, `param_swapper` and
    `tensor_overrides` have no effect.

    Args:
        module: an existing module to shard.
        config_dict_or_path: its precision is what parameters are cast to.
        enabled: False makes it do nothing.
        dtype: what parameters are cast to, whatever the config says.
        remote_device: "cpu": slices wait in host memory, as they do without it where the config's offload_param asks
            for another device than "none". "nvme" does the same: `initialize` puts them onto the disk.
        mpu, data_parallel_group, sequence_data_parallel_group: taken if they mean all ranks.

    Raises:
        ConfigError: the config cannot be read; ranks are split into groups, slices are to be quantized, or are to be
            where there is no such place.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        self._building: Building | None = None
        self._stack = ExitStack()
        if not enabled:
            return
        world = current_world()
        refuse_model_parallelism(mpu, None, world.size, "zero.Init")
        _refuse_parts(world, data_parallel_group, sequence_data_parallel_group, zero_param_parallel_group)
        if zero_quantized_weights or zero_quantized_nontrainable_weights:
            raise ConfigError("zero.Init: quantized slices are not supported", "leave zero_quantized_* out")
        source = config_dict_or_path if config_dict_or_path is not None else config
        if source is not None:
            hints = replace(device_hints(world), first_world_size=first_world_size())
            settings = load_config(source, world_size=world.size, auto=hints, defer=True)
            dtype = _dtype(settings) if dtype is None else dtype
            remote_device = remote_device or settings.zero.offload_param.device
        self._building = Building(Collectives(world), dtype, StatePlan.most_sharded(_tier(remote_device)))
        if module is not None:
            self._building.shard(module)

    def __enter__(self) -> None:
        if self._building is not None:
            self._stack.enter_context(self._building.watch())

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def _refuse_parts(world: World, data: Any, sequence: Any, within: Any) -> None:
    """Raise if slices are to be shared out over a part of the ranks."""
    for name, group in (("data_parallel_group", data), ("sequence_data_parallel_group", sequence)):
        if group is not None and torch.distributed.get_world_size(group) != world.size:
            raise ConfigError(f"zero.Init: {name} is a part of the ranks", "leave it out: slices go to all ranks")
    if within is not None:
        raise ConfigError(
            "zero.Init: zero_param_parallel_group is not supported", "leave it out: there is one set of slices"
        )


def _tier(remote_device: str | None) -> TierKind:
    """Where slices wait for an engine."""
    if remote_device in (None, "none"):
        return TierKind.DEVICE
    if remote_device not in ("cpu", "nvme"):
        raise ConfigError(f"zero.Init: remote_device is {remote_device!r}", 'give "cpu", "nvme" or None')
    return TierKind.CPU


def _dtype(config: Config) -> torch.dtype | None:
    """None where some modules keep fp32: only the whole model tells which, and what was cast is rounded."""
    return None if config.keep_in_fp32_modules else DtypePolicy.from_config(config).param_dtype
