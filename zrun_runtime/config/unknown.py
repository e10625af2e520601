"""Keys that are not in the schema: a misspelt one is refused, a foreign one is told and left alone."""

from __future__ import annotations

from typing import Any

from zrun_runtime.config.keys import Section, field_names, section_of
from zrun_runtime.config.names import nearest
from zrun_runtime.config.notes import Ledger
from zrun_runtime.config.optimizers import OPTIMIZERS
from zrun_runtime.config.schedulers import SCHEDULERS
from zrun_runtime.config.schema import DataTypesConfig, Document
from zrun_runtime.config.zero_schema import ZeroConfig

NOT_KNOWN = "not a key of this config, not read"
_MEANT = {
    "max_grad_norm": "clipping is gradient_clipping",
    "learning_rate": "it is optimizer.params.lr",
    "lr": "it is optimizer.params.lr",
    "precision": 'it is "bf16": {"enabled": true}',
    "fp8": 'there is none here: use "bf16": {"enabled": true}',
    "batch_size": "it is train_batch_size or train_micro_batch_size_per_gpu",
    "micro_batch_size": "it is train_micro_batch_size_per_gpu",
    "zero_stage": "it is zero_optimization.stage",
    "grad_clip": "clipping is gradient_clipping",
    "clip_grad": "clipping is gradient_clipping",
    "weight_decay": "it is optimizer.params.weight_decay",
}
_ARGUMENTS = {"optimizer": OPTIMIZERS, "scheduler": SCHEDULERS}


def drop_unknown(data: dict[str, Any], strict: bool, ledger: Ledger) -> None:
    """Take keys that are not known out of data.

    A key near a known one becomes a problem, any other a note (strict: a problem too). What else an open-ended section
    holds is taken out without a word: its note says that nothing of it is read.
    """
    _drop(data, Document, "", strict, ledger)


def _drop(data: dict[str, Any], kind: type[Section], path: str, strict: bool, ledger: Ledger) -> None:
    fields = field_names(kind)
    for name in list(data):
        place = f"{path}.{name}".lstrip(".")
        if name in fields:
            inner = section_of(fields[name])
            if inner is not None and isinstance(data[name], dict):
                _drop(data[name], inner, place, strict, ledger)
            continue
        value = data.pop(name)
        near = None if kind.open_ended else nearest(name, fields)
        if kind.open_ended:
            continue
        if near is not None:
            ledger.problem(place, f"unknown key; did you mean {near}?")
        elif strict:
            ledger.problem(place, f"unknown key{_meant(name, path, value)}")
        else:
            ledger.note(place, "unknown", f"{NOT_KNOWN}{_meant(name, path, value)}", value)


def _meant(name: str, path: str, value: Any) -> str:
    """Where a key belongs that stands in the wrong place."""
    if not path and name in _MEANT:
        return f"; {_MEANT[name]}"
    if any(name in takes for takes in _ARGUMENTS.get(path, {}).values()):
        return f"; it belongs in {path}.params.{name}"
    for section, kind in (("zero_optimization", ZeroConfig), ("data_types", DataTypesConfig)):
        if path != section and name in field_names(kind):
            return f"; it belongs in {section}.{name}"
    if not path and isinstance(value, dict) and not field_names(Document).keys().isdisjoint(value):
        return "; what it holds belongs at the top level"
    return ""
