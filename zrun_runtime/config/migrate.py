"""Old and foreign spellings become today's keys; each change is noted."""

from __future__ import annotations

from typing import Any

from zrun_runtime.config.accelerate import from_accelerate, is_accelerate
from zrun_runtime.config.keys import Section, section_of
from zrun_runtime.config.notes import Ledger
from zrun_runtime.config.schema import Document
from zrun_runtime.config.source import Source

ZERO = "zero_optimization"
_GATHER = "stage3_gather_16bit_weights_on_model_save"
_OFFLOAD_FLAGS = (
    ("cpu_offload", "offload_optimizer"),
    ("cpu_offload_param", "offload_param"),
    ("cpu_offload_params", "offload_param"),
)


def modernise(source: Source, ledger: Ledger) -> dict[str, Any]:
    """A copy of the source's data in today's spelling; what contradicts itself becomes a problem."""
    data = _copy(source.data)
    if is_accelerate(data):
        data = from_accelerate(data, source.folder, ledger)
    _rename(data, "bfloat16", "bf16", "", ledger)
    _zero_flag(data, ledger)
    if data.pop("fp32_allreduce", None):
        _move(data, "fp32_allreduce", "communication_data_type", "fp32", "", ledger)
    _tidy(data, Document, "", ledger)
    zero = data.get(ZERO)
    if isinstance(zero, dict):
        _offload_flags(zero, ledger)
        _rename(zero, "stage3_gather_fp16_weights_on_model_save", _GATHER, ZERO, ledger)
    _clip_in_optimizer(data, ledger)
    return data


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copy(item) for name, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _move(data: dict[str, Any], old: str, new: str, value: Any, section: str, ledger: Ledger) -> None:
    """Write `value` to the key `new`, which stands for `old`."""
    place = f"{section}.{old}".lstrip(".")
    if new in data and data[new] != value:
        ledger.problem(place, f"is an old spelling of {new}, which is given too and says something else: remove {old}")
        return
    data[new] = value
    today = f"{section}.{new}".lstrip(".")
    ledger.moved(place, today)
    ledger.note(place, "migrated", f"is now {today}", value)


def _rename(data: dict[str, Any], old: str, new: str, section: str, ledger: Ledger) -> None:
    if old in data:
        _move(data, old, new, data.pop(old), section, ledger)


def _zero_flag(data: dict[str, Any], ledger: Ledger) -> None:
    """zero_optimization: true was stage 1, with its bucket size at the top level."""
    flag = data.get(ZERO)
    size = data.pop("allgather_size", None)
    if isinstance(flag, bool):
        data[ZERO] = {"stage": int(flag)}
        ledger.note(ZERO, "migrated", f"{str(flag).lower()} is now stage {int(flag)}", int(flag))
    if size is not None:
        zero = data.setdefault(ZERO, {})
        if isinstance(zero, dict):
            _move(zero, "allgather_size", "allgather_bucket_size", size, ZERO, ledger)


def _offload_flags(zero: dict[str, Any], ledger: Ledger) -> None:
    for old, new in _OFFLOAD_FLAGS:
        if old not in zero:
            continue
        flag = zero.pop(old)
        if not isinstance(flag, bool):
            ledger.problem(f"{ZERO}.{old}", f'must be true or false; today it is "{new}": {{"device": "cpu"}}')
        elif not flag:
            ledger.note(f"{ZERO}.{old}", "migrated", f"false is the same as no {new}", False)
        elif isinstance(zero.get(new), dict) and zero[new].get("device", "cpu") == "cpu":
            zero[new]["device"] = "cpu"
            ledger.note(f"{ZERO}.{old}", "migrated", f"{new} says it already", True)
        else:
            _move(zero, old, new, {"device": "cpu"}, ZERO, ledger)
    if zero.pop("cpu_offload_use_pin_memory", None) is not None:
        ledger.note(f"{ZERO}.cpu_offload_use_pin_memory", "migrated", "is now pin_memory of the offload sections")


def _clip_in_optimizer(data: dict[str, Any], ledger: Ledger) -> None:
    """max_grad_norm among the optimizer's arguments is what gradient_clipping is today."""
    section = data.get("optimizer")
    params = section.get("params") if isinstance(section, dict) else None
    if isinstance(params, dict) and "max_grad_norm" in params:
        value, place = params.pop("max_grad_norm"), "optimizer.params.max_grad_norm"
        said = data.setdefault("gradient_clipping", value)
        if said == value:
            ledger.moved(place, "gradient_clipping")
            ledger.note(place, "migrated", "is now gradient_clipping", value)
        else:
            ledger.problem(place, f"is {value}, but gradient_clipping is {said}: remove max_grad_norm")


def _tidy(data: dict[str, Any], kind: type[Section], path: str, ledger: Ledger) -> None:
    """null or false stands for a section that is not there; short names become the full ones."""
    for name, field in kind.model_fields.items():
        if field.alias is not None and name in data:
            if field.alias in data:
                place = f"{path}.{name}".lstrip(".")
                ledger.problem(place, f"is given twice: as {name} and as {field.alias}; keep one")
                del data[name]
            else:
                data[field.alias] = data.pop(name)
                ledger.moved(f"{path}.{name}".lstrip("."), f"{path}.{field.alias}".lstrip("."))
        inner = section_of(field)
        if inner is None or name not in data:
            continue
        if data[name] is None:
            del data[name]
        elif data[name] is False:
            ledger.note(f"{path}.{name}".lstrip("."), "migrated", "false is the same as leaving it out", data.pop(name))
        elif isinstance(data[name], dict):
            _tidy(data[name], inner, f"{path}.{name}".lstrip("."), ledger)
