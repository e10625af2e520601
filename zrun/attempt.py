"""One run of a job's processes: one agent a host, one queue, the failure policy. Touches no process itself.

[Note: who waits for whom]
The main thread takes items from one queue and never blocks on anything else: threads listen to the agents, a thread
sends heartbeats, a thread feeds the console. So a stalled console, a slow host or a full pipe delays neither the
reaction to a failure nor the lease.

[Note: silent hosts]
Agents answer heartbeats. One that says nothing for a whole lease is lost, however its line looks: a cut cable tells
nobody. Should this process itself have been stopped or suspended, it does not count what it could not hear.
"""

from __future__ import annotations

import math
import signal
import time
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from zrun.connection import Closed, Connection
from zrun.errors import HostLostError
from zrun.events import AgentFailed, Event, MemoryUsed, Notice, RankPosition, RunStarted, WorkerExited
from zrun.feed import ConsoleFeed
from zrun.heart import Heart
from zrun.job import FailureReport
from zrun.outcome import Outcome
from zrun.prepare import Job
from zrun.signals import FORWARDED, Signalled, SignalQueue
from zrun.transport.base import Transport

GREETING_SECONDS = 60.0  # for an agent to start
_ALIKE_SECONDS = 0.25  # after a failure, for others that fail at the same moment to say so ...
_ALIKE_LIMIT = 1.5  # ... as long as they keep coming
_CLEANUP_SECONDS = 15.0  # after grace, for an agent or keeper to end what cannot be killed
_REMARK_SECONDS = 1.0  # after the others were told to stop
_NO_ENGINE = (
    "--as_deepspeed: no worker called deepspeed.initialize, so nothing that ran was trained by zrun. Accelerate leaves "
    "DeepSpeed out for Accelerator(cpu=True), ACCELERATE_USE_CPU=1 and --cpu"
)
_SAME_KEYSTROKE = 0.25  # a wrapper may pass on a Ctrl-C that we have got already


@dataclass
class Times:
    """When things happen, on the monotonic clock. None: they do not."""

    started: float
    awake_since: float
    spoke_at: float  # some rank, last
    stop_at: float | None = None  # when the window for failures alike closes
    stop_by: float = 0.0  # at the latest
    remark_at: float | None = None  # when a person should be told what takes so long
    give_up_at: float | None = None  # a host that has not ended by then is lost
    interrupted_at: float | None = None
    looked_at: float = 0.0  # at the clock


@dataclass(frozen=True)
class Verdict:
    """How it ended."""

    code: int
    report: FailureReport | None  # None for success and for an interrupted job
    interrupted: bool
    lost: tuple[int, ...] = ()  # node ranks of the hosts that were lost
    kept_output: tuple[tuple[str, str], ...] = ()  # host and directory


