"""Hosts, what each offers, and the text that names them: DeepSpeed's hostfile and more. Pure.

A line is `NAME slots=N [KEY=VALUE ...]`, in any order after the name; `#` begins a comment anywhere. NAME may be
`user@name`, an address of either kind (IPv6 with or without brackets), or many names at once: `node-[1-4,8]`.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zrun.errors import UsageError
from zrun.hostlist import PatternError, expand

MAX_SLOTS = 1024  # of one host
KEYS = ("slots", "port", "user", "python", "addr")
IGNORED_KEYS = ("max_slots", "max-slots")  # MPI's
_EXAMPLE = "one host a line: worker-1 slots=8"
_LINE_END = re.compile(r"\r\n|\n|\r")
_WORD = re.compile(r"[^ \t]+")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\Z")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\\+$-]*\Z")
_PYTHON = re.compile(r"[A-Za-z0-9_./~+@:,=-]+\Z")  # what no shell reads as anything else
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.\[\],-]")
_SPELT_APART = re.compile(r"(?i)slots?\s*[=:]\s*(\d+)")
_STATED = re.compile(r"(?P<name>[^\s:=]+):(?P<number>\d+)\Z")  # MPI's host:8, or a host and its port


@dataclass(frozen=True)
class Host:
    """One machine of a job. Two hosts of the same name are two agents on that machine."""

    name: str  # without user and brackets: what to connect to, and what people call it
    slots: int  # ranks to start there
    devices: tuple[str, ...] = ()  # entries for CUDA_VISIBLE_DEVICES, one a slot; empty on the CPU
    user: str = ""  # to log in as; empty: as ssh decides
    port: int | None = None  # of ssh; None: as ssh decides
    python: str = ""  # the interpreter there; empty: the launcher's own path
    addr: str = ""  # by which the other hosts reach it; empty: found out
    picked: tuple[int, ...] = ()  # which of its slots, if a filter left `slots` of them; empty: the first ones
    where: str = field(default="", compare=False)  # file:line:column that named it

    @property
    def slot_numbers(self) -> tuple[int, ...]:
        """Which slots of the host are used, one a rank."""
        return self.picked or tuple(range(self.slots))


@dataclass(frozen=True)
class Hostfile:
    """What a hostfile says."""

    hosts: tuple[Host, ...]  # in order
    notes: tuple[tuple[str, str], ...] = ()  # level and sentence: what the file says and nobody heeds


@dataclass(frozen=True)
class Value:
    """One value of a host, as it is written."""

    text: str
    where: str  # file:line:column


class Notes:
    """What a hostfile says and nobody heeds, each kind of it once."""

    def __init__(self) -> None:
        self._by_kind: dict[str, tuple[str, str]] = {}

    def add(self, level: str, sentence: str, kind: str = "") -> None:
        """Keeps a sentence, unless there is one of that `kind` (default: the sentence itself)."""
        self._by_kind.setdefault(kind or sentence, (level, sentence))

    def all(self) -> tuple[tuple[str, str], ...]:
        """Level and sentence, in order."""
        return tuple(self._by_kind.values())


def parse_hostfile(text: str, name: str) -> Hostfile:
    """The hosts of a hostfile's text.

    Args:
        name: of the file, for errors.

    Raises:
        UsageError: naming file, line and column, the text there, and what to write.
    """
    hosts: list[Host] = []
    notes = Notes()
    for number, line in enumerate(_LINE_END.split(text.removeprefix("\ufeff")), start=1):
        hosts += _LineReader(line, f"{name}:{number}").read(notes)
    return finish(hosts, notes, name)


def finish(hosts: Sequence[Host], notes: Notes, name: str) -> Hostfile:
    """Checks what only all hosts together show.

    Raises:
        UsageError: no host, or one that is there twice.
    """
    if not hosts:
        raise UsageError(f"{name} names no host", _EXAMPLE)
    seen: dict[tuple[str, int | None], Host] = {}
    for host in hosts:
        first = seen.setdefault((host.name.lower(), host.port), host)
        if first is not host:
            hint = f"one entry with all its workers: {show_name(host)} slots={first.slots + host.slots}"
            raise UsageError(f"{host.where}: {host.name} is there already, at {first.where}", hint)
        if host.slots == 0:
            notes.add("warning", f"{host.where}: {host.name} has slots=0 and takes no part")
    loopback = next((host for host in hosts if is_loopback(host.name) and not host.addr), None)
    if loopback is not None and not all(is_loopback(host.name) for host in hosts):
        sentence = (
            f"{loopback.where}: {loopback.name} means this machine, which the other hosts know by another name; "
            "write its name in the network, or addr=ADDRESS behind it"
        )
        notes.add("warning", sentence)
    return Hostfile(tuple(hosts), notes.all())


def make_hosts(names: Sequence[Host], values: Mapping[str, Value], notes: Notes) -> list[Host]:
    """The hosts of one entry: `names`, all with the same values.

    Args:
        names: hosts without slots, as read_names gives them.
        values: by key.
        notes: gets what is not heeded.

    Raises:
        UsageError: no slots, an unknown key that looks like a known one, a value that cannot be right.
    """
    known: dict[str, Any] = {}
    for key, value in values.items():
        if key in KEYS:
            known[key] = _read_value(key, value)
        else:
            notes.add("info", _unknown_key(key, value), key)
    first = names[0]
    if "slots" not in known:
        hint = f"write: {show_name(first)} slots=8, with the number of its workers"
        raise UsageError(f"{first.where}: {first.name!r}: slots= is missing", hint)
    if "user" in known and first.user:
        raise UsageError(f"{values['user'].where}: the user is there already, before the @", "leave one of them out")
    return [replace(host, **known) for host in names]


def read_names(text: str, where: str) -> list[Host]:
    """What `[user@]NAME` stands for, without slots. `where`: file:line:column of the text.

    Raises:
        UsageError: no name at all, or one that cannot be right.
    """
    user, at, name = text.rpartition("@")
    if at and not _USER.match(user):
        raise UsageError(f"{where}: {text!r}: {user!r} is not a name of a user", "write user@host")
    address = read_ipv6(name)
    if address:
        return [Host(address, 0, user=user, where=where)]
    stated = _STATED.match(name)
    if stated is not None:
        raise UsageError(f"{where}: {text!r} is not a name of a host", f"for a port write port={stated['number']}")
    odd = _NOT_IN_NAMES.search(name)
    if odd is not None:
        raise UsageError(f"{where}: {text!r}: {_describe(odd[0])} cannot be in the name of a host", _EXAMPLE)
    try:
        names = expand(name)
    except PatternError as error:
        raise UsageError(f"{where}: {text!r}: {error.message}", "ranges look like node-[1-4,8]") from None
    wrong = next((one for one in names if not _NAME.match(one)), None)
    if wrong is not None:
        hint = f"one host a line, or a list in brackets: node-[1,2], not {text}" if "," in wrong else _EXAMPLE
        raise UsageError(f"{where}: {wrong!r} is not a name of a host", hint)
    return [Host(one, 0, user=user, where=where) for one in names]


def read_ipv6(text: str) -> str:
    """The IPv6 address that `text` is, brackets or not, without them; empty if it is none."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        return bare if ":" in bare and ipaddress.IPv6Address(bare) else ""
    except ValueError:
        return ""


