"""Runs a job, again if that is wanted, and says how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from zrun.attempt import Attempt, Verdict
from zrun.console import Console
from zrun.errors import ZrunError
from zrun.feed import ConsoleFeed
from zrun.prepare import Job
from zrun.signals import ENDING, Signalled, SignalQueue
from zrun.transport.base import Transport

_FAREWELL_SECONDS = 2.0  # for the console of an interrupted launcher

Say = Callable[[str, str], None]  # level and sentence
Again = Callable[[Verdict, Say], Job | None]


def never(verdict: Verdict, say: Say) -> None:
    """A job that failed stays so."""


class Supervisor:
    """A job, from start to end.

    Args:
        again: asked after each failure: what to run then. None, or ZrunError: nothing.
        stall_seconds: silence of all ranks that ends the job; None: no limit.
    """

    def __init__(
        self,
        job: Job,
        transport: Transport,
        console: Console,
        again: Again = never,
        stall_seconds: float | None = None,
    ) -> None:
        self._job = job
        self._transport = transport
        self._again = again
        self._stall_seconds = stall_seconds
        self._feed = ConsoleFeed(console)
        self.console_stalled = False  # after the end: the console's stream did not take everything

    def run(self) -> int:
        """Runs the job to its end.

        Returns:
            the exit code.
        """
        job: Job | None = self._job
        code = 130  # for a Ctrl-C between two attempts
        interrupted = True
        try:
            while job is not None:
                verdict = Attempt(job, self._transport, self._feed, self._stall_seconds).run()
                job = self._after(verdict)
            code, interrupted = verdict.code, verdict.interrupted
            if verdict.report is not None:
                self._feed.failed(verdict.report)
            elif interrupted:
                for host, directory in verdict.kept_output:
                    self._feed.message("info", f"output of the workers: {directory} on {host}")
        except KeyboardInterrupt:
            self._feed.message("warning", "SIGINT: the job is not started again")
        finally:
            self._close(code, interrupted)
        return code

    def _after(self, verdict: Verdict) -> Job | None:
        """What to run next."""
        if verdict.report is None:
            return None
        try:
            return self._again(verdict, self._feed.message)
        except ZrunError as error:
            self._feed.message("error", f"the job cannot be started again: {error.message}")
            return None

    def _close(self, code: int, interrupted: bool) -> None:
        """Waits until all is shown; not for long, if somebody wants the end."""
        queue: SimpleQueue[object] = SimpleQueue()
        self._feed.close(code)
        until = time.monotonic() + _FAREWELL_SECONDS
        with SignalQueue(queue):
            while not self._feed.wait(0.1):
                interrupted = interrupted or _is_ending(queue)
                if interrupted and time.monotonic() > until:
                    self.console_stalled = True  # nobody reads; the caller must not wait for the stream either
                    return


def _is_ending(queue: SimpleQueue[object]) -> bool:
    try:
        item = queue.get_nowait()
    except Empty:
        return False
    return isinstance(item, Signalled) and item.number in ENDING
