"""zrun config check | explain | upgrade | schema: what a config leads to, without a GPU and without a run."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zrun_runtime.commands.options import REFUSED, SETTINGS, refuse
from zrun_runtime.config import Config, InvalidConfig, Note, Problem, load_config, summary
from zrun_runtime.config.json_schema import json_schema
from zrun_runtime.config.notes import shown
from zrun_runtime.config.tables import key_tables
from zrun_runtime.config.unknown import NOT_KNOWN
from zrun_runtime.config.upgrade import upgrade as upgraded
from zrun_runtime.errors import ConfigError
from zrun_runtime.savings import cost_lines

_EXAMPLES = """\b
Examples:
  zrun config check ds.json --world_size 8      whether it is accepted
  zrun config check --strict --json *.json      for a program
  zrun config explain ds.json                   what every key does here, and what it costs
  zrun config upgrade ds.json --write           today's spelling
  zrun config schema > schema.json              for an editor

\b
Exit code: 0, 2 if a config is refused.
"""
PIPE_WIDTH = 140  # columns of a table that goes to a file or another program
_KINDS = {
    "honoured": "Honoured",
    "assumed": "Not given, so taken",
    "migrated": "Old spellings",
    "no_effect": "Accepted, no effect here",
    "unknown": "Not known, not read",
}
_world_size = click.option(
    "--world_size", type=click.IntRange(min=1), help="Ranks of the job; without it, what fits the batch sizes."
)


@click.group(epilog=_EXAMPLES, context_settings=SETTINGS)
def config() -> None:
    """Check a config, explain it, write it in today's spelling, or print its schema."""


@config.command()
@click.argument("files", nargs=-1, required=True)
@_world_size
@click.option("--strict", is_flag=True, help="Refuse keys that are not known.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list, an object for each file.")
def check(files: tuple[str, ...], world_size: int | None, strict: bool, as_json: bool) -> None:
    """Say of each of FILES whether it is accepted. Exit code 0 if all are, else 2.

    Values that are "auto" and that only the program knows are left to it.
    """
    answers = [_Answer.of(name, world_size, strict) for name in files]
    if as_json:
        click.echo(json.dumps([answer.as_json() for answer in answers], indent=2, default=str))
    else:
        for answer in answers:
            click.echo("\n".join(answer.lines()))
    sys.exit(0 if all(answer.config for answer in answers) else REFUSED)


@config.command()
@click.argument("file")
@_world_size
def explain(file: str, world_size: int | None) -> None:
    """Show what every key of FILE does here, what is taken for those not given, and what all that costs and saves."""
    answer = _Answer.of(file, world_size, strict=False)
    if answer.config is None:
        click.echo("\n".join(answer.lines()))
        sys.exit(REFUSED)
    click.echo(f"{file}: {summary(answer.config)}")
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(_table(answer.config.notes))
    click.echo("\n".join(cost_lines(answer.config)))
    click.echo("`zrun plan` tells the same of a model and machines, and what fits")


@config.command()
@click.argument("file")
@click.option("--write", is_flag=True, help="Replace FILE (JSON) rather than print; comments in it are lost.")
def upgrade(file: str, write: bool) -> None:
    """Write FILE in today's spelling; say on stderr what was changed. An accelerate file becomes a config."""
    try:
        data, notes = upgraded(file)
    except ConfigError as error:
        refuse(str(error))
    for note in notes:
        click.echo(f"{note.path}: {note.text}", err=True)
    text = json.dumps(data, indent=2) + "\n"
    if not write:
        click.echo(text, nl=False)
        return
    aside = f"{file}.{os.getpid()}.new"
    try:
        with open(aside, "w", encoding="utf-8") as out:
            out.write(text)
        os.replace(aside, file)
    except OSError as error:
        Path(aside).unlink(missing_ok=True)
        refuse(f"{file} cannot be replaced: {error.strerror}; it is as it was")


@config.command()
@click.option("--markdown", is_flag=True, help="Print the table of docs/config.md instead.")
def schema(markdown: bool) -> None:
    """Print the JSON Schema of a config: editors complete and check with it."""
    click.echo(key_tables() if markdown else json.dumps(json_schema(), indent=2, default=str), nl=not markdown)


@dataclasses.dataclass(frozen=True)
class _Answer:
    """What came of one file: a config, or the problems with it."""

    name: str
    config: Config | None
    problems: tuple[Problem, ...] = ()
    hint: str = ""

    @classmethod
    def of(cls, name: str, world_size: int | None, strict: bool) -> _Answer:
        try:
            return cls(name, load_config(name, world_size=world_size, strict=strict, defer=True))
        except InvalidConfig as error:
            return cls(name, None, error.problems)
        except ConfigError as error:
            return cls(name, None, (Problem("", error.message),), error.hint)

    def lines(self) -> Iterable[str]:
        if self.config is not None:
            yield f"{self.name}: accepted: {summary(self.config)}"
            unknown = [note for note in self.config.notes if note.kind == "unknown"]
            told = [note for note in unknown if len(unknown) == 1 or note.text != NOT_KNOWN]
            yield from (f"  warning: {note.path}: {note.text}" for note in told)
            if rest := [note.path for note in unknown if note not in told]:
                yield f"  warning: not keys of this config, not read: {', '.join(rest)}"
            return
        yield f"{self.name}: refused"
        for problem in self.problems:
            yield f"  {problem}"
        if self.hint:
            yield f"  -> {self.hint}"

    def as_json(self) -> dict[str, Any]:
        notes = self.config.notes if self.config else ()
        return {
            "file": self.name,
            "accepted": self.config is not None,
            "problems": [dataclasses.asdict(problem) for problem in self.problems],
            "notes": [dataclasses.asdict(note) for note in notes],
        }


def _table(notes: tuple[Note, ...]) -> Table:
    """What was written or taken, by kind of effect; no text is ever cut."""
    table = Table(box=box.SIMPLE_HEAD, expand=True)
    table.add_column("key", overflow="fold", ratio=5)
    table.add_column("value", overflow="fold", ratio=2)
    table.add_column("why", overflow="fold", ratio=6)
    for kind, title in _KINDS.items():
        found = sorted((note for note in notes if note.kind == kind), key=lambda note: note.path)
        if found:
            table.add_section()
            table.add_row(Text(title, style="bold"))
        for note in found:
            table.add_row(Text(note.path), Text("" if note.value is None else shown(note.value)), Text(note.text))
    return table
