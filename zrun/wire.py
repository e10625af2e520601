"""Flat frozen dataclasses as JSON lines: what launcher and agent tell each other besides events."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, TypeVar

from zrun.errors import ProtocolError

QUESTION = b'{"probe":'  # how a line begins that asks an agent something; a job begins otherwise

T = TypeVar("T")


def to_line(message: Any) -> bytes:
    """A message as one JSON line. Undecodable bytes survive (surrogate escapes)."""
    return json.dumps(dataclasses.asdict(message), separators=(",", ":")).encode("ascii") + b"\n"


def from_line(cls: type[T], line: bytes, what: str) -> T:
    """The message on a line.

    Args:
        what: what it is, for errors.

    Raises:
        ProtocolError: not such a message, a field missing or of the wrong type.
    """
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{what} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ProtocolError(f"{what} is not a JSON object")
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name not in data:
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise ProtocolError(f"{what} lacks the field {field.name!r}")
            continue
        values[field.name] = _checked(field.name, str(field.type), data[field.name], what)
    return cls(**values)


def _checked(name: str, declared: str, value: Any, what: str) -> Any:
    if declared == "str" and isinstance(value, str):
        return value
    if declared == "bool" and isinstance(value, bool):
        return value
    if declared == "int" and isinstance(value, int) and not isinstance(value, bool):
        return value
    if declared == "float" and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if declared.startswith("tuple") and isinstance(value, list) and all(isinstance(x, str) for x in value):
        return tuple(value)
    if declared.startswith("dict") and isinstance(value, dict) and all(isinstance(x, str) for x in value.values()):
        return value
    raise ProtocolError(f"{what}'s field {name!r} is not a valid {declared}")
