"""zrun_runtime: ZeRO inside each worker. `initialize` wraps a model as a DeepSpeed JSON config says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from zrun_runtime import checkpointing, zero
from zrun_runtime.build import build_engine
from zrun_runtime.call import (
    compare_batch_sizes,
    config_source,
    listed_parameters,
    refuse_model_parallelism,
    refuse_other_kinds,
)
from zrun_runtime.distributed import current_world, init_distributed
from zrun_runtime.early import not_building
from zrun_runtime.engine import Engine
from zrun_runtime.errors import (
    ConfigError,
    DistributedError,
    EngineError,
    ParameterError,
    RanksDivergedError,
    ZeroRuntimeError,
)
from zrun_runtime.uncaught import show_short
from zrun_runtime.zero import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DistributedError",
    "Engine",
    "EngineError",
    "ParameterError",
    "RanksDivergedError",
    "ZeroRuntimeError",
    "checkpointing",
    "init_distributed",
    "initialize",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "zero",
]

show_short()


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Engine, torch.optim.Optimizer | None, DataLoader[Any] | None, Any]:
    """Wrap a model as a config says. The parameters and their order are those of `deepspeed.initialize`.

    Args:
        args: an object whose `deepspeed_config` names the config, if `config` does not name the same.
        model: the same on every rank; rank 0's values are taken.
        optimizer: a torch optimizer, or a function that makes one of parameters. Beats the config's.
        model_parameters: parameters or optimizer group dicts to train; default: all that require gradients.
        training_data: a dataset, for which a loader of this rank's micro-batches is returned.
        lr_scheduler: a scheduler, or a function that makes one of the optimizer. Beats the config's.
        collate_fn: for that loader.
        mpu, mesh_param: taken if they say that every rank has the whole model.
        config: a path, dict, YAML file or base64 string. `config_params` is its older name.

    Returns:
        (engine, optimizer, loader or None, scheduler or None)

    Raises:
        ConfigError: the config cannot be read, or asks for what cannot be; an argument is of another kind.
        DistributedError: the process group cannot be built.
        ParameterError: a parameter cannot be sharded.
    """
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    world = current_world()
    source = config_source(args, config if config is not None else config_params)
    if model is None:
        raise EngineError("initialize: no model was given")
    refuse_other_kinds(model, optimizer, lr_scheduler, training_data)
    refuse_model_parallelism(mpu, mesh_param, world.size)
    with not_building():
        engine = build_engine(model, optimizer, listed_parameters(model_parameters), lr_scheduler, source)
    zero.remember(engine)
    if world.rank == 0:
        compare_batch_sizes(args, engine.settings)
    loader = engine.deepspeed_io(training_data, collate_fn=collate_fn) if training_data is not None else None
    engine.training_dataloader = loader
    show_short()  # once more: monitors may have put hooks of theirs over it
    return engine, engine.optimizer, loader, engine.lr_scheduler
