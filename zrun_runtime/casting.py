"""Where a model's tensors are and of which type, before it is laid out: the device, the configured types."""

from __future__ import annotations

import re

import torch
from torch import nn

from zrun_runtime.config import AutoHints, Config
from zrun_runtime.distributed import World
from zrun_runtime.early import early_shard, recast_early
from zrun_runtime.errors import ConfigError, ParameterError
from zrun_runtime.ownership import refuse_to_cast
from zrun_runtime.precision import DtypePolicy
from zrun_runtime.sharded_parameter import ShardedParameter, take_values


def device_hints(world: World) -> AutoHints:
    """What the device says about "auto"."""
    return AutoHints(
        device="cuda" if world.device.type == "cuda" else "cpu",
        bf16_supported=world.device.type != "cuda" or torch.cuda.is_bf16_supported(),
    )


def cast_model(model: nn.Module, world: World, policy: DtypePolicy, config: Config) -> None:
    """Move a model onto the device; floating-point parameters become what fp16 or bf16 says, buffers `buffer_dtype`.

    Raises:
        ConfigError: `keep_in_fp32_modules` names what the model does not have.
        ParameterError: another engine has a parameter in another type, a parameter has no values, or two are on
            different accelerators.
    """
    empty = [name for name, p in model.named_parameters() if p.is_meta and not world.imagined]
    if empty:
        raise ParameterError(
            f"{len(empty)} parameters are on the meta device and have no values, the first is {empty[0]}",
            "give them values before initialize() (model.to_empty(device=...), then load_state_dict), "
            "or build the model inside zrun_runtime.zero.Init",
        )
    _refuse_two_devices(model)
    kept = kept_in_fp32(model, config)
    sharded = any(type(p) is ShardedParameter for p in model.parameters())  # those are on the device, in slices
    if not sharded:
        model.to(world.device)
    for name, parameter in model.named_parameters():
        wanted = parameter.dtype
        if policy.param_dtype is not None and parameter.is_floating_point():
            wanted = torch.float32 if id(parameter) in kept else policy.param_dtype
        refuse_to_cast(name, parameter, wanted)
        if early_shard(parameter) is not None:
            recast_early(parameter, wanted)
        elif parameter.dtype is not wanted or (sharded and parameter.device != world.device):
            parameter.data = take_values(parameter).to(world.device, wanted)
    for buffer in model.buffers():
        if sharded or (policy.buffer_dtype is not None and buffer.is_floating_point()):
            cast = policy.buffer_dtype if buffer.is_floating_point() else None
            buffer.data = buffer.data.to(world.device, cast or buffer.dtype)


def _refuse_two_devices(model: nn.Module) -> None:
    """A forward that moves activations from device to device would meet all weights on one."""
    first: dict[torch.device, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.device.type not in ("cpu", "meta"):
            first.setdefault(parameter.device, name)
    if len(first) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in first.items())
        raise ParameterError(
            f"the model's parameters are on {len(first)} devices: {places}; a rank has one",
            "build or load the model without device_map, on the CPU or on the rank's own device",
        )


def kept_in_fp32(model: nn.Module, config: Config) -> set[int]:
    """The ids of parameters in the modules that `keep_in_fp32_modules` names. "auto": those the model names itself.

    A name is a part of a module's path, or several with dots; * stands for anything within a part.
    """
    wanted = config.keep_in_fp32_modules
    if not wanted or config.precision == "fp32":
        return set()
    if wanted == "auto":
        return _matching(model, _of_the_model(model, config.precision))
    found = set()
    for pattern in wanted:
        matching = _matching(model, {pattern})
        if not matching:
            raise ConfigError(
                f"data_types.keep_in_fp32_modules: the model has no module {pattern}",
                "names are parts of a module's path, such as norm, blocks.0 or layer*",
            )
        found |= matching
    return found


def _of_the_model(model: nn.Module, precision: str) -> set[str]:
    """The names that transformers' models keep in fp32: some always, some in fp16 only."""
    found = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if precision == "fp16":
        found |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return found


def _matching(model: nn.Module, patterns: set[str]) -> set[int]:
    if not patterns:
        return set()
    words = "|".join(re.escape(pattern).replace(r"\*", "[^.]*") for pattern in sorted(patterns))
    path = re.compile(rf"(^|\.)({words})(\.|$)")
    return {id(p) for name, p in model.named_parameters(remove_duplicate=False) if path.search(name)}
