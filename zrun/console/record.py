"""What of a job is kept in --log_dir on the machine of its launcher: `merged.log`, the words of all ranks as the plain
console shows them, and `events.jsonl`, its life as the JSON console tells it, with the time. Both rotate like the files
of ranks.
"""

from __future__ import annotations

import io
import os
import time
from typing import TYPE_CHECKING, TextIO

from zrun import events
from zrun.console.jsonlines import JsonConsole
from zrun.console.output import Output
from zrun.console.plain import PlainConsole
from zrun.errors import UsageError
from zrun.job import FailureReport, JobView
from zrun.spool import SpoolFile

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from zrun.console import Console

_FLEETING = (
    *(events.WorkerOutput, events.OutputDropped, events.StepDone),
    *(events.MemoryUsed, events.RankPosition, events.AgentAlive),
)


class Recorded:
    """A console, and two files that hear the same.

    Args:
        console: the one that somebody looks at.
        directory: made if it is not there.

    Raises:
        UsageError: the files cannot be made.
    """

    def __init__(self, console: Console, directory: str) -> None:
        try:
            os.makedirs(directory, exist_ok=True)
            merged, life = (_open(os.path.join(directory, name)) for name in ("merged.log", "events.jsonl"))
        except OSError as error:
            raise UsageError(
                f"--log_dir {directory}: {error.strerror}: {error.filename}", "choose another place"
            ) from None
        self._life = JsonConsole(Output(life), time.time)
        self._told: tuple[Console, ...] = (console, PlainConsole(Output(merged)), self._life)

    def job_started(self, job: JobView) -> None:
        for console in self._told:
            console.job_started(job)

    def handle(self, host: str, event: events.Event) -> None:
        for console in self._told:
            if console is not self._life or not isinstance(event, _FLEETING):
                console.handle(host, event)

    def message(self, level: str, text: str) -> None:
        for console in self._told:
            console.message(level, text)

    def failed(self, failure: FailureReport) -> None:
        for console in self._told:
            console.failed(failure)

    def tick(self) -> None:
        for console in self._told:
            console.tick()

    def close(self, exit_code: int) -> None:
        for console in self._told:
            console.close(exit_code)


class _Spooled(io.RawIOBase):
    """A spool file as a stream. A disk that takes no more costs the words and nothing else."""

    def __init__(self, file: SpoolFile) -> None:
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer) -> int:
        self._file.write(bytes(data))
        return memoryview(data).nbytes


def _open(path: str) -> TextIO:
    stream = io.BufferedWriter(_Spooled(SpoolFile(path)))
    return io.TextIOWrapper(stream, encoding="utf-8", errors="replace", newline="\n")
