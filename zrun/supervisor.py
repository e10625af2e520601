"""Runs a job: one agent a host, one queue, the failure policy, the exit code. Touches no process itself.

[Note: who waits for whom]
The main thread takes items from one queue and never blocks on anything else: threads listen to the agents, a thread
sends heartbeats, a thread feeds the console. So a stalled console, a slow host or a full pipe delays neither the
reaction to a failure nor the lease.
"""

from __future__ import annotations

import signal
import threading
import time
from queue import Empty, SimpleQueue

from zrun.connection import Closed, Connection
from zrun.console import Console
from zrun.errors import HostLostError
from zrun.events import AgentFailed, Event, WorkerExited
from zrun.feed import ConsoleFeed
from zrun.outcome import Outcome
from zrun.prepare import Job
from zrun.signals import FORWARDED, Signalled, SignalQueue
from zrun.transport.base import Transport

GREETING_SECONDS = 60.0  # for an agent to start
_ALIKE_SECONDS = 0.25  # after a failure, for others that fail at the same moment to say so ...
_ALIKE_LIMIT = 1.5  # ... as long as they keep coming
_CLEANUP_SECONDS = 15.0  # after grace, for an agent or keeper to end what cannot be killed
_REMARK_SECONDS = 1.0  # after the others were told to stop
_SAME_KEYSTROKE = 0.25  # a wrapper may pass on a Ctrl-C that we have got already
_FAREWELL_SECONDS = 2.0  # for the console of an interrupted launcher


