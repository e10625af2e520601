"""Lines that several ranks say alike become one, with all of their ranks.

[Note: folding]
Whoever prints on eight ranks prints eight times. So a line waits a moment for the same words of other ranks, and goes
at once when every rank has said it. Lines leave in the order in which they came, and a rank only joins a line that came
after its own last one: so no rank's lines change places, and none waits longer than its own moment.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from zrun.events import WorkerOutput

PATIENCE = 0.3  # seconds that a line waits for others alike
MAX_LINES = 2000  # that wait; more, and the oldest go early
MAX_CHARS = 1024 * 1024

_Key = tuple[str, str]


@dataclass
class Line:
    """Words, and who said them."""

    text: str
    stream: str
    transient: bool = False  # a state of a progress bar: never folded, and waits only behind others of its rank
    ranks: dict[str, list[int]] = field(default_factory=dict)  # by host, in the order they came
    number: int = 0  # in the order of the lines
    since: float = 0.0

    @property
    def everyone(self) -> list[int]:
        """The ranks of all hosts, ascending."""
        return sorted(rank for ranks in self.ranks.values() for rank in ranks)


class Folding:
    """What waits.

    Args:
        world_size: ranks of the job. A single rank never waits.
        show: is called with each line when it is due.
    """

    def __init__(self, world_size: int, show: Callable[[Line], None]) -> None:
        self._world_size = world_size
        self._show = show
        self._waiting: deque[Line] = deque()
        self._alike: dict[_Key, list[Line]] = {}  # those of _waiting that others may join, ascending
        self._newest: dict[int, int] = {}  # rank -> number of its last line
        self._count = 0
        self._chars = 0

    def offer(self, host: str, event: WorkerOutput, text: str, now: float) -> None:
        """Takes a line. `text`: the event's, as it is to be shown."""
        if event.transient and not self._waits(event.rank):
            self._show(Line(text, event.stream, True, {host: [event.rank]}))
            return
        line = self._join(event, text) or self._append(event, text, now)
        line.ranks.setdefault(host, []).append(event.rank)
        self._newest[event.rank] = line.number
        while self._waiting and (self._full or self._complete(self._waiting[0])):
            self._show(self._pop())

    def tick(self, now: float) -> None:
        """Shows what waited long enough."""
        while self._waiting and now - self._waiting[0].since >= PATIENCE:
            self._show(self._pop())

    def release(self) -> None:
        """Shows all."""
        while self._waiting:
            self._show(self._pop())

    def _waits(self, rank: int) -> bool:
        return bool(self._waiting) and self._newest.get(rank, 0) >= self._waiting[0].number

    @property
    def _full(self) -> bool:
        return len(self._waiting) > MAX_LINES or self._chars > MAX_CHARS

    def _complete(self, line: Line) -> bool:
        return sum(map(len, line.ranks.values())) >= self._world_size

    def _join(self, event: WorkerOutput, text: str) -> Line | None:
        """The first line of these words that came after the rank's own last one."""
        alike = self._alike.get((event.stream, text))
        if alike is None or event.transient:
            return None
        at = bisect_right(alike, self._newest.get(event.rank, 0), key=lambda line: line.number)
        return alike[at] if at < len(alike) else None

    def _append(self, event: WorkerOutput, text: str, now: float) -> Line:
        self._count += 1
        line = Line(text, event.stream, event.transient, number=self._count, since=now)
        self._waiting.append(line)
        self._chars += len(text)
        if not line.transient:
            self._alike.setdefault((line.stream, text), []).append(line)
        return line

    def _pop(self) -> Line:
        line = self._waiting.popleft()
        self._chars -= len(line.text)
        if not line.transient:
            alike = self._alike[line.stream, line.text]
            del alike[0]  # the oldest of all is the oldest of these
            if not alike:
                del self._alike[line.stream, line.text]
        return line
