"""From a model, an optimizer and a config to an Engine: every decision is taken here, once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zrun_runtime.agreement import config_facts, model_facts, optimizer_facts, require_agreement
from zrun_runtime.call import refuse_nothing
from zrun_runtime.casting import cast_model, device_hints
from zrun_runtime.checkpointing import configure as configure_checkpointing
from zrun_runtime.collectives import Collectives
from zrun_runtime.config import AutoHints, Config, load_config, short_report
from zrun_runtime.config.zero_schema import OffloadOptimizerConfig, OffloadParamConfig
from zrun_runtime.distributed import World, current_world, first_world_size
from zrun_runtime.engine import Engine
from zrun_runtime.errors import EngineError
from zrun_runtime.grouping import GroupingPolicy
from zrun_runtime.leaves import leaves_of
from zrun_runtime.model_size import size_of
from zrun_runtime.optim import ParamGroups, ShardedOptimizer, as_param_groups, build_optimizer, group_numbers
from zrun_runtime.plan import StatePlan, TierKind
from zrun_runtime.precision import DtypePolicy
from zrun_runtime.savings import savings
from zrun_runtime.schedules import build_scheduler
from zrun_runtime.telemetry import notice
from zrun_runtime.tiers import REQUEST_BYTES, DiskSettings, OffloadSettings, on_every_rank
from zrun_runtime.tiers.host import allow_pinning
from zrun_runtime.window import Window
from zrun_runtime.zero_model import ZeroModel, ZeroSettings

OptimizerOrFactory = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None


def build_engine(
    model: nn.Module,
    optimizer: OptimizerOrFactory,
    model_parameters: Sequence[Any] | None,
    lr_scheduler: Any,
    source: Any,
) -> Engine:
    """See zrun_runtime.initialize."""
    _refuse_wrapped(model)
    world = current_world()
    config = load_config(source, world_size=world.size, auto=_hints(model, optimizer, world))
    if "activation_checkpointing" in config.raw:
        configure_checkpointing(checkpoint_in_cpu=config.activation_checkpointing.cpu_checkpointing)
    policy = DtypePolicy.from_config(config)
    cast_model(model, world, policy, config)
    if optimizer is not None and config.optimizer is not None and world.rank == 0:
        notice("warning", f"optimizer.type {config.optimizer.type}: not used, as initialize() was given an optimizer")
    if not isinstance(optimizer, torch.optim.Optimizer) and (optimizer is not None or config.optimizer is not None):
        refuse_nothing(model_parameters, model)
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(list(model_parameters) if model_parameters is not None else _trainable(model))
    groups = _param_groups(model, optimizer, model_parameters, config)
    collectives, numbers, settings = Collectives(world), group_numbers(groups), _settings(config, policy, model)
    facts = [*config_facts(config), *optimizer_facts(optimizer, groups), *model_facts(model, numbers, settings.leaves)]
    require_agreement(collectives, collectives.register("initialize"), "initialize", facts)
    zero = ZeroModel(model, numbers, settings, collectives)
    updater = _updater(optimizer, groups, zero, config)
    scheduler = _scheduler(lr_scheduler, updater, config, world)
    engine = Engine(model, zero, updater, scheduler, config, collectives)
    _announce(engine)
    return engine


def _refuse_wrapped(model: nn.Module) -> None:
    """What reduces gradients already would do it twice."""
    for name, module in model.named_modules():
        fully_sharded = type(module).__module__.startswith("torch.distributed.fsdp")
        if isinstance(module, (Engine, DistributedDataParallel, nn.DataParallel)) or fully_sharded:
            raise EngineError(
                f"initialize: {name or 'the model'} is a {type(module).__name__}, which reduces gradients itself",
                "pass the plain model: the .module of it; an earlier engine over it needs a destroy() first",
            )


def _hints(model: nn.Module, optimizer: OptimizerOrFactory, world: World) -> AutoHints:
    """What "auto" in a config can be resolved from."""
    shape = getattr(model, "config", None)
    shape = getattr(shape, "text_config", None) or shape  # of models that see and hear, too
    width = getattr(shape, "hidden_size", None) or max(getattr(shape, "hidden_sizes", None) or [0]) or None
    rates = [g["lr"] for g in optimizer.param_groups] if isinstance(optimizer, torch.optim.Optimizer) else []
    return replace(
        device_hints(world),
        world_size=world.size,
        first_world_size=first_world_size(),
        hidden_size=width if isinstance(width, int) else None,
        model_numel=sum(p.numel() for p in model.parameters()),
        learning_rate=float(rates[0]) if rates else None,
    )


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _param_groups(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    model_parameters: Iterable[Any] | None,
    config: Config,
) -> ParamGroups:
    """The optimizer groups to train, as dicts; none if nothing will update them."""
    if optimizer is not None:
        return optimizer.param_groups
    if config.optimizer is None:
        return []
    given = as_param_groups(model_parameters) if model_parameters is not None else [{"params": _trainable(model)}]
    groups = [{**g, "params": [p for p in g["params"] if p.requires_grad]} for g in given]
    return [group for group in groups if group["params"]]


def _settings(config: Config, policy: DtypePolicy, model: nn.Module) -> ZeroSettings:
    zero = config.zero
    allow_pinning(zero.offload_optimizer.pin_memory and zero.offload_param.pin_memory)
    return ZeroSettings(
        plan=StatePlan.of_stage(
            zero.stage, params=_tier(zero.offload_param.device), optimizer=_tier(zero.offload_optimizer.device)
        ),
        grouping=GroupingPolicy(
            zero.reduce_bucket_size, zero.param_persistence_threshold, zero.model_persistence_threshold
        ),
        prefetch_numel=zero.prefetch_bucket_size,
        live_numel=zero.max_live_parameters,
        wire_dtype=policy.reduce_dtype,
        window=Window(
            config.accumulation_steps,
            policy.accum_dtype,
            config.managed_gradient_accumulation,
            sums=config.gradient_allreduce_op == "sum",
        ),
        clip=config.gradient_clipping,
        leaves=leaves_of(model, zero.leaf_module),
        offload=_offload(config),
        shard_disk=_disk(config, "offload_param", zero.offload_param),
        shard_buffers=zero.offload_param.buffer_count,
        shards_in_memory=zero.offload_param.max_in_cpu,
    )


def _tier(device: str) -> TierKind:
    return TierKind.DEVICE if device == "none" else TierKind(device)


def _offload(config: Config) -> OffloadSettings | None:
    """How the optimizer's state is kept off the device."""
    section = config.zero.offload_optimizer
    if section.device == "none":
        return None
    return OffloadSettings(
        tile_numel=max(64, config.zero.sub_group_size // 64 * 64),
        disk=_disk(config, "offload_optimizer", section),
        buffer_count=section.buffer_count,
        share=section.ratio,
    )


def _disk(config: Config, name: str, section: OffloadOptimizerConfig | OffloadParamConfig) -> DiskSettings | None:
    """Where and how a section's NVMe is used; None if it names no NVMe."""
    if section.device != "nvme":
        return None
    aio = config.aio
    return DiskSettings(
        path=section.nvme_path or "",
        key=f"zero_optimization.{name}.nvme_path",
        threads=min(aio.queue_depth, max(aio.intra_op_parallelism, aio.thread_count)),
        request_bytes=max(REQUEST_BYTES, aio.block_size),
    )


def _updater(
    optimizer: torch.optim.Optimizer | None, groups: ParamGroups, zero: ZeroModel, config: Config
) -> ShardedOptimizer | None:
    """The optimizer over this rank's master weights."""
    if optimizer is None:
        if config.optimizer is None or not groups:
            return None
        masters = [
            {**options, "params": [g.master for g in zero.groups if g.spec.optimizer_group == number]}
            for number, options in enumerate(groups)
        ]
        optimizer = build_optimizer(config.optimizer.type, config.optimizer.params, masters)
    made, offload = optimizer, zero.settings.offload
    if offload is None or offload.disk is None:
        return ShardedOptimizer(made, zero.groups, offload)
    return on_every_rank(lambda: ShardedOptimizer(made, zero.groups, offload), zero.agree)


def _scheduler(lr_scheduler: Any, updater: ShardedOptimizer | None, config: Config, world: World) -> Any:
    """The caller's scheduler, else the config's, else None."""
    if updater is None:
        return lr_scheduler
    if lr_scheduler is not None:
        if config.scheduler is not None and world.rank == 0:
            notice(
                "warning", f"scheduler.type {config.scheduler.type}: not used, as initialize() was given a scheduler"
            )
        schedule = lr_scheduler if hasattr(lr_scheduler, "step") else lr_scheduler(updater.optimizer)
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) and world.rank == 0:
            text = "the engine steps it where it is told a measure: engine.step(lr_kwargs={'metrics': ...})"
            notice("info", f"ReduceLROnPlateau: {text}; else call its step yourself")
        return schedule
    return build_scheduler(config.scheduler, updater.optimizer) if config.scheduler is not None else None