def is_loopback(name: str) -> bool:
    """Whether a name means, on every machine, that machine."""
    return name.lower() in ("localhost", "localhost.localdomain", "::1") or bool(re.match(r"127(\.\d+){3}\Z", name))


def show_name(host: Host) -> str:
    """How a hostfile names the host."""
    return f"{host.user}@{host.name}" if host.user else host.name


class _LineReader:
    """One line of a hostfile.

    Args:
        where: file:line.
    """

    def __init__(self, line: str, where: str) -> None:
        self._line = line.partition("#")[0].rstrip(" \t\x1a")
        self._where = where

    def read(self, notes: Notes) -> list[Host]:
        """The hosts of the line; none if it says nothing."""
        self._refuse_odd_blanks()
        words = list(_WORD.finditer(self._line))
        if not words:
            return []
        first, rest = words[0], words[1:]
        if not rest and (stated := _STATED.match(first[0])) is not None:
            raise self._error(first, "slots= is missing", f"write: {stated['name']} slots={stated['number']}")
        if "=" in first[0]:
            raise self._error(first, "the line begins with a value and not with a host", _EXAMPLE)
        return make_hosts(read_names(first[0], self._at(first)), dict(self._values(rest, first[0])), notes)

    def _values(self, words: list[re.Match[str]], host: str) -> Iterator[tuple[str, Value]]:
        seen = set()
        for word in words:
            key, equals, value = word[0].partition("=")
            if not equals or not key:
                raise self._error(word, f"{word[0]!r} is not KEY=VALUE", self._suggest(host))
            if key in seen:
                raise self._error(word, f"{key}= is there twice", "leave one of them out")
            seen.add(key)
            yield key, Value(value, self._at(word))

    def _suggest(self, host: str) -> str:
        apart = _SPELT_APART.search(self._line)
        return f"write: {host} slots={apart[1] if apart else 8}; a comment begins with #"

    def _refuse_odd_blanks(self) -> None:
        for at, char in enumerate(self._line):
            if char not in " \t" and (char.isspace() or not char.isprintable()):
                message = f"{self._where}:{at + 1}: {self._line.strip()!r}: {_describe(char)} is not for hostfiles"
                raise UsageError(message, "type a plain blank instead" if char.isspace() else _EXAMPLE)

    def _at(self, word: re.Match[str]) -> str:
        return f"{self._where}:{word.start() + 1}"

    def _error(self, word: re.Match[str], what: str, hint: str) -> UsageError:
        return UsageError(f"{self._at(word)}: {self._line.strip()!r}: {what}", hint)


