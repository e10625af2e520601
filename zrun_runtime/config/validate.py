"""Types and ranges: pydantic's findings in our words, all of them at once."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from zrun_runtime.config.notes import Ledger, shown
from zrun_runtime.config.schema import Document


def validate(data: dict[str, Any], ledger: Ledger) -> Document:
    """Read data. Each key at fault becomes a problem and is taken out of data; the rest is what is returned."""
    told: set[str] = set()
    while True:
        try:
            return Document.model_validate(data)
        except ValidationError as error:
            for fault in error.errors(include_url=False):
                place = _take_out(data, fault["loc"], fault["type"] == "missing")
                if place not in told:  # what was taken out is missing when the rest is read again
                    ledger.problem(place, _sentence(fault))
                told.add(place)


def _take_out(data: dict[str, Any], location: tuple[int | str, ...], missing: bool) -> str:
    """Remove the key that a fault is about (if one is missing, the section that lacks it) and return its path.

    A location may go on into a list or a choice of types; the key is the last one that is written in the config.
    """
    sections, names = [data], []
    for part in location:
        names.append(str(part))
        inner = sections[-1].get(names[-1])
        if not isinstance(inner, dict):
            break
        sections.append(inner)
    depth = min(len(names), len(location)) - (2 if missing else 1)
    sections[depth].pop(names[depth], None)
    return ".".join(names)


def _sentence(fault: ErrorDetails) -> str:
    value, kind = fault["input"], fault["type"]
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        text = 'must be a section ({"key": value, ...})'
    elif kind.startswith("bool"):
        text = "must be true or false"
    elif kind == "missing":
        return "is missing"
    else:
        text = fault["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return f"{text}, not {shown(value)}"