def _announce(engine: Engine) -> None:
    """Say what was built: to the console, and the config's notes once, on rank 0."""
    world, config = engine.world, engine.settings
    trained = sum(p.numel() for g in engine.zero.groups if g.master is not None for p in g.spec.parameters)
    engine.progress.started(
        {
            "model": f"{sum(p.numel() for p in engine.module.parameters()):,} parameters, {trained:,} trained",
            "zero": f"stage {config.zero.stage}, {len(engine.zero.groups)} groups",
            "memory": savings(config, size_of(engine.module), engine.zero.settings.plan, world.device.type == "cpu"),
            "precision": config.precision,
            "batch": f"{config.train_batch_size} = {config.micro_batch_size} x {config.accumulation_steps} steps"
            f" x {world.size} ranks",
            "device": f"{world.device.type}, {world.backend}",
        }
    )
    if world.rank == 0:
        for line in short_report(config):
            notice("info", line)
        _tell_of_unasked_types(engine)


def _tell_of_unasked_types(engine: Engine) -> None:
    """Parameters that came in 16 bits stay so; without a section of the config the loss of fp16 is not scaled."""
    if engine.settings.precision != "fp32":
        return
    trained = {p.dtype for g in engine.zero.groups if g.master is not None for p in g.spec.parameters}
    if torch.float16 in trained and engine.loss_scale() == 1.0:
        text = "and the loss is not scaled, so small gradients vanish: enable the section fp16, or give it in fp32"
        notice("warning", f"the model came in fp16, the config has no section for it: it is trained as it is, {text}")
    elif torch.bfloat16 in trained:
        text = "with fp32 master weights: enable the section bf16 to say so, or give it in fp32"
        notice("info", f"the model came in bf16, the config has no section for it: it is trained as it is, {text}")
