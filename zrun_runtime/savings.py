"""What a config costs and saves, in words: bytes that a rank holds and sends, beside those without ZeRO."""

from __future__ import annotations

from collections.abc import Sequence

from zrun_runtime.config import Config
from zrun_runtime.memory import Footprint, Held, Keep, ModelSize, TierSettings, UnitSize, Widths, footprint, sent_bytes
from zrun_runtime.plan import StatePlan, TierKind

_UNITS = 1000  # of a model of which only bytes a parameter are asked: padding and small groups do not count
_NUMEL = 10**12
_NAMES = {"params": "parameters", "master": "master weights", "optimizer": "optimizer state"}


def plan_of(config: Config) -> StatePlan:
    """What a config asks for."""
    zero = config.zero
    return StatePlan.of_stage(
        zero.stage, TierKind.of(zero.offload_param.device), TierKind.of(zero.offload_optimizer.device)
    )


def footprint_of(config: Config, model: ModelSize, plan: StatePlan, one_memory: bool = False) -> Footprint:
    """What a rank of the config's world holds."""
    zero = config.zero
    keep = Keep(zero.param_persistence_threshold, zero.model_persistence_threshold)
    return footprint(model, Widths.of(config), plan, config.world_size, keep, TierSettings.of(config, one_memory))


def savings(config: Config, model: ModelSize, plan: StatePlan, one_memory: bool) -> str:
    """One line about a model: what a rank holds on its device between steps, and how much less that is.

    one_memory: it trains on CPUs.
    """
    held = footprint_of(config, model, plan, one_memory)
    whole = footprint_of(config, model, StatePlan.least_sharded(), one_memory).device.resident
    text = f"{in_words(held.device.resident)} a rank between steps"
    if held.device.resident < whole:
        text += f", {in_words(whole)} without ZeRO"
    away = [f"{in_words(h.resident)} on {name}" for h, name in _away(held) if h.resident]
    return ", ".join([text, *away])


def cost_lines(config: Config) -> list[str]:
    """What a config costs for a parameter, whatever the model: bytes of a rank by tier, and bytes sent in a step."""
    model = ModelSize(_NUMEL, (UnitSize(_NUMEL // _UNITS),) * _UNITS)
    plan, widths = plan_of(config), Widths.of(config)
    held, none = footprint_of(config, model, plan), StatePlan.least_sharded()
    whole = footprint_of(config, model, none).device.resident
    resident = held.device.resident
    kinds = [f"{name} {_each(vars(held.device)[kind])}" for kind, name in _NAMES.items() if vars(held.device)[kind]]
    if held.device.grads:
        when = "between micro-batches and in a step" if widths.accumulates else "in a step"
        kinds.append(f"gradients {_each(held.device.grads)} ({when})")
    times = f", {whole / resident:.1f} times less than without ZeRO" if 0 < resident < whole else ""
    lines = [
        f"a rank of {config.world_size} holds on its device, bytes a parameter: {'; '.join(kinds) or 'nothing'}",
        f"  between steps {_each(resident)}{times}; of 7 billion parameters {in_words(7 * resident // 1000)}",
    ]
    lines += [
        f"  on {name} {_each(nbytes)}; of 7 billion {in_words(7 * nbytes // 1000)}"
        for place, name in _away(held)
        if (nbytes := place.resident + place.grads)
    ]
    if config.world_size > 1:
        reduced, gathered = sent_bytes(model, widths, plan, config.world_size, config.accumulation_steps)
        lines.append(
            f"it sends in a step, bytes a parameter: {_each(reduced)} to reduce gradients, "
            f"{_each(gathered)} to gather {'parameters' if plan.shards_optimizer else 'them again'}"
        )
    return lines


def _away(held: Footprint) -> Sequence[tuple[Held, str]]:
    return (held.host, "the host"), (held.disk, "disk")


def _each(nbytes: int) -> str:
    return f"{nbytes / _NUMEL:.3g}"


def in_words(nbytes: float) -> str:
    """Bytes, for a person."""
    return f"{nbytes / 2**30:,.1f} GiB" if nbytes >= 2**29 else f"{nbytes / 2**20:,.1f} MiB"
