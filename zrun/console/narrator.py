"""What the plain and the live console have in common: which words an event leads to. How they look is theirs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import zrun.console.cells as cells
import zrun.console.figures as figures
from zrun import events
from zrun.console.fold import Folding, Line
from zrun.console.lastwords import LastWords, Words
from zrun.console.names import Names
from zrun.console.progress import Progress
from zrun.console.sanitize import clean_line, clean_lines
from zrun.job import FailureReport, JobView

REMEMBERED_NOTICES = 64


@dataclass(frozen=True)
class FailureWords:
    """A failure in lines of clean text, in the order to print them."""

    title: str  # over the traceback
    traceback: tuple[str, ...]
    message: str
    remarks: tuple[str, ...]


def failure_words(failure: FailureReport) -> FailureWords:
    message = failure.message
    if failure.signal_name and failure.signal_name not in message:
        message = f"{message} ({failure.signal_name})"
    remarks = []
    if failure.same_count > 1:
        remarks.append(f"{failure.same_count} ranks failed alike, shown is the first")
    if failure.others_stopped:
        remarks.append(f"{figures.count(failure.others_stopped, 'other rank')} stopped because of it")
    remarks += failure.positions
    if failure.hint:
        remarks.append(failure.hint)
    if failure.log_path:
        remarks.append(f"output: {failure.log_path} on {failure.host}")
    who = f"rank {failure.rank} on {failure.host}" if failure.rank is not None else failure.host
    return FailureWords(
        title=clean_line(f"{who} ended with"),
        traceback=tuple(clean_lines(failure.traceback)),
        message=" ".join(clean_lines(message)),
        remarks=tuple(line for remark in remarks for line in clean_lines(remark)),
    )


class Narrator:
    """Takes in events and calls the `show_...` methods, with clean text only. Bounded by the number of ranks."""

    def __init__(self, verbose: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.verbose = verbose
        self.clock = clock
        self.job: JobView | None = None
        self.progress = Progress(1)
        self.names = Names()
        self._last_words = LastWords()
        self._folding = Folding(1, self.show_line)
        self._notices: deque[tuple[str, str, int]] = deque(maxlen=REMEMBERED_NOTICES)

    # ---- the words, made by whoever shows them ----

    def show_line(self, line: Line) -> None:
        """One line of a worker, or of several that said the same."""
        raise NotImplementedError

    def show_sentence(self, level: str, text: str) -> None:
        """One line of our own. level: info, warning, error, or detail (less than info)."""
        raise NotImplementedError

    def show_step(self, event: events.StepDone) -> None:
        """`self.progress` has a new step."""
        raise NotImplementedError

    def show_failure(self, words: FailureWords) -> None:
        raise NotImplementedError

    # ---- what the supervisor says ----

    def job_started(self, job: JobView) -> None:
        self._show_words(self._last_words.rest(""))
        self.release()
        self.job = job
        self.verbose = self.verbose or job.verbose
        self.progress = Progress(job.world_size)
        self.names = Names(job)
        self._folding = Folding(job.world_size, self.show_line)
        hosts = job.hosts[0] if len(job.hosts) == 1 else figures.count(len(job.hosts), "host")
        where = f"{figures.count(job.world_size, 'worker')} on {hosts}"
        self._say("info", f"{where}, device {job.device}, backend {job.backend}, master {job.master}")
        if self.verbose:
            if len(job.hosts) > 1:
                self._say("detail", f"hosts: {', '.join(job.hosts)}")
            self._say("detail", f"job {job.job_id}: {job.command}")

    def message(self, level: str, text: str) -> None:
        self._say(level, text)

    def failed(self, failure: FailureReport) -> None:
        self._show_words(self._last_words.rest(failure.traceback))
        self.release()
        self.show_failure(failure_words(failure))

    def tick(self) -> None:
        self._show_words(self._last_words.overdue(self.clock()))
        self._folding.tick(self.clock())

    def close(self, exit_code: int) -> None:
        self._show_words(self._last_words.rest(""))
        self.release()

    def handle(self, host: str, event: events.Event) -> None:
        if isinstance(event, events.WorkerOutput):
            self._output(host, event)
        elif isinstance(event, events.StepDone):
            self._step(event)
        elif isinstance(event, events.MemoryUsed):
            self.progress.memory_used(event)
        elif isinstance(event, events.RunStarted):
            self._run_started(event)
        elif isinstance(event, events.Notice):
            self._notice(host, event)
        elif isinstance(event, events.OutputDropped):
            lines = figures.count(event.lines, "line")
            where = event.path or "no file could take them"
            self._say("detail", f"{lines} of {self.names.of(host, event.rank)} came too fast to show: {where}")
        else:
            self._life(host, event)

    # ---- events into words ----

    def _output(self, host: str, event: events.WorkerOutput) -> None:
        if self._last_words.offer(host, event, self.clock()):
            return
        if not event.transient:
            self._show_words(self._last_words.before(event))
        self._fold(host, event)

    def _fold(self, host: str, event: events.WorkerOutput) -> None:
        self._folding.offer(host, event, clean_line(event.text), self.clock())

    def release(self) -> None:
        """Show the lines that wait for others alike."""
        self._folding.release()

    def _show_words(self, words: list[Words]) -> None:
        for said in words:
            for event in said.lines:
                self._fold(said.host, event)
            if said.others:
                self._say("detail", f"{figures.count(said.others, 'other rank')} said the same")

    def _step(self, event: events.StepDone) -> None:
        if self.progress.newest is not None and event.step <= self.progress.newest.step:
            self.progress = self.progress.fresh(event.total_steps)  # another engine of the same script
        self.progress.step_done(event)
        skipped = cells.skipped_line(self.progress)
        if skipped:
            self._say("warning", skipped)
        self.show_step(event)

    def _run_started(self, event: events.RunStarted) -> None:
        if event.rank:
            return  # the others say the same
        self.progress = self.progress.fresh(event.total_steps)
        widest = max((len(label) for label, _ in event.details), default=0)
        for label, value in event.details:
            self._say("info", f"{label:<{widest}}  {value}")

    def _notice(self, host: str, event: events.Notice) -> None:
        """Say it once, if several ranks say the same."""
        if any(
            (level, text) == (event.level, event.text) and rank != event.rank for level, text, rank in self._notices
        ):
            return
        self._notices.append((event.level, event.text, event.rank))
        who = f"{self.names.of(host, event.rank)}: " if event.rank else ""
        self._say(event.level, who + event.text)

    def _life(self, host: str, event: events.Event) -> None:
        if isinstance(event, events.WorkerExited):
            self._show_words(self._last_words.exited(event))
        if not self.verbose:
            return
        if isinstance(event, events.WorkerStarted):
            self._say("detail", f"{self.names.of(host, event.rank)} started, pid {event.pid}")
        elif isinstance(event, events.WorkerExited):
            how = f"code {event.returncode}" if event.returncode >= 0 else f"signal {-event.returncode}"
            why = ", stopped by zrun" if event.stopped else ""
            self._say("detail", f"{self.names.of(host, event.rank)} ended with {how}{why}")
        elif isinstance(event, events.AgentFailed):
            self._say("detail", f"the agent on {host} gave up: {event.message}")
        elif isinstance(event, events.AgentDone):
            logs = f", output in {event.log_dir}" if event.log_dir else ""
            self._say("detail", f"nothing of the job is left on {host}{logs}")

    def _say(self, level: str, text: str) -> None:
        self.release()
        for line in clean_lines(text):
            self.show_sentence(level, line)
