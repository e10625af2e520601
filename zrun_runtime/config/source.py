"""From what the user hands over (a path, a dict, DeepSpeed's base64 text) to plain JSON values.

[Note: Relaxed JSON]
People write comments and trailing commas. They are blanked out, character by character, before the standard parser
reads the text, so that every line and column it reports is that of the file. The same pass sees every key and thus
finds one that is given twice.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from zrun_runtime.config.places import TOKEN, json_lines, yaml_lines
from zrun_runtime.errors import ConfigError

MAX_BYTES = 4 * 1024 * 1024
MAX_DEPTH = 40

_NAMED = re.compile(r"\{\{[^{}\n]*\}\}|\$?\{[^{}\n]*\}|[$A-Za-z_<][\w$<>.\-]*")
_WORDS = {"True": "true", "False": "false", "None": "null", "yes": "true", "no": "false"}


@dataclass(frozen=True)
class Source:
    """A config as the user gave it. origin names it in messages; folder is where relative paths in it start.

    lines: of a file: the line that each key stands in, by its path.
    """

    data: dict[str, Any]
    origin: str
    folder: Path | None
    lines: Mapping[str, int] = field(default_factory=dict)


def read_source(source: str | os.PathLike[str] | Mapping[str, Any]) -> Source:
    """Read a config.

    Args:
        source: the path of a JSON or YAML file, a dict, or JSON text in urlsafe base64.

    Raises:
        ConfigError: it does not exist or is not a config; with line and column where there are some.
    """
    if isinstance(source, Mapping):
        return Source(_top_level(source, "config"), "config", None)
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"a config is a path, a dict or base64 text, not {type(source).__name__}")
    name = os.fspath(source)
    if not os.path.exists(name) and (text := _decoded(name)) is not None:
        return Source(_top_level(parse_json(text, "base64 config"), "base64 config"), "base64 config", None)
    path = Path(name)
    text = _read_text(path)
    yaml_like = path.suffix.lower() in (".yaml", ".yml")
    data = _top_level((parse_yaml if yaml_like else parse_json)(text, name), name)
    return Source(data, name, path.parent, (yaml_lines if yaml_like else json_lines)(text))


def _read_text(path: Path) -> str:
    where = os.path.abspath(path)
    if not os.path.exists(where):
        raise ConfigError(f"no such config file: {where}")
    if os.path.isdir(where):
        raise ConfigError(f"{where} is a directory, not a config file")
    try:
        with open(where, "rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not a text file: byte {error.start} is not UTF-8") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{where} is larger than {MAX_BYTES} bytes: not a config file")
    if not text.strip():
        raise ConfigError(f"{where} is empty")
    return text


def _decoded(text: str) -> str | None:
    """The JSON object that base64 `text` holds, or None if it does not look like one."""
    if len(text) < 4 or re.fullmatch(r"[A-Za-z0-9_+/\-]+=*", text) is None:
        return None
    try:
        decoded = base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def parse_json(text: str, origin: str) -> Any:
    """Read JSON with comments and trailing commas. See [Note: Relaxed JSON].

    Raises:
        ConfigError: not JSON, or a key is given twice in one object; with line and column.
    """
    strict = _blank_out(text, origin)
    try:
        return json.loads(strict)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{origin}:{error.lineno}:{error.colno}: not JSON: {error.msg}", _advice(text, error.pos)
        ) from None
    except (RecursionError, ValueError):
        raise ConfigError(f"{origin}: nested too deeply or a number too long to be a config") from None


def _advice(text: str, position: int) -> str:
    found = _NAMED.match(text, position)
    if found is None:
        return "keys and texts stand in double quotes" if text[position : position + 1] == "'" else ""
    word = found.group()
    if word in _WORDS:
        return f"write {_WORDS[word]} instead of {word}"
    rest = text[found.end() :].lstrip()
    if rest.startswith(":"):
        return f'write the key {word} in double quotes: "{word}"'
    return f"{word} looks like a placeholder: put a value there"


def _blank_out(text: str, origin: str) -> str:
    """Comments and trailing commas become spaces; every other character keeps its place."""
    out = list(text)
    for start, end in _superfluous(text, origin):
        out[start:end] = [char if char in "\r\n" else " " for char in text[start:end]]
    return "".join(out)


def _superfluous(text: str, origin: str) -> Iterator[tuple[int, int]]:
    """The (start, end) of every comment and trailing comma. Raises ConfigError at a key given twice."""
    keys: list[set[str]] = []  # of the objects around the current place; an array has an empty set
    comma: int | None = None  # the place of a comma that only space has followed
    string: re.Match[str] | None = None  # a text that only space has followed
    for token in TOKEN.finditer(text):
        kind = token.lastgroup
        if kind == "comment":
            yield token.span()
        if kind in ("comment", "space"):
            continue
        mark = token.group() if kind == "mark" else ""
        if mark in ("}", "]") and mark:
            if comma is not None:
                yield comma, comma + 1
            if keys:
                keys.pop()
        elif mark in ("{", "[") and mark:
            keys.append(set())
        elif mark == ":" and string is not None and keys:
            _remember(string, keys[-1], origin)
        comma = token.start() if mark == "," else None
        string = token if kind == "string" else None


def _remember(string: re.Match[str], seen: set[str], origin: str) -> None:
    name = string.group()
    if name in seen:
        line = string.string.count("\n", 0, string.start()) + 1
        column = string.start() - (string.string.rfind("\n", 0, string.start()) + 1) + 1
        raise ConfigError(f"{origin}:{line}:{column}: the key {name} is given twice in one object", "keep one of them")
    seen.add(name)


class _StrictLoader(yaml.SafeLoader):
    """YAML of plain values; a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for name, _ in node.value:
            if isinstance(name, yaml.ScalarNode) and name.tag != "tag:yaml.org,2002:merge":
                if name.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f'the key "{name.value}" is given twice', name.start_mark
                    )
                seen.add(name.value)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, origin: str) -> Any:
    """Read YAML of plain values.

    Raises:
        ConfigError: not YAML, or a key is given twice in one mapping; with line and column.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
        raise ConfigError(f"{origin}{place}: not YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{origin}: not YAML: {error}") from None


def _top_level(value: Any, origin: str) -> dict[str, Any]:
    plain = _plain(value, origin, "", 0)
    if not isinstance(plain, dict):
        raise ConfigError(f"{origin}: a config is an object of keys and values, not {_kind(plain)}")
    return plain


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "a list"
    return "nothing" if value is None else f"the {type(value).__name__} {value!r:.40}"


def _plain(value: Any, origin: str, path: str, depth: int) -> Any:
    """A copy made of dict, list, str, int, float, bool and None.

    Raises:
        ConfigError: it holds something else, or goes round in circles.
    """
    if depth > MAX_DEPTH:
        raise ConfigError(f"{origin}: {path[:80]}...: nested deeper than {MAX_DEPTH} levels")
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isnan(value):
            raise ConfigError(f"{origin}: {path}: NaN is not a number to train with")
        return float(value)
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise ConfigError(f"{origin}: {path or 'top level'}: keys are texts, not {name!r:.40}")
        return {name: _plain(item, origin, f"{path}.{name}".lstrip("."), depth + 1) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item, origin, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    name = getattr(value, "value", None)  # an enum member stands for its value
    if isinstance(name, (str, int, float)):
        return _plain(name, origin, path, depth)
    raise ConfigError(f"{origin}: {path}: {type(value).__name__} is not something JSON can hold")
