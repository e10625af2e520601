"""Signals of the launcher as items of its queue, so that they are handled like everything else that happens."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from queue import SimpleQueue
from types import FrameType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Signalled:
    """A signal has come."""

    number: int


class SignalQueue:
    """While entered, puts each signal into `queue`. One that was ignored at the start (nohup) stays ignored.

    SimpleQueue.put may be called from a handler that interrupts another put.
    """

    def __init__(self, queue: SimpleQueue[object]) -> None:
        self._queue = queue
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalQueue:
        for number in (*ENDING, *FORWARDED, signal.SIGTSTP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._put)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def stop_here(self) -> None:
        """Stops this process as Ctrl-Z does; returns when it is continued."""
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._put)

    def _put(self, number: int, frame: FrameType | None) -> None:
        self._queue.put(Signalled(number))
