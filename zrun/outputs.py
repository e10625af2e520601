"""From the raw bytes a worker writes to lines for the console, and to its last words. Pure.

Lines are for the console only and may be cut, collapsed or left out; the spool files hold every byte.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LINE_LIMIT = 32 * 1024  # bytes; a character may take six on the wire, and a wire line has 256 KiB
BAR_SECONDS = (1.0, 30.0)  # between two states of one progress bar: at first, and at most
WORDS_LIMIT = 16 * 1024  # characters of a traceback
_LAST_LINES = 20  # of stderr, where there is no traceback
_NEAR_END = 100  # lines that may follow a traceback which still is the reason

_HEADER = re.compile(r"(?:\[rank\d+\]: ?)?[ +|]*(?:Exception Group )?Traceback \(most recent call last\):")
# zrun_runtime says an error of its own in this line and indented ones.
_SHORT = re.compile(r"(?:\[rank\d+\]: ?)?zrun_runtime: \w+: ")
_FATAL = re.compile(r"(?:\[rank\d+\]: ?)?Fatal Python error: ")
_BY_THE_WAY = "Exception ignored in"  # at the end of the interpreter; never why it ends
_CHAIN = ("During handling of the above exception", "The above exception was the direct cause")
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
# What differs between ranks that fail alike: addresses and numbers, except the line numbers of the code.
_RANK_NOISE = re.compile(r"0x[0-9a-fA-F]+|(?<!line )(?<!\.py:)(?<!\w)\d+|(?<=rank)\d+")


@dataclass(frozen=True)
class Line:
    """One line for the console, without its newline."""

    text: str
    partial: bool = False  # cut at LINE_LIMIT
    transient: bool = False  # a state of a progress bar; the next one replaces it


class LineSplitter:
    """Cuts a stream into lines. A carriage return starts the line over, so of a progress bar the last state is left."""

    def __init__(self) -> None:
        self._rest = b""  # of the line that has no end yet; bounded
        self._cut = False  # its beginning has been given out already
        self._is_bar = False
        self._bar_due = 0.0  # when the next state may be given out ...
        self._bar_wait = BAR_SECONDS[0]  # ... and how long after that the one after it
        self._bar_shown = b""

    def feed(self, data: bytes, now: float) -> list[Line]:
        """The lines that `data` completes, and the state of a progress bar if one is due."""
        pieces = (self._rest + data).split(b"\n")
        self._rest = pieces.pop()
        lines = []
        for piece in pieces:
            if not self._cut:
                lines.append(_line(_last_state(piece)))
            self._cut = False
        if pieces:
            self._end_bar()
        lines += self._unfinished()
        lines += self.tick(now)
        return lines

    def skip(self, data: bytes) -> int:
        """Takes `data` like `feed`, gives nothing out and says how many lines that would have been."""
        count = data.count(b"\n")
        if count:
            self._rest = b""
            self._end_bar()
            count -= self._cut
            self._cut = False
        self._rest += data[data.rfind(b"\n") + 1 :]
        if self._unfinished():
            count += 1
        return count

    def tick(self, now: float) -> list[Line]:
        """The state of a progress bar, if there is a new one and its time has come."""
        if not self._is_bar or self._cut or now < self._bar_due:
            return []
        state = _last_state(self._rest)
        if not state or state == self._bar_shown:
            return []
        self._bar_shown, self._bar_due = state, now + self._bar_wait
        self._bar_wait = min(2 * self._bar_wait, BAR_SECONDS[1])
        return [Line(_decode(state), transient=True)]

    def end(self) -> list[Line]:
        """What is left when the stream ends."""
        rest, self._rest = self._rest, b""
        state = _last_state(rest)
        return [_line(state)] if state and not self._cut else []

    def _end_bar(self) -> None:
        self._is_bar, self._bar_wait = False, BAR_SECONDS[0]

    def _unfinished(self) -> list[Line]:
        """Keeps the line without an end short."""
        if self._cut:
            self._rest = b""
            return []
        if b"\r" in self._rest.rstrip(b"\r"):
            self._is_bar = True
            ends = self._rest.endswith(b"\r")
            self._rest = _last_state(self._rest) + (b"\r" if ends else b"")
        if len(self._rest) <= LINE_LIMIT:
            return []
        self._cut = True
        line = _line(self._rest)
        self._rest = b""
        return [line]


def _last_state(piece: bytes) -> bytes:
    """The text after the last carriage return that is followed by any."""
    return piece.rstrip(b"\r").rpartition(b"\r")[2] if b"\r" in piece else piece


def _line(text: bytes) -> Line:
    if len(text) <= LINE_LIMIT:
        return Line(_decode(text))
    cut = LINE_LIMIT
    while cut > LINE_LIMIT - 4 and text[cut] & 0xC0 == 0x80:  # not inside a character
        cut -= 1
    return Line(_decode(text[:cut]), partial=True)


def _decode(text: bytes) -> str:
    return text.decode("utf-8", "replace")


class Allowance:
    """What may pass to the console: a burst, then a steady rate. A short line costs 1, a longer one 1 more a KiB.

    Once it is used up nothing passes until a quarter of the burst has come back, so what is shown stays in runs.
    """

    def __init__(self, burst: float, per_second: float) -> None:
        self._burst = burst
        self._rate = per_second
        self._left = burst
        self._at = 0.0
        self._closed = False

    def is_open(self, now: float) -> bool:
        """Whether something may pass now."""
        self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._rate)
        self._at = now
        if self._closed and self._left >= self._burst / 4:
            self._closed = False
        return not self._closed

    def take(self, size: int) -> bool:
        """Lets something of `size` bytes pass, or not."""
        cost = 1 + size // 1024
        if self._closed or self._left < cost:
            self._closed = True
            return False
        self._left -= cost
        return True

    def close(self) -> None:
        """Nothing more can pass for now, for another reason."""
        self._left = 0.0
        self._closed = True


def begins_last_words(line: str) -> bool:
    """Whether a line of stderr may be the first of why its process ends: a traceback, or what stands for one."""
    return any(pattern.match(line) for pattern in (_HEADER, _SHORT))


def is_short(words: str) -> bool:
    """Whether these last words are an error of zrun_runtime, said without a traceback."""
    return _SHORT.match(words) is not None


def last_traceback(stderr: str) -> str:
    """The last traceback in the tail of a stderr, with the exceptions it is chained to; empty if there is none.

    An error of zrun_runtime that was said without one counts as well.
    """
    lines = stderr.splitlines()
    start = next((i for i in range(len(lines) - 1, -1, -1) if _begins_a_reason(lines, i)), None)
    if start is None or len(lines) - _last_frame(lines, start) > _NEAR_END:
        return ""
    while (chained := _chained_to(lines, start)) is not None:
        start = chained
    return _shorten(_RANK_PREFIX.sub("", "\n".join(lines[start:])).strip("\n"))


def _begins_a_reason(lines: list[str], at: int) -> bool:
    if at and _RANK_PREFIX.sub("", lines[at - 1]).startswith(_BY_THE_WAY):
        return False
    return begins_last_words(lines[at]) or _FATAL.match(lines[at]) is not None


def last_words(stderr: str) -> str:
    """The last traceback, else the last lines."""
    return last_traceback(stderr) or _shorten("\n".join(stderr.splitlines()[-_LAST_LINES:]).strip("\n"))


def likeness(traceback: str) -> str:
    """A key that is the same for ranks that failed alike: the traceback without what only differs by rank."""
    lines = _RANK_PREFIX.sub("", traceback).splitlines()
    if lines and begins_last_words(lines[0]):
        lines = lines[: _last_frame(lines, 0) + 1]
    return _RANK_NOISE.sub("#", "\n".join(lines))


def _last_frame(lines: list[str], start: int) -> int:
    """The index of the line that names the exception: the first one after the frames."""
    if _SHORT.match(lines[start]):
        more = range(start + 1, len(lines))
        return next((at for at in more if not _RANK_PREFIX.sub("", lines[at]).startswith("  ")), len(lines)) - 1
    end = start
    for at in range(start, len(lines)):
        text = _RANK_PREFIX.sub("", lines[at])
        if text.startswith((" ", "\t")) or _HEADER.match(text):
            end = at + 1
    return min(end, len(lines) - 1)


def _chained_to(lines: list[str], start: int) -> int | None:
    """Where the traceback begins that the one at `start` says it follows from."""
    above = [_RANK_PREFIX.sub("", line) for line in lines[max(0, start - 3) : start]]
    if not any(line.startswith(_CHAIN) for line in above):
        return None
    return next((i for i in range(start - 2, -1, -1) if _HEADER.match(lines[i])), None)


def _shorten(text: str) -> str:
    if len(text) <= WORDS_LIMIT:
        return text
    half = WORDS_LIMIT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