class Supervisor:
    """One run of a job."""

    def __init__(self, job: Job, transport: Transport, console: Console) -> None:
        self._job = job
        self._queue: SimpleQueue[object] = SimpleQueue()
        self._signals = SignalQueue(self._queue)
        self._connections = [
            Connection(host, spec, transport, self._queue) for host, spec in zip(job.hosts, job.specs, strict=True)
        ]
        self._outcome = Outcome(job.specs)
        self._feed = ConsoleFeed(console)
        self._heart = Heart(self._connections, job.specs[0].lease)
        self._started = 0.0
        self._stop_at: float | None = None  # when the window for failures alike closes
        self._stop_by = 0.0  # at the latest
        self._remark_at: float | None = None  # when a person should be told what takes so long
        self._give_up_at: float | None = None  # a host that has not ended by then is lost
        self._interrupted_at: float | None = None
        self._keeps_output = False  # the agents know that their files are needed
        self.console_stalled = False  # after the end: the console's stream did not take everything

    def run(self) -> int:
        """Runs the job to its end.

        Returns:
            the exit code.
        """
        self._started = time.monotonic()
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
        times = [t for t in (self._stop_at, self._remark_at, self._give_up_at) if t is not None]
        return max(0.0, min([1.0, *(t - time.monotonic() for t in times)]))

    def _next_item(self, timeout: float) -> object:
        try:
            return self._queue.get(timeout=timeout)
        except Empty:
            return None

    def _take(self, item: object) -> None:
        if isinstance(item, Signalled):
            self._on_signal(item.number)
        elif isinstance(item, tuple):
            node_rank, what = item
            if isinstance(what, Closed):
                self._on_closed(node_rank, what)
            elif isinstance(what, Event):
                self._connections[node_rank].taken()
                self._on_event(node_rank, what)

    # ---- what happens ----------------------------------------------------------------------------------------------

    def _on_event(self, node_rank: int, event: Event) -> None:
        self._outcome.take(node_rank, event)
        self._feed.handle(self._connections[node_rank].spec.host, event)
        if self._feed.left_out and not self._keeps_output:
            self._keeps_output = True
            self._tell("keep")
        failed = isinstance(event, WorkerExited) and event.returncode != 0 and not event.stopped
        if failed or isinstance(event, AgentFailed):
            self._on_failure()

    def _on_closed(self, node_rank: int, closed: Closed) -> None:
        connection = self._connections[node_rank]
        if connection.closed:
            return  # it was given up before
        connection.closed = True
        connection.hang_up()
        self._outcome.close(node_rank, closed.error)
        if self._outcome.hosts[node_rank].lost is not None:
            self._on_failure()

    def _on_failure(self) -> None:
        """The job is over. Those who fail alike get a moment to say so before they are stopped."""
        if self._give_up_at is not None:
            return  # stopped already
        now = time.monotonic()
        if self._stop_at is None:
            self._stop_by = now + _ALIKE_LIMIT
        self._stop_at = min(self._stop_by, now + _ALIKE_SECONDS)

    def _on_signal(self, number: int) -> None:
        if number in FORWARDED:
            self._tell("signal", number=number)
        elif number == signal.SIGTSTP:
            self._heart.hold()
            self._signals.stop_here()
            self._heart.go_on()
        elif self._interrupted_at is None:
            self._interrupted_at = time.monotonic()
            self._outcome.interrupt(number)
            name, grace = signal.Signals(number).name, self._job.specs[0].grace
            again = ", Ctrl-C again ends them at once" if number == signal.SIGINT else ""
            self._feed.message("warning", f"{name}: the workers have {grace:g} s to end{again}")
            self._stop(number=signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        elif number == signal.SIGINT and time.monotonic() - self._interrupted_at > _SAME_KEYSTROKE:
            self._feed.message("warning", "SIGINT again: the workers are killed")
            self._tell("kill")
            self._give_up_at = time.monotonic() + _CLEANUP_SECONDS

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        if self._stop_at is not None and now >= self._stop_at:
            self._stop_at = None
            self._stop(number=signal.SIGTERM)
            self._remark_at = now + _REMARK_SECONDS
        if self._remark_at is not None and now >= self._remark_at:
            self._remark_at = None
            grace = self._job.specs[0].grace
            self._feed.message("warning", f"the job has failed; the other workers have {grace:g} s to end")
        late = now > self._started + GREETING_SECONDS
        for connection in self._connections:
            if connection.closed:
                continue
            if late and not connection.greeted:
                self._lose(connection, f"its agent has not started within {GREETING_SECONDS:g} s")
            elif self._give_up_at is not None and now > self._give_up_at:
                self._lose(connection, "its agent does not end")

    def _lose(self, connection: Connection, why: str) -> None:
        self._on_closed(connection.spec.node_rank, Closed(HostLostError(why)))

    def _stop(self, number: int) -> None:
        if self._give_up_at is None:
            grace = self._job.specs[0].grace
            self._give_up_at = time.monotonic() + grace + _CLEANUP_SECONDS
            self._tell("stop", grace=grace, number=number)

    def _tell(self, command: str, **values: float) -> None:
        for connection in self._connections:
            if not connection.closed:
                connection.command(command, **values)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def _finish(self) -> int:
        until = time.monotonic() + _CLEANUP_SECONDS
        if any(host.lost is not None for host in self._outcome.hosts):
            until += self._job.specs[0].grace  # a keeper may still be at work
        for connection, host in zip(self._connections, self._outcome.hosts, strict=True):
            host.end = connection.end(max(0.0, until - time.monotonic()))
        report = self._outcome.report()
        if report is not None:
            self._feed.failed(report)
        elif self._outcome.interrupted_by is not None:
            self._say_where_the_output_is()
        code = self._outcome.exit_code
        self._feed.close(code)
        until = time.monotonic() + _FAREWELL_SECONDS
        while not self._feed.wait(0.1):
            self._take(self._next_item(0.0))
            if self._interrupted_at is not None and time.monotonic() > until:
                self.console_stalled = True  # nobody reads; the caller must not wait for the stream either
                break
        return code

    def _say_where_the_output_is(self) -> None:
        for host in self._outcome.hosts:
            if host.done is not None and host.done.log_dir:
                self._feed.message("info", f"output of the workers: {host.done.log_dir} on {host.spec.host}")


class Heart:
    """Tells the agents, from a thread, that the launcher lives."""

    def __init__(self, connections: list[Connection], lease: float) -> None:
        self._connections = connections
        self._seconds = min(5.0, lease / 4)
        self._over = threading.Event()
        self._beating = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()

    def hold(self) -> None:
        """The launcher will be silent on purpose: the last line the agents get for now."""
        self._beating.acquire()
        self._beat("hold")

    def go_on(self) -> None:
        self._beat("beat")
        self._beating.release()

    def _run(self) -> None:
        while not self._over.wait(self._seconds):
            with self._beating:
                self._beat("beat")

    def _beat(self, command: str) -> None:
        for connection in self._connections:
            connection.command(command)
