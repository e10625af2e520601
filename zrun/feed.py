"""Feeds a console from a thread of its own, so that a console that stalls stalls nothing else."""

from __future__ import annotations

import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial

from zrun.console import Console
from zrun.events import WORKER_KINDS, Event, OutputDropped, WorkerOutput, WorkerStarted
from zrun.job import FailureReport, JobView

_DROPPABLE = WORKER_KINDS | {WorkerOutput.kind, OutputDropped.kind}
_TICK_SECONDS = 0.2
_WAITING_LIMIT = 20_000  # events that a stalled console may keep waiting
_WAITING_CHARS = 16 * 1024 * 1024  # and the text in them


class ConsoleFeed:
    """The one consumer before the console. Its methods never wait.

    While the console is stalled, output lines are counted instead of kept; one marker says so once it goes on.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._waiting = 0  # droppable events in _calls
        self._chars = 0
        self._dropped: dict[tuple[str, int, str], int] = {}
        self._paths: dict[tuple[str, int], str] = {}
        self._closing = False
        self.left_out = False  # some lines are only in the files of their host
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._thread.start()

    def job_started(self, job: JobView) -> None:
        self._put(partial(self._console.job_started, job))

    def message(self, level: str, text: str) -> None:
        self._put(partial(self._console.message, level, text))

    def failed(self, failure: FailureReport) -> None:
        self._put(partial(self._console.failed, failure))

    def handle(self, host: str, event: Event) -> None:
        """An event of a host."""
        if isinstance(event, WorkerStarted):
            self._paths[host, event.rank] = event.log_dir
        if event.kind not in _DROPPABLE:
            self._say_dropped()
            self._put(partial(self._console.handle, host, event))
            return
        size = len(event.text) if isinstance(event, WorkerOutput) else 0
        if self._waiting >= _WAITING_LIMIT or self._chars + size > _WAITING_CHARS:
            self._drop(host, event)
            return
        self._say_dropped()
        with self._changed:
            self._waiting += 1
            self._chars += size
        self._put(partial(self._pass_on, host, event, size))

    def _drop(self, host: str, event: Event) -> None:
        if isinstance(event, (WorkerOutput, OutputDropped)):
            key = (host, event.rank, event.stream)
            lines = event.lines if isinstance(event, OutputDropped) else 1
            self._dropped[key] = self._dropped.get(key, 0) + lines
            self.left_out = True

    def close(self, exit_code: int) -> None:
        """The last call; what waits is still shown."""
        self._say_dropped(at_end=True)
        self._put(partial(self._console.close, exit_code))
        with self._changed:
            self._closing = True
            self._changed.notify()

    def wait(self, timeout: float) -> bool:
        """Waits until everything is shown. False if that took longer."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _put(self, call: Callable[[], None]) -> None:
        with self._changed:
            if self._thread.is_alive():  # a console that broke takes nothing
                self._calls.append(call)
                self._changed.notify()

    def _say_dropped(self, at_end: bool = False) -> None:
        if not self._dropped or (self._waiting >= _WAITING_LIMIT // 2 and not at_end):
            return
        for (host, rank, stream), lines in self._dropped.items():
            path = f"{self._paths.get((host, rank), '')}/{stream}"
            self._put(partial(self._console.handle, host, OutputDropped(rank, stream, lines, path)))
        self._dropped.clear()

    def _pass_on(self, host: str, event: Event, size: int) -> None:
        with self._changed:
            self._waiting -= 1
            self._chars -= size
        self._console.handle(host, event)

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    if not self._calls and not self._closing:
                        self._changed.wait(_TICK_SECONDS)
                    calls, closing = list(self._calls), self._closing
                    self._calls.clear()
                for call in calls:
                    call()
                if closing and not self._calls:
                    return
                self._console.tick()
        except Exception:
            # A bug in the console must not end a training run. There is nothing left to say it with but stderr.
            traceback.print_exc(file=sys.stderr)
