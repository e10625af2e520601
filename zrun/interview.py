"""Questions to the agents of many hosts, all at once. Nothing here waits longer than it is told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import zrun
from zrun.connection import greet
from zrun.errors import HostLostError, PreflightError, ProtocolError, ZrunError
from zrun.hostfile import Host
from zrun.transport.base import Link, Transport
from zrun.wire import from_line, to_line

_MAX_ANSWER_BYTES = 1024 * 1024
_LAST_WORDS_SECONDS = 1.0
_PATIENCE_SECONDS = 3.0  # after which a person should be told what takes so long
_GOODBYE_SECONDS = 0.3  # for all together

T = TypeVar("T")


@dataclass(frozen=True)
class Answer(Generic[T]):
    """What a host said, or why it said nothing; and when, on our clock."""

    value: T | None
    error: ZrunError | None = None
    asked_at: float = 0.0  # seconds since the epoch
    heard_at: float = 0.0


class Interview:
    """One agent a host that has no job and answers questions.

    Args:
        hosts: whom to ask.
        pythons: the interpreter of each, for errors.
    """

    def __init__(self, hosts: Sequence[Host], pythons: Sequence[str], transport: Transport) -> None:
        self._hosts = tuple(hosts)
        self._pythons = tuple(pythons)
        self._transport = transport
        self._links: dict[int, Link] = {}
        self._closed = False
        self._lock = threading.Lock()

    def open(self, seconds: float, on_delay: Callable[[list[int]], None]) -> dict[int, ZrunError]:
        """Starts the agents.

        Args:
            on_delay: is told once, should it take long, which hosts have not answered.

        Returns:
            by number of the host, why one could not be started.
        """
        answers = _all_at_once({i: self._opener(i) for i in range(len(self._hosts))}, seconds, on_delay)
        return {i: answer.error for i, answer in answers.items() if answer.error is not None}

    def ask(self, questions: Mapping[int, Any], answers_are: type[T], seconds: float) -> dict[int, Answer[T]]:
        """Asks some hosts something.

        Args:
            questions: by number of the host.
            answers_are: the class of the answers.
        """

        def asker(i: int) -> Callable[[], T]:
            return lambda: self._ask(i, questions[i], answers_are)

        return _all_at_once({i: asker(i) for i in questions}, seconds)

    def peer(self, i: int) -> str:
        """The address at which a host was reached; empty if only a proxy knows, or it is this machine."""
        return self._links[i].peer

    def hand_over(self) -> list[Link]:
        """Ends the questions and gives the agents away, one a host: they are ready for a job."""
        return [self._links.pop(i) for i in range(len(self._hosts))]

    def close(self) -> None:
        """Ends the agents."""
        with self._lock:
            self._closed = True
            links = list(self._links.values())
        for link in links:
            link.hang_up()
        until = time.monotonic() + _GOODBYE_SECONDS
        for link in links:
            link.end(max(0.0, until - time.monotonic()))

    def _opener(self, i: int) -> Callable[[], str]:
        return lambda: self._open(i)

    def _open(self, i: int) -> str:
        link = self._transport.start(self._hosts[i])
        with self._lock:
            self._links[i] = link
            if self._closed:  # too late: nobody waits any more
                link.hang_up()
        try:
            version = greet(link)
        except ProtocolError:
            raise
        except HostLostError as error:
            raise self._explain(i, link, error) from None
        if version != zrun.__version__:
            raise PreflightError(
                f"it has zrun {version}, and this machine {zrun.__version__}",
                f"there: {self._pythons[i]} -m pip install zrun=={zrun.__version__}",
            )
        return version

    def _ask(self, i: int, question: Any, answers_are: type[T]) -> T:
        link = self._links[i]
        link.send(to_line(question))
        line = link.receive(_MAX_ANSWER_BYTES)
        if not line.endswith(b"\n"):
            raise self._explain(i, link, HostLostError("its agent ended in the middle of a question"))
        return from_line(answers_are, line, "its answer")

    def _explain(self, i: int, link: Link, error: HostLostError) -> ZrunError:
        """What a program that ended too soon says about it."""
        end = link.end(_LAST_WORDS_SECONDS)
        python, words = self._pythons[i], end.last_words
        last = words.splitlines()[-1] if words else ""
        if "No module named" in last and "zrun" in last:
            return PreflightError(
                f"zrun is not installed for {python}",
                f"there: {python} -m pip install zrun=={zrun.__version__}; or name another one with python=",
            )
        if end.returncode in (126, 127) or "not found" in last or "No such file" in last:
            return PreflightError(f"there is no Python at {python}", "name the one there with python= in the hostfile")
        hint = (
            "" if last else "its login shell, or a command that its SSH server forces, does not run what it is told to"
        )
        return HostLostError(f"{error.message}{f': {last}' if last else ''}", error.hint or hint)


def _all_at_once(
    calls: Mapping[int, Callable[[], T]], seconds: float, on_delay: Callable[[list[int]], None] | None = None
) -> dict[int, Answer[T]]:
    """What each call returns or raises. Those that take longer than `seconds` are left to themselves."""
    done: SimpleQueue[tuple[int, Answer[T]]] = SimpleQueue()

    def run(i: int, call: Callable[[], T]) -> None:
        start = time.time()
        try:
            answer = Answer(call(), None, start, time.time())
        except ZrunError as error:
            answer = Answer(None, error)
        except (OSError, ValueError) as error:  # the link was closed under our feet
            answer = Answer(None, HostLostError(str(error)))
        done.put((i, answer))

    for i, call in calls.items():
        threading.Thread(target=run, args=(i, call), name=f"ask-{i}", daemon=True).start()
    answers: dict[int, Answer[T]] = {}
    start = time.monotonic()
    waits = [seconds] if on_delay is None or seconds <= _PATIENCE_SECONDS else [_PATIENCE_SECONDS, seconds]
    for number, wait in enumerate(waits):
        if number and len(answers) < len(calls) and on_delay is not None:
            on_delay([i for i in calls if i not in answers])
        try:
            while len(answers) < len(calls):
                i, answer = done.get(timeout=max(0.0, start + wait - time.monotonic()))
                answers[i] = answer
        except Empty:
            pass
    late = HostLostError(f"no answer within {seconds:g} s", "is it overloaded, or its file system slow?")
    return {i: answers.get(i, Answer(None, late)) for i in calls}
