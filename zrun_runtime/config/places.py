"""The line that each key of a config file stands in, so that what is said of a key can say where it is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import yaml

# One token of JSON, comments included.
TOKEN = re.compile(
    r'(?P<string>"(?:[^"\\\n]|\\.)*")|(?P<comment>//[^\n]*|\#[^\n]*|/\*.*?\*/)|(?P<mark>[{}\[\],:])|(?P<space>\s+)'
    r"|(?P<other>.)",
    re.DOTALL,
)


def json_lines(text: str) -> dict[str, int]:
    """The line of every key, by its dotted path; of text that was read as JSON with comments."""
    lines: dict[str, int] = {}
    path: list[str | int] = []  # the keys and places in lists that lead to where we are, one for each open bracket
    line, word, word_line = 1, "", 1
    for token in TOKEN.finditer(text):
        kind, said = token.lastgroup, token.group()
        if kind == "string":
            word, word_line = said, line
        elif kind == "mark":
            _step(path, said, word)
            if said == ":":
                lines.setdefault(".".join(f"[{at}]" if isinstance(at, int) else at for at in path), word_line)
        line += said.count("\n")
    return lines


def _step(path: list[str | int], mark: str, word: str) -> None:
    """Follow one punctuation mark."""
    if mark in ("{", "["):
        path.append("" if mark == "{" else 0)
    elif mark in ("}", "]") and path:
        path.pop()
    elif mark == ":" and path:
        path[-1] = json.loads(word)
    elif mark == "," and path and isinstance(path[-1], int):
        path[-1] += 1


def yaml_lines(text: str) -> dict[str, int]:
    """The same of text that was read as YAML."""
    return dict(_keys(yaml.compose(text, yaml.SafeLoader), ""))


def _keys(node: yaml.Node | None, path: str) -> Iterator[tuple[str, int]]:
    if not isinstance(node, yaml.MappingNode):
        return
    for name, value in node.value:
        if isinstance(name, yaml.ScalarNode):
            place = f"{path}.{name.value}".lstrip(".")
            yield place, name.start_mark.line + 1
            yield from _keys(value, place)


@dataclass
class Places:
    """Where the keys of one config are. lines: of its file, by path as written. written: today's path -> as written."""

    lines: Mapping[str, int] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)

    def line_of(self, path: str) -> int | None:
        """The line of a key, or that of the nearest section around it that was written; None if nothing of it was."""
        parts = path.split(".")
        for count in range(len(parts), 0, -1):
            line = self.lines.get(self._as_written(".".join(parts[:count])))
            if line is not None:
                return line
        return None

    def _as_written(self, path: str) -> str:
        parts = path.split(".")
        for count in range(len(parts), 0, -1):
            old = self.written.get(".".join(parts[:count]))
            if old is not None:
                return ".".join([old, *parts[count:]]).strip(".")
        return path
