"""A console that shows the output of some ranks, for --show_ranks. All else is told as ever, failures of others too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zrun.errors import UsageError
from zrun.events import Event, OutputDropped, WorkerOutput
from zrun.hostlist import PatternError, parse_numbers
from zrun.job import FailureReport, JobView

if TYPE_CHECKING:
    from zrun.console import Console


class OnlyRanks:
    """Passes on to another console what concerns `ranks`."""

    def __init__(self, console: Console, ranks: frozenset[int]) -> None:
        self._console = console
        self._ranks = ranks

    def job_started(self, job: JobView) -> None:
        self._console.job_started(job)

    def handle(self, host: str, event: Event) -> None:
        if not isinstance(event, (WorkerOutput, OutputDropped)) or event.rank in self._ranks:
            self._console.handle(host, event)

    def message(self, level: str, text: str) -> None:
        self._console.message(level, text)

    def failed(self, failure: FailureReport) -> None:
        self._console.failed(failure)

    def tick(self) -> None:
        self._console.tick()

    def close(self, exit_code: int) -> None:
        self._console.close(exit_code)


def read_ranks(text: str, world_size: int) -> frozenset[int]:
    """`0,3-5` -> the ranks.

    Raises:
        UsageError: no list of numbers, or a rank that the job does not have.
    """
    try:
        ranks = frozenset(parse_numbers(text))
    except PatternError as error:
        raise UsageError(f"--show_ranks {text}: {error.message}", "write 0,3-5") from None
    if max(ranks) >= world_size:
        raise UsageError(f"--show_ranks {text}: there is no rank {max(ranks)}", f"the job has ranks 0-{world_size - 1}")
    return ranks