def _read_value(key: str, value: Value) -> int | str:
    """The value of a known key."""
    if key == "slots":
        return _read_number(key, value, 0, MAX_SLOTS)
    if key == "port":
        return _read_number(key, value, 1, 65_535)
    text = value.text
    if key == "user" and _USER.match(text):
        return text
    if key == "python" and _PYTHON.match(text) and not text.startswith("-"):
        return text
    if key == "addr":
        text = read_ipv6(text) or text
        if read_ipv6(text) or _NAME.match(text):
            return text
    meant = {"user": "the name of a user", "python": "a plain path of an interpreter", "addr": "an address or a name"}
    raise UsageError(f"{value.where}: {key}={text}: that is not {meant[key]}", f"write {key}=VALUE, or leave it out")


def _read_number(key: str, value: Value, low: int, high: int) -> int:
    if not re.fullmatch(r"-?[0-9]+", value.text, re.ASCII):
        raise UsageError(f"{value.where}: {key}={value.text}: that is not a number", f"write {key}=8, for example")
    if len(value.text) > 9 or not low <= int(value.text) <= high:
        raise UsageError(f"{value.where}: {key}={value.text} is not between {low} and {high}")
    return int(value.text)


def _unknown_key(key: str, value: Value) -> str:
    """What is said about a key that means nothing here.

    Raises:
        UsageError: it looks like a slip.
    """
    if key in IGNORED_KEYS:
        return f"{value.where}: {key}= has no effect: there are never more workers than slots"
    near = difflib.get_close_matches(key.lower().replace("-", "_"), KEYS, n=1)
    if near:
        raise UsageError(f"{value.where}: {key}={value.text}: unknown key", f"did you mean {near[0]}={value.text}?")
    return f"{value.where}: {key}= is unknown and has no effect; known are {', '.join(KEYS)}"


def _describe(char: str) -> str:
    return f"{char!r}" if char.isascii() and char.isprintable() else f"the character U+{ord(char):04X}"
