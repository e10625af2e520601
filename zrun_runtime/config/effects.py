"""The effect report: for every key the user wrote, what it does here, or why its value is refused."""

from __future__ import annotations

from typing import Any

from zrun_runtime.config.keys import NO_EFFECT, UNSUPPORTED, KeyEffect, Section, effect_of, field_names
from zrun_runtime.config.notes import Ledger
from zrun_runtime.config.schema import Document

_SECRETS = ("api_key",)


def report(document: Document, data: dict[str, Any], ledger: Ledger) -> None:
    """A note on the effect of every key in data; a problem for each value that is refused."""
    _report(document, data, "", document.zero_optimization.stage, ledger)


def _report(section: Section, data: dict[str, Any], path: str, stage: int, ledger: Ledger) -> None:
    for written, field in field_names(type(section)).items():
        effect = effect_of(field)
        if written not in data or effect is None:
            continue
        place = f"{path}.{written}".lstrip(".")
        value = getattr(section, _attribute(section, written))
        if isinstance(value, Section):
            _report_section(value, effect, data[written], place, stage, ledger)
        elif effect.effect == UNSUPPORTED and value not in effect.harmless and effect.has_meaning(stage):
            ledger.problem(place, effect.sentence)
        elif effect.effect == UNSUPPORTED and value not in effect.harmless:
            ledger.note(place, *effect.at(stage), value)
        elif effect.effect == UNSUPPORTED:
            ledger.note(place, "no_effect", "it is off", value)
        elif value is not None and not ledger.has_note(place):
            ledger.note(place, *effect.at(stage), "(a secret)" if written in _SECRETS else value)


def _attribute(section: Section, written: str) -> str:
    return next(name for name, field in type(section).model_fields.items() if (field.alias or name) == written)


def _report_section(section: Section, effect: KeyEffect, data: Any, place: str, stage: int, ledger: Ledger) -> None:
    if is_off(section):
        if not ledger.has_note(f"{place}.enabled"):  # else it is "auto", of which everything is said
            ledger.note(place, "no_effect", "it is off", False)
        return
    kind, sentence = effect.at(stage)
    if kind == "no_effect" or effect.effect == NO_EFFECT:
        ledger.note(place, kind, sentence)
    if isinstance(data, dict):
        _report(section, data, place, stage, ledger)


def is_off(section: Section) -> bool:
    """Whether a section says of itself that it is not in use."""
    return getattr(section, "enabled", None) is False or getattr(section, "device", None) == "none"
