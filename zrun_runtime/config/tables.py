"""The table of all keys as Markdown, for docs/config.md."""

from __future__ import annotations

from collections.abc import Iterator

from zrun_runtime.config.arguments import Argument
from zrun_runtime.config.keys import HONOURED, NO_EFFECT, KeyEffect, Section, effect_of, field_names, section_of
from zrun_runtime.config.notes import shown
from zrun_runtime.config.optimizers import OPTIMIZERS
from zrun_runtime.config.schedulers import SCHEDULERS, TORCH_SCHEDULERS
from zrun_runtime.config.schema import Document

_WORDS = {HONOURED: "honoured", NO_EFFECT: "no effect here"}
_ELSEWHERE = "see the tables below"


def key_tables() -> str:
    """Every key with its default, its effect and why; then optimizers and schedules with their arguments."""
    lines = [
        "| key | default | effect | what it does, or why it has no effect, or what to use instead |",
        "|---|---|---|---|",
    ]
    lines += _rows(Document, "")
    lines += ["", "| optimizer | arguments and defaults |", "|---|---|"]
    lines += [f"| {name} | {_arguments(known)} |" for name, known in OPTIMIZERS.items()]
    lines += ["", "| schedule | arguments and defaults |", "|---|---|"]
    lines += [f"| {name} | {_arguments(known)} |" for name, known in {**SCHEDULERS, **TORCH_SCHEDULERS}.items()]
    return "\n".join(lines) + "\n"


def _rows(kind: type[Section], path: str) -> Iterator[str]:
    for name, field in field_names(kind).items():
        place, inner, effect = f"{path}.{name}".lstrip("."), section_of(field), effect_of(field)
        if inner is None:
            default = "(required)" if field.is_required() else _shown(field.get_default(call_default_factory=True))
            yield f"| `{place}` | {default} | {_word(effect)} | {_cell(effect.sentence if effect else _ELSEWHERE)} |"
            continue
        speaks = effect is not None and effect.effect == NO_EFFECT
        silent = [f"`{key}`" for key, item in field_names(inner).items() if effect_of(item) is None]
        if effect is not None and speaks and silent:
            yield f"| **`{place}`**: {', '.join(silent)} | | {_word(effect)} | {_cell(effect.sentence)} |"
        if not speaks or len(silent) < len(field_names(inner)):
            yield from _rows(inner, place)


def _word(effect: KeyEffect | None) -> str:
    if effect is None:
        return "honoured"
    word = _WORDS.get(effect.effect, "refused unless off")
    return f"{word} (stage {', '.join(map(str, effect.stages))})" if effect.stages else word


def _shown(default: object) -> str:
    return "" if default is None else f"`{shown(default)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _arguments(known: dict[str, Argument]) -> str:
    words = []
    for name, item in known.items():
        value = " (required)" if item.required else f" {shown(item.default)}" if item.has_default else ""
        words.append(f"`{name}`{value}")
    return ", ".join(words)
