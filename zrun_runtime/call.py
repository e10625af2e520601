"""What the arguments of `initialize` are: of the right kind, with one config, and ranks that are all data parallel."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zrun_runtime.config import Config
from zrun_runtime.errors import ConfigError
from zrun_runtime.telemetry import notice

_SIZES = {
    "get_model_parallel_world_size": "model",
    "get_tensor_model_parallel_world_size": "tensor",
    "get_pipeline_model_parallel_world_size": "pipeline",
    "get_pipe_parallel_world_size": "pipeline",
    "get_sequence_parallel_world_size": "sequence",
    "get_expert_model_parallel_world_size": "expert",
}
_BATCH = {
    "train_batch_size": "train_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "accumulation_steps",
}


def refuse_other_kinds(model: Any, optimizer: Any, lr_scheduler: Any, training_data: Any) -> None:
    """Name the argument that is something else than it has to be.

    Raises:
        ConfigError: one is.
    """
    if not isinstance(model, nn.Module):
        hint = "give an instance" if isinstance(model, type) else "give the module itself"
        raise ConfigError(f"initialize: model is {_kind(model)}, not a module", hint)
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer) and not callable(optimizer):
        hint = 'give a torch optimizer, a function that makes one of parameters, or "optimizer" in the config'
        raise ConfigError(f"initialize: optimizer is {_kind(optimizer)}", hint)
    if lr_scheduler is not None and not hasattr(lr_scheduler, "step") and not callable(lr_scheduler):
        hint = 'give a scheduler, a function that makes one of the optimizer, or "scheduler" in the config'
        raise ConfigError(f"initialize: lr_scheduler is {_kind(lr_scheduler)}", hint)
    if training_data is not None and not (hasattr(training_data, "__getitem__") or isinstance(training_data, Iterable)):
        raise ConfigError(f"initialize: training_data is {_kind(training_data)}, not a dataset")


def _kind(given: Any) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else f"of type {type(given).__name__}"


def listed_parameters(given: Iterable[Any] | None) -> list[Any] | None:
    """`model_parameters` as a list: parameters, (name, parameter) pairs, or groups of them. None: none were given.

    Raises:
        ConfigError: there is something else among them.
    """
    if given is None:
        return None
    one = isinstance(given, (Tensor, dict)) or not isinstance(given, Iterable)  # the latter: such as model.parameters
    found = [given] if one else list(given)
    for item in found:
        held = item.get("params", item) if isinstance(item, dict) else item
        for member in held if isinstance(held, list) else [held]:
            value = member[1] if isinstance(member, tuple) and len(member) == 2 else member
            if isinstance(value, (str, dict)) or not isinstance(value, (Tensor, Iterable)):
                hint = "give parameters, (name, parameter) pairs, or dicts with `params`"
                raise ConfigError(f"initialize: model_parameters holds something of type {type(value).__name__}", hint)
    return found


def refuse_nothing(given: Sequence[Any] | None, model: nn.Module) -> None:
    """Refuse `model_parameters` that an optimizer is to be made of, and that hold nothing.

    Raises:
        ConfigError: they do not, though the model has something to train.
    """
    if given is not None and not given and any(parameter.requires_grad for parameter in model.parameters()):
        hint = "a generator gives its parameters once: make a list of it, or leave model_parameters out"
        raise ConfigError("initialize: model_parameters holds no parameter", hint)


def config_source(args: Any, config: Any) -> Any:
    """The one config that was given, wherever it was given.

    Raises:
        ConfigError: there is none, or there are two.
    """
    named = getattr(args, "deepspeed_config", None)
    if config is None and named is None:
        raise ConfigError("initialize: no config was given", 'pass config="ds.json", or a dict')
    if config is not None and named is not None and not _same_file(config, named):
        raise ConfigError("initialize: both `config` and args.deepspeed_config are given", "give one of them")
    return config if config is not None else named


def _same_file(one: Any, other: Any) -> bool:
    if not isinstance(one, (str, os.PathLike)) or not isinstance(other, (str, os.PathLike)):
        return False
    return os.path.realpath(one) == os.path.realpath(other)


def refuse_model_parallelism(mpu: Any, mesh_param: Any, world_size: int, where: str = "initialize") -> None:
    """Take an `mpu` or a mesh by which every rank has the whole model. where: what they were given to.

    Raises:
        ConfigError: they say otherwise.
    """
    advice = "every rank is a data-parallel rank here: leave it out, and use ZeRO 3 for a model that does not fit"
    for name, kind in _SIZES.items():
        size = getattr(mpu, name, lambda: 1)()
        if size is not None and size > 1:
            raise ConfigError(f"{where}: mpu has a {kind} parallel size of {size}, which is not supported", advice)
    ranks = getattr(mpu, "get_data_parallel_world_size", lambda: world_size)()
    if ranks != world_size:
        raise ConfigError(f"{where}: mpu has {ranks} data-parallel ranks of {world_size}", advice)
    if mesh_param is not None and [size for size in tuple(mesh_param)[1:] if size != 1]:
        raise ConfigError(f"{where}: mesh_param {tuple(mesh_param)} asks for sequence parallelism", advice)


def compare_batch_sizes(args: Any, config: Config) -> None:
    """Say so where the program's own arguments name another batch size than the config: the config counts."""
    for name, setting in _BATCH.items():
        said, counts = getattr(args, name, None), getattr(config, setting)
        if isinstance(said, int) and not isinstance(said, bool) and said != counts:
            notice("warning", f"args.{name} is {said}, but the config makes it {counts}, which is what counts")
