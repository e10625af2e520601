"""Keeps tracebacks back until it is known whether they are a worker's last words.

Eight ranks that fail alike print eight tracebacks, and the report at the end holds the same once more. So from the
head of a traceback on, a rank's stderr waits. If the rank goes on or ends well, its words are shown a moment later; if
it fails, the report shows them, and what the report does not show is shown once for all ranks that said it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from zrun.events import WorkerExited, WorkerOutput
from zrun.outputs import begins_last_words, likeness

PATIENCE = 5.0  # seconds from the last line to the end of the worker; one with a GPU takes long to end
MAX_CHARS = 32 * 1024  # a rank
MAX_CHARS_IN_ALL = 4 * 1024 * 1024

Lines = list[WorkerOutput]


@dataclass
class Held:
    """What one rank said since the head of a traceback."""

    host: str
    lines: Lines = field(default_factory=list)
    chars: int = 0
    touched: float = 0.0  # when its last line came
    key: str | None = None  # what makes it like others; None while the worker lives


@dataclass(frozen=True)
class Words:
    """Lines of one rank, and how many other ranks said the same."""

    host: str
    lines: Lines
    others: int = 0


class LastWords:
    """Each method that returns words hands them over: they are to be shown now. Bounded."""

    def __init__(self) -> None:
        self._held: dict[int, Held] = {}  # by rank
        self._chars = 0

    def offer(self, host: str, event: WorkerOutput, now: float) -> bool:
        """Whether the line is kept back."""
        held = self._held.get(event.rank)
        if event.stream != "stderr" or event.transient or (held is None and not begins_last_words(event.text)):
            return False
        if held is not None and held.chars + len(event.text) > MAX_CHARS:
            return False
        if self._chars + len(event.text) > MAX_CHARS_IN_ALL:
            return False
        held = self._held.setdefault(event.rank, Held(host))
        held.lines.append(event)
        held.chars += len(event.text)
        held.touched = now
        self._chars += len(event.text)
        return True

    def before(self, event: WorkerOutput) -> list[Words]:
        """What has to be shown before a line of the same stream that was not kept back."""
        held = self._held.get(event.rank)
        return [self._release(event.rank)] if held is not None and event.stream == "stderr" else []

    def exited(self, event: WorkerExited) -> list[Words]:
        """The end of a worker: what it said was not its last words if it ended well."""
        held = self._held.get(event.rank)
        if held is None:
            return []
        if event.returncode == 0:
            return [self._release(event.rank)]
        held.key = likeness(event.traceback)
        return []

    def overdue(self, now: float) -> list[Words]:
        """What a worker that goes on has said."""
        ranks = [r for r, held in self._held.items() if held.key is None and now - held.touched >= PATIENCE]
        return [self._release(rank) for rank in ranks]

    def rest(self, shown: str) -> list[Words]:
        """All that is left and not like the traceback `shown`; of several that are alike the first."""
        firsts: dict[str, int] = {likeness(shown): -1} if shown else {}
        found: dict[int, int] = {}  # rank to show -> others like it
        for rank, held in self._held.items():
            first = firsts.setdefault(held.key, rank) if held.key else rank
            if first == rank:
                found[rank] = 0
            elif first in found:
                found[first] += 1
        words = [Words(self._held[rank].host, self._held[rank].lines, others) for rank, others in found.items()]
        self._held, self._chars = {}, 0
        return words

    def _release(self, rank: int) -> Words:
        held = self._held.pop(rank)
        self._chars -= held.chars
        return Words(held.host, held.lines)
