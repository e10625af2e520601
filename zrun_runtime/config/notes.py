"""What is said about a config: notes about keys that were understood, problems with those that were not."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from zrun_runtime.config.places import Places
from zrun_runtime.errors import ConfigError

NoteKind = Literal["honoured", "no_effect", "assumed", "migrated", "unknown", "changed"]


def shown(value: Any) -> str:
    """A value as the config spells it, cut short if it is long."""
    try:
        text = json.dumps(value, default=str)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass(frozen=True)
class Note:
    """One line of the effect report.

    kind: honoured (does what it says), no_effect (accepted, changes nothing here), assumed (not given, this was
    taken), migrated (an old spelling, read as the new one), unknown (not a key of this config, not read) or changed
    (the text says what holds instead of what was given, and why).
    """

    path: str  # dotted, as in zero_optimization.stage
    kind: NoteKind
    text: str
    value: Any = None  # the value in force; None if there is none


@dataclass(frozen=True)
class Problem:
    """One reason to refuse a config. path: empty when the whole file is meant. line: None if it is not of a file."""

    path: str
    text: str
    line: int | None = None

    def __str__(self) -> str:
        place = f"{self.path}: " if self.path else ""
        return f"{place}{self.text}" if self.line is None else f"line {self.line}: {place}{self.text}"


class InvalidConfig(ConfigError):
    """A config with one or more problems, all of them shown."""

    def __init__(self, origin: str, problems: Iterable[Problem]) -> None:
        self.origin = origin
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            message = f"{origin}: {self.problems[0]}"
        else:
            lines = "".join(f"\n  {problem}" for problem in self.problems)
            message = f"{origin}: {len(self.problems)} problems{lines}"
        super().__init__(message)


@dataclass
class Ledger:
    """Collects notes and problems while a config is read, so that all of them are told at once."""

    origin: str
    places: Places = field(default_factory=Places)
    notes: list[Note] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def note(self, path: str, kind: NoteKind, text: str, value: Any = None) -> None:
        self.notes.append(Note(path, kind, text, value))

    def has_note(self, path: str) -> bool:
        """Whether something was said of this key already."""
        return any(note.path == path for note in self.notes)

    def problem(self, path: str, text: str) -> None:
        self.problems.append(Problem(path, text, self.places.line_of(path)))

    def moved(self, old: str, new: str) -> None:
        """The key `new` is written as `old`: full paths."""
        self.places.written[new] = old

    def raise_problems(self) -> None:
        """Raise what was collected.

        Raises:
            InvalidConfig: if there is any problem.
        """
        if self.problems:
            raise InvalidConfig(self.origin, self.problems)
