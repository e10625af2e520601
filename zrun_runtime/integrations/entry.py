"""`deepspeed.initialize` and what else stands at the top of that package."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import zrun_runtime
from zrun_runtime.integrations.comm import check_accelerate, init_distributed
from zrun_runtime.integrations.logs import log_dist
from zrun_runtime.integrations.optimizers import ParameterOffload
from zrun_runtime.ownership import home_of
from zrun_runtime.zero_model import ZeroModel


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
) -> tuple[zrun_runtime.Engine, torch.optim.Optimizer | None, DataLoader[Any] | None, Any]:
    """As zrun_runtime.initialize.

    Raises:
        DistributedError: accelerate counts other ranks than there are.
    """
    log_dist(f"DeepSpeed info: version={zrun_runtime.__version__} of zrun", ranks=[0])
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    check_accelerate()
    if isinstance(model, nn.Module):
        _put_hooks_back(model)
    built = zrun_runtime.initialize(
        args=args,
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        mpu=mpu,
        dist_init_required=False,
        collate_fn=collate_fn,
        config=config,
        mesh_param=mesh_param,
        config_params=config_params,
    )
    engine, stepped = built[:2]
    vars(engine)["none_if_nothing_loaded"] = True
    if stepped is not None and engine.zero_optimization_partition_weights():
        vars(stepped)["parameter_offload"] = ParameterOffload()
    return built


def _put_hooks_back(model: nn.Module) -> None:
    """Lightning takes every hook off a trained model before it is initialized once more, to be tested."""
    for home in {home_of(parameter) for parameter in model.parameters()} - {None}:
        if isinstance(home, ZeroModel) and home.hooks.gone:
            home.relay(home.groups, home.reducer.order)


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add --deepspeed and --deepspeed_config, which names the config for `initialize(args=...)`."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="train with it; for the script to read")
    group.add_argument("--deepspeed_config", type=str, default=None, help="the JSON config")
    return parser