class Attempt:
    """One run of a job.

    Args:
        stall_seconds: when all ranks are silent for so long, the job is ended and their stacks are shown.
    """

    def __init__(self, job: Job, transport: Transport, feed: ConsoleFeed, stall_seconds: float | None = None) -> None:
        self._job = job
        self._queue: SimpleQueue[object] = SimpleQueue()
        self._signals = SignalQueue(self._queue)
        self._connections = [
            Connection(host, spec, transport, self._queue, place)
            for place, (host, spec) in enumerate(zip(job.hosts, job.specs, strict=True))
        ]
        self._outcome = Outcome(job.specs, job.skews)
        self._feed = feed
        self._patience = min(job.specs[0].lease, stall_seconds or math.inf)  # the shortest silence that means something
        self._heart = Heart(self._connections, self._patience)
        now = time.monotonic()
        self._times = Times(now, now, now, looked_at=now)
        self._stall_seconds = stall_seconds
        self._keeps_output = False  # the agents know that their files are needed
        self._has_engine = False  # some rank made one

    def run(self) -> Verdict:
        """Runs the job to its end."""
        with self._signals:
            for connection in self._connections:
                connection.start()
            self._heart.start()
            self._feed.job_started(self._job.view)
            for level, text in self._job.remarks:
                self._feed.message(level, text)
            while not all(connection.closed for connection in self._connections):
                self._take(self._next_item(self._seconds_to_wait()))
                self._look_at_the_clock()
            self._heart.stop()
            return self._finish()

    def _seconds_to_wait(self) -> float:
        times = (self._times.stop_at, self._times.remark_at, self._times.give_up_at)
        tick = min(1.0, self._patience / 8)
        return max(0.0, min([tick, *(t - time.monotonic() for t in times if t is not None)]))

    def _next_item(self, timeout: float) -> object:
        try:
            return self._queue.get(timeout=timeout)
        except Empty:
            return None

    def _take(self, item: object) -> None:
        if isinstance(item, Signalled):
            self._on_signal(item.number)
        elif isinstance(item, tuple):
            place, what = item
            if isinstance(what, Closed):
                self._on_closed(place, what)
            elif isinstance(what, Event):
                self._connections[place].taken()
                self._on_event(place, what)

    # ---- what happens ----------------------------------------------------------------------------------------------

    def _on_event(self, place: int, event: Event) -> None:
        if not _tells_of_silence(event):
            self._times.spoke_at = time.monotonic()
        self._has_engine = self._has_engine or isinstance(event, RunStarted)
        self._outcome.take(place, event)
        self._feed.handle(self._connections[place].spec.host, event)
        if self._feed.left_out and not self._keeps_output:
            self._keeps_output = True
            self._tell("keep")
        failed = isinstance(event, WorkerExited) and event.returncode != 0 and not event.stopped
        if failed or isinstance(event, AgentFailed):
            self._on_failure()

    def _on_closed(self, place: int, closed: Closed) -> None:
        connection = self._connections[place]
        if connection.closed:
            return  # it was given up before
        connection.closed = True
        connection.hang_up()
        self._outcome.close(place, closed.error)
        if self._outcome.hosts[place].lost is not None:
            self._on_failure()

    def _on_failure(self) -> None:
        """The job is over. Those who fail alike get a moment to say so before they are stopped."""
        if self._times.give_up_at is not None:
            return  # stopped already
        now = time.monotonic()
        if self._times.stop_at is None:
            self._times.stop_by = now + _ALIKE_LIMIT
        self._times.stop_at = min(self._times.stop_by, now + _ALIKE_SECONDS)

    def _on_signal(self, number: int) -> None:
        if number in FORWARDED:
            self._tell("signal", number=number)
        elif number == signal.SIGTSTP:
            self._heart.hold()
            self._signals.stop_here()
            self._times.awake_since = time.monotonic()
            self._heart.go_on()
        elif self._times.interrupted_at is None:
            self._times.interrupted_at = time.monotonic()
            self._outcome.interrupt(number)
            name, grace = signal.Signals(number).name, self._job.specs[0].grace
            again = ", Ctrl-C again ends them at once" if number == signal.SIGINT else ""
            self._feed.message("warning", f"{name}: the workers have {grace:g} s to end{again}")
            self._stop(number=signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        elif number == signal.SIGINT and time.monotonic() - self._times.interrupted_at > _SAME_KEYSTROKE:
            self._feed.message("warning", "SIGINT again: the workers are killed")
            self._tell("kill")
            self._times.give_up_at = time.monotonic() + _CLEANUP_SECONDS

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        if self._times.stop_at is not None and now >= self._times.stop_at:
            self._times.stop_at = None
            self._stop(number=signal.SIGTERM)
            self._times.remark_at = now + _REMARK_SECONDS
        if self._times.remark_at is not None and now >= self._times.remark_at:
            self._times.remark_at = None
            grace = self._job.specs[0].grace
            self._feed.message("warning", f"the job has failed; the other workers have {grace:g} s to end")
        self._look_at_the_hosts(now)
        self._look_for_a_stall(now)

    def _look_at_the_hosts(self, now: float) -> None:
        times, lease = self._times, self._job.specs[0].lease
        if now - times.looked_at > self._patience / 2:  # this process was stopped
            times.awake_since = now
        times.looked_at = now
        late = now > times.started + GREETING_SECONDS
        for connection in self._connections:
            if connection.closed:
                continue
            if connection.greeted and now - max(connection.heard_at, times.awake_since) > lease:
                connection.silent = True
                self._lose(connection, f"it gave no sign of life for {lease:g} s", "see --lease")
                continue
            if late and not connection.greeted:
                self._lose(connection, f"its agent has not started within {GREETING_SECONDS:g} s")
            elif self._times.give_up_at is not None and now > self._times.give_up_at:
                self._lose(connection, "its agent does not end")

    def _look_for_a_stall(self, now: float) -> None:
        limit, times = self._stall_seconds, self._times
        if limit is None or times.give_up_at is not None or times.stop_at is not None:
            return
        # Output that is no line yet, or one too many for the console, is only known to the agents.
        if now - max(times.spoke_at, times.awake_since, *(c.spoke_at for c in self._connections)) > limit:
            times.spoke_at = now
            self._outcome.stall(limit)
            self._feed.message("warning", f"all ranks are silent for {limit:g} s: they are ended to show their stacks")
            self._tell("signal", number=signal.SIGABRT)  # which PYTHONFAULTHANDLER answers with the stacks
            self._on_failure()

    def _lose(self, connection: Connection, why: str, hint: str = "") -> None:
        self._on_closed(connection.place, Closed(HostLostError(why, hint)))

    def _stop(self, number: int) -> None:
        if self._times.give_up_at is None:
            grace = self._job.specs[0].grace
            self._times.give_up_at = time.monotonic() + grace + _CLEANUP_SECONDS
            self._tell("stop", grace=grace, number=number)

    def _tell(self, command: str, **values: float) -> None:
        for connection in self._connections:
            if not connection.closed:
                connection.command(command, **values)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def _finish(self) -> Verdict:
        until = time.monotonic() + _CLEANUP_SECONDS
        hosts = self._outcome.hosts
        if any(host.lost is not None for host in hosts):
            until += self._job.specs[0].grace  # a keeper may still be at work
        for connection, host in zip(self._connections, hosts, strict=True):
            host.end = connection.end(max(0.0, until - time.monotonic()))
        code = self._outcome.exit_code
        if code == 0 and self._job.specs[0].as_deepspeed and not self._has_engine:
            self._feed.message("warning", _NO_ENGINE)
        return Verdict(
            code,
            self._outcome.report(),
            self._outcome.interrupted_by is not None,
            tuple(host.spec.node_rank for host in hosts if host.lost is not None),
            tuple((host.spec.host, host.done.log_dir) for host in hosts if host.done is not None and host.done.log_dir),
        )


def _tells_of_silence(event: Event) -> bool:
    """Said while a rank does nothing, too."""
    return isinstance(event, (MemoryUsed, RankPosition)) or (isinstance(event, Notice) and event.from_watch)
