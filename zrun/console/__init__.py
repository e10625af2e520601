"""What a person, a pipe or a program sees of a job: three consoles over the same events. No console touches a process.

A console is called from one thread. It may block on its stream (a full pipe) as long as it likes, and keeps nothing
that grows with the length of the job.
"""

from __future__ import annotations

from typing import Protocol, TextIO

from zrun.console.jsonlines import JsonConsole
from zrun.console.output import Output
from zrun.console.plain import PlainConsole
from zrun.errors import UsageError
from zrun.events import Event
from zrun.job import FailureReport, JobView

MODES = ("rich", "plain", "json")


class Console(Protocol):
    """What the supervisor says to a console."""

    def job_started(self, job: JobView) -> None:
        """Once, before any event; again when the job starts again."""

    def handle(self, host: str, event: Event) -> None:
        """Every event, in order."""

    def message(self, level: str, text: str) -> None:
        """A sentence of the launcher. level: info, warning or error."""

    def failed(self, failure: FailureReport) -> None:
        """Why the job failed: the last words, said once."""

    def tick(self) -> None:
        """About 5 times a second, whether or not anything happened."""

    def close(self, exit_code: int) -> None:
        """The end; nothing is said afterwards."""


def make_console(mode: str, stream: TextIO, verbose: bool = False) -> Console:
    """The console of `mode` on `stream`.

    Args:
        mode: rich (a live row on a terminal), plain (lines) or json (one event a line).
        verbose: also tell the life of each worker and agent. json tells everything anyway.

    Raises:
        UsageError: an unknown mode.
    """
    output = Output(stream)
    if mode == "json":
        return JsonConsole(output)
    if mode == "plain":
        return PlainConsole(output, verbose)
    if mode == "rich":
        # Here and not at the top: only a terminal pays for loading rich.
        from zrun.console.live import LiveConsole

        return LiveConsole(output, verbose)
    raise UsageError(f"no console is called {mode!r}", f"use one of {', '.join(MODES)}")
