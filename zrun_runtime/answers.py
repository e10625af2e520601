"""What an engine answers about itself, under the names of DeepSpeed's engine: its config, its ranks, its rates."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zrun_runtime.collectives import Collectives
from zrun_runtime.config_answers import ConfigAnswers
from zrun_runtime.distributed import World
from zrun_runtime.optim import ShardedOptimizer
from zrun_runtime.precision import DTYPES, DtypePolicy
from zrun_runtime.window import Window
from zrun_runtime.zero_model import ZeroModel

_MOMENTUM_IN_BETAS = "betas"


class EngineAnswers(ConfigAnswers):
    """Questions only: nothing here changes anything. `Engine` sets the fields."""

    module: nn.Module
    zero: ZeroModel
    collectives: Collectives
    updater: ShardedOptimizer | None
    global_steps: int
    skipped_steps: int

    @property
    def window(self) -> Window:
        """The micro-batches of an update."""
        return self.zero.settings.window

    # ---- the ranks

    @property
    def world(self) -> World:
        """The ranks that train together."""
        return self.collectives.world

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.world.device

    @property
    def global_rank(self) -> int:
        """The number of this rank among all."""
        return self.world.rank

    @property
    def local_rank(self) -> int:
        """The number of this rank among those of its host."""
        return self.world.local_rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.world.size

    dp_world_size = seq_dp_world_size = world_size  # every rank is a data-parallel rank

    @property
    def mp_world_size(self) -> int:
        """Ranks that share one copy of the model's computation: always 1."""
        return 1

    @property
    def data_parallel_group(self) -> torch.distributed.ProcessGroup | None:
        """The process group of the ranks that train together."""
        return self.world.data

    dp_process_group = seq_data_parallel_group = data_parallel_group

    def get_sequence_parallel_group(self) -> None:
        """None: a sequence is never split over ranks."""

    # ---- optimizer and schedule

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The torch optimizer over this rank's master weights."""
        return self.updater.optimizer if self.updater is not None else None

    basic_optimizer = client_optimizer = optimizer  # there is one object, the caller's own if one was given

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's: with it, `defaults` and `state` an engine can stand where an optimizer is asked for."""
        return self.optimizer.param_groups if self.optimizer else []

    @property
    def defaults(self) -> dict[str, Any]:
        """The optimizer's."""
        return self.optimizer.defaults if self.optimizer else {}

    @property
    def state(self) -> Any:
        """The optimizer's, of this rank's master weights."""
        return self.optimizer.state if self.optimizer else {}

    def _of_groups(self, name: str, default: Any) -> list[Any]:
        return [group.get(name, default) for group in self.optimizer.param_groups] if self.optimizer else []

    def get_lr(self) -> list[Any]:
        """The learning rate of each optimizer group."""
        return self._of_groups("lr", 0.0)

    def get_mom(self) -> list[Any]:
        """Of each optimizer group its betas, or its momentum where it has no betas."""
        return [
            group.get(_MOMENTUM_IN_BETAS, group.get("momentum", 0.0))
            for group in (self.optimizer.param_groups if self.optimizer else [])
        ]

    def get_type(self) -> list[Any]:
        """Of each optimizer group its "type", or the name of the optimizer where it has none."""
        return self._of_groups("type", type(self.optimizer).__name__)

    def optimizer_name(self) -> str | None:
        """The config's optimizer; None if it names none."""
        return self.settings.optimizer.type if self.settings.optimizer else None

    def optimizer_params(self) -> dict[str, Any] | None:
        """The config's arguments of the optimizer."""
        return dict(self.settings.optimizer.params) if self.settings.optimizer else None

    def scheduler_name(self) -> str | None:
        """The config's schedule; None if it names none."""
        return self.settings.scheduler.type if self.settings.scheduler else None

    def scheduler_params(self) -> dict[str, Any] | None:
        """The config's arguments of the schedule."""
        return dict(self.settings.scheduler.params) if self.settings.scheduler else None

    @property
    def param_names(self) -> dict[nn.Parameter, str]:
        """The name of each parameter of the model."""
        return {parameter: name for name, parameter in self.module.named_parameters()}

    @property
    def gradient_average(self) -> bool:
        """A gradient is the mean over ranks, not their sum."""
        return not self.window.sums

    # ---- batch sizes

    def train_batch_size(self) -> int:
        """Samples of all ranks in one optimizer step."""
        return self.settings.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one rank in one forward."""
        return self.settings.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Backwards per optimizer step."""
        return self.settings.accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """(samples a step, samples a forward on one rank, backwards a step)."""
        return self.settings.train_batch_size, self.settings.micro_batch_size, self.settings.accumulation_steps

    def is_gradient_accumulation_boundary(self) -> bool:
        """The backward that runs now, or the next one, is the last before an update."""
        return self.window.at_boundary

    @property
    def inside_no_sync_ctxt(self) -> bool:
        """Gradients stay on this rank for now."""
        return self.window.held

    # ---- the config

    @property
    def config(self) -> dict[str, Any]:
        """The config as it was given."""
        return self.settings.raw

    def fp16_enabled(self) -> bool:
        """Parameters are fp16."""
        return self.settings.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Parameters are bf16."""
        return self.settings.precision == "bf16"

    def fp16_auto_cast(self) -> bool:
        """Inputs of the model are cast to fp16."""
        return self.fp16_enabled() and self.settings.fp16.auto_cast

    def dynamic_loss_scale(self) -> bool:
        """The loss scale adapts."""
        return self.settings.scales_loss and self.settings.fp16.loss_scale == 0

    def initial_dynamic_scale(self) -> float:
        """The loss scale before the first step."""
        return float(2**self.settings.fp16.initial_scale_power)

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """(of the parameters, in which gradients are added up)."""
        own = DTYPES[self.settings.precision]
        return own, DtypePolicy.from_config(self.settings).accum_dtype or own

    @property
    def communication_data_type(self) -> torch.dtype:
        """Gradients travel in it."""
        policy = DtypePolicy.from_config(self.settings)
        return policy.reduce_dtype or self.get_data_types()[1]

    # ---- ZeRO

    def zero_optimization(self) -> bool:
        """Something is sharded."""
        return self.zero.settings.plan.shards_optimizer

    def zero_optimization_stage(self) -> int:
        """The configured ZeRO stage."""
        return self.settings.zero.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """Gradients are sharded."""
        return self.zero.settings.plan.reduces_each_backward

    def zero_optimization_partition_weights(self) -> bool:
        """Parameters are sharded."""
        return self.zero.settings.plan.shards_params

    def zero_offload_optimizer(self) -> Any:
        """The config's section of this name; None if it is off."""
        section = self.settings.zero.offload_optimizer
        return section if section.device != "none" else None

    def zero_offload_param(self) -> Any:
        """The config's section of this name; None if it is off."""
        section = self.settings.zero.offload_param
        return section if section.device != "none" else None
