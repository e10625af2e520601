"""The config as the engine sees it: everything resolved, nothing left to ask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from zrun_runtime.config.extras_schema import (
    ActivationCheckpointingConfig,
    AioConfig,
    CheckpointConfig,
    CometConfig,
    CsvMonitorConfig,
    TensorboardConfig,
    WandbConfig,
)
from zrun_runtime.config.notes import Note
from zrun_runtime.config.schema import Bf16Config, Fp16Config
from zrun_runtime.config.zero_schema import ZeroConfig

Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class OptimizerConfig:
    """type: a class of torch.optim by its exact name. params: its keyword arguments, checked; defaults filled in."""

    type: str
    params: dict[str, Any]


@dataclass(frozen=True)
class SchedulerConfig:
    """type: one of schedules.SCHEDULES, or a class of torch.optim.lr_scheduler. params: its keyword arguments."""

    type: str
    params: dict[str, Any]


@dataclass(frozen=True)
class MonitorsConfig:
    """Where the numbers of every step go."""

    tensorboard: TensorboardConfig
    csv_monitor: CsvMonitorConfig
    wandb: WandbConfig
    comet: CometConfig


@dataclass(frozen=True)
class Config:
    """One run's settings. train_batch_size == micro_batch_size * accumulation_steps * world_size, always."""

    world_size: int
    train_batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    gradient_clipping: float  # L2 norm over the whole model; 0 turns it off
    managed_gradient_accumulation: bool  # False: every step is an update
    steps_per_print: int | None  # None: never
    precision: Precision
    zero: ZeroConfig
    fp16: Fp16Config
    bf16: Bf16Config
    grad_accum_dtype: str | None  # fp32, bf16, fp16; None: fp32 where accumulation is above 1
    autocast_dtype: str | None  # the forward runs under torch.autocast of it: bf16, fp16; None: it does not
    buffer_dtype: str | None  # of floating-point buffers: fp32, bf16, fp16; None: their own
    keep_in_fp32_modules: tuple[str, ...] | Literal["auto"]  # names of modules whose parameters stay fp32
    communication_data_type: str | None  # fp32, bf16, fp16; None: the type of the gradients
    optimizer: OptimizerConfig | None
    scheduler: SchedulerConfig | None
    aio: AioConfig
    activation_checkpointing: ActivationCheckpointingConfig
    monitors: MonitorsConfig
    checkpoint: CheckpointConfig
    prescale_gradients: bool
    gradient_predivide_factor: float
    gradient_allreduce_op: Literal["mean", "sum"]
    dataloader_drop_last: bool
    wall_clock_breakdown: bool
    raw: dict[str, Any]  # what the user gave, as JSON types
    notes: tuple[Note, ...]  # the effect report
    origin: str  # where it came from, for messages
    left_open: frozenset[str] = frozenset()  # precision, batch: "auto" where only the program's run can tell

    @property
    def scales_loss(self) -> bool:
        """Gradients are computed in fp16 somewhere, so the loss is scaled."""
        return "fp16" in (self.precision, self.autocast_dtype)
