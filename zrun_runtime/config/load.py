"""load_config: from what the user wrote to a Config, or to every reason why not, in one error."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zrun_runtime.config.auto import defer_auto, open_questions, refuse_auto, resolve_auto
from zrun_runtime.config.batch import BatchSizes, resolve_batch
from zrun_runtime.config.effects import report
from zrun_runtime.config.hints import AutoHints
from zrun_runtime.config.migrate import modernise
from zrun_runtime.config.notes import Ledger
from zrun_runtime.config.optimizers import read_optimizer
from zrun_runtime.config.places import Places
from zrun_runtime.config.resolved import Config, MonitorsConfig
from zrun_runtime.config.rules import autocast_dtype_of, check_rules, precision_of, tell_of_conditions
from zrun_runtime.config.schedulers import read_scheduler
from zrun_runtime.config.schema import Document
from zrun_runtime.config.source import Source, read_source
from zrun_runtime.config.unknown import drop_unknown
from zrun_runtime.config.validate import validate


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    world_size: int | None = None,
    auto: AutoHints | None = None,
    strict: bool = False,
    defer: bool = False,
) -> Config:
    """Read a config and resolve everything in it.

    Args:
        source: path of a JSON or YAML file, dict (never changed), or JSON text in base64.
        world_size: ranks of the job; without it and without a hint, the one that fits the batch keys, else 1.
        auto: what "auto" is resolved from.
        strict: refuse keys that are not known, rather than note them.
        defer: leave an "auto" that nothing decides to the program (its key is then missing), rather than refuse it.

    Raises:
        ConfigError: the source cannot be read.
        InvalidConfig: (a ConfigError) it asks for what cannot be; `problems` lists everything that is wrong.
    """
    hints = auto or AutoHints()
    found = read_source(source)
    ledger = Ledger(found.origin, Places(found.lines))
    data = modernise(found, ledger)
    drop_unknown(data, strict, ledger)
    left_open = open_questions(data, hints) if defer else frozenset()
    unresolved = resolve_auto(data, hints, ledger)
    (defer_auto if defer else refuse_auto)(unresolved, ledger)
    document = validate(data, ledger)
    tell_of_conditions(document, data, ledger)
    report(document, data, ledger)
    check_rules(document, data, ledger)
    batch = _batch(document, world_size or hints.world_size, hints, ledger)
    optimizer = read_optimizer(document.optimizer, ledger)
    scheduler = read_scheduler(document.scheduler, hints.total_steps, frozenset(unresolved), ledger)
    ledger.raise_problems()
    config = _config(document, batch, found, ledger)
    return replace(config, optimizer=optimizer, scheduler=scheduler, left_open=left_open)


def _config(document: Document, batch: BatchSizes, found: Source, ledger: Ledger) -> Config:
    """The settings of a document in which nothing is wrong, without optimizer and scheduler."""
    return Config(
        world_size=batch.world_size,
        train_batch_size=batch.total,
        micro_batch_size=batch.micro,
        accumulation_steps=batch.steps,
        managed_gradient_accumulation=document.managed_gradient_accumulation,
        gradient_clipping=document.gradient_clipping,
        steps_per_print=document.steps_per_print,
        precision=precision_of(document),
        zero=document.zero_optimization,
        fp16=document.fp16,
        bf16=document.bf16,
        grad_accum_dtype=document.data_types.grad_accum_dtype,
        autocast_dtype=autocast_dtype_of(document),
        buffer_dtype=document.data_types.buffer_dtype,
        keep_in_fp32_modules=document.data_types.keep_in_fp32_modules or (),
        communication_data_type=document.communication_data_type,
        optimizer=None,
        scheduler=None,
        aio=document.aio,
        activation_checkpointing=document.activation_checkpointing,
        monitors=MonitorsConfig(document.tensorboard, document.csv_monitor, document.wandb, document.comet),
        checkpoint=document.checkpoint,
        prescale_gradients=document.prescale_gradients,
        gradient_predivide_factor=document.gradient_predivide_factor,
        gradient_allreduce_op=document.gradient_allreduce_op,
        dataloader_drop_last=document.dataloader_drop_last,
        wall_clock_breakdown=document.wall_clock_breakdown,
        raw=found.data,
        notes=tuple(ledger.notes),
        origin=found.origin,
    )


def _batch(document: Document, world_size: int | None, hints: AutoHints, ledger: Ledger) -> BatchSizes:
    """The batch sizes. The hint of a micro batch is used where neither train_batch_size nor a micro batch is given."""
    total, micro = document.train_batch_size, document.train_micro_batch_size_per_gpu
    if total is None and micro is None:
        micro = hints.micro_batch
    steps, first = document.gradient_accumulation_steps, hints.first_world_size
    return resolve_batch(total, micro, steps, world_size, ledger, first)
