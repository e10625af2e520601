"""The agent: one per host. It is told a job on stdin, starts the workers, says events on stdout, and ends the workers
when the job ends, when it is told to, or when its launcher is gone. Standard library only: it has to start at once.

[Note: dead man's switch]
Every way in which a launcher can end (exit, SIGKILL, a cut cable) leads to the same two observations here: stdin ends,
or no line comes for `lease` seconds. Both lead to the same ending: TERM to every process of the job, one shared grace,
KILL, exit. Should the agent itself be killed, its parent (zrun.keeper) does that. There is no reconnecting.
"""

from __future__ import annotations

import errno
import os
import select
import selectors
import signal
import time
import traceback

import zrun
from zrun import events
from zrun.channel import Command, Inbox, Outbox
from zrun.devices import usable_cores
from zrun.errors import HostLostError, ProtocolError, UsageError
from zrun.hints import count_oom_kills, hint_for
from zrun.job import MAX_SPEC_BYTES, JobSpec
from zrun.keeper import GIVE_UP_SECONDS, watch
from zrun.outputs import last_traceback
from zrun.processes import Ending, JobProcesses, Mark, adopt_orphans
from zrun.spool import SpoolDirectory
from zrun.taps import OutputTap, Tap, drain
from zrun.wire import QUESTION
from zrun.workers import Worker, start_worker

_IDLE_SECONDS = 0.5  # between looks at the clock
_ENDING_SECONDS = 0.05  # between looks at what is left
_LEFTOVER_GRACE = 5.0  # seconds for what finished workers have left behind
_FAREWELL_SECONDS = 30.0  # for a launcher that does not read the last lines
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Agent:
    """The loop that serves the workers of one host.

    Args:
        begun: what has been read of stdin after the job.
    """

    def __init__(self, spec: JobSpec, begun: bytes) -> None:
        self._spec = spec
        self._inbox = Inbox(0, begun, spec.lease)
        self._outbox = Outbox(1)
        self._selector = selectors.PollSelector()  # also takes files, for an agent that is run by hand
        self._workers: dict[int, Worker] = {}  # by pid
        self._processes = JobProcesses(Mark(spec.job_id, spec.node_rank), os.getpid())
        self._spools: SpoolDirectory | None = None
        self._ending: Ending | None = None
        self._stopped = False  # the workers are being ended; otherwise they end by themselves
        self._next_look = 0.0  # at what is left, while ending
        self._keep_output = False
        self._heard_at: float | None = None  # a byte of output of any rank, last
        self._keeper = os.getppid()
        self._oom_kills = count_oom_kills()
        self._wakeup = _signals_as_bytes()

    def run(self) -> None:
        """The job on this host, from start to end. On return nothing of it is left, or the launcher was told what."""
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._selector.register(self._inbox.fd, selectors.EVENT_READ)
        try:
            self._start_workers()
        except OSError as error:
            self._give_up(*_start_failure(error, self._spec, self._spools))
        except ValueError as error:  # text that has no bytes
            hint = "an argument or a variable holds a character that no process can be given"
            self._give_up(f"cannot start the workers on {self._spec.host}: {error}", hint, 2)
        except UsageError as error:
            self._give_up(f"cannot start the workers on {self._spec.host}: {error.message}", error.hint, 3)
        adopt_orphans()
        self._handle(self._inbox.read())  # what came along with the job
        while not self._is_over():
            self._turn()
        self._say_farewell()

    def _start_workers(self) -> None:
        spec = self._spec
        self._spools = SpoolDirectory(spec.log_dir, spec.job_id)
        base, cores = dict(os.environ), usable_cores()
        for local_rank in range(spec.local_world_size):
            worker = start_worker(spec, local_rank, self._spools, base, cores)
            self._workers[worker.pid] = worker
            self._processes.add_session(worker.pid)
            for tap in worker.taps:
                self._selector.register(tap.fd, selectors.EVENT_READ, tap)
            where = self._spools.rank_directory(worker.rank)
            self._outbox.put(events.WorkerStarted(worker.rank, local_rank, worker.pid, where))
            self._outbox.flush()

    # ---- one turn of the loop --------------------------------------------------------------------------------------

    def _turn(self) -> None:
        self._watch_stdout()
        timeout = max(0.0, self._next_look - time.monotonic()) if self._ending else _IDLE_SECONDS
        ready = {key.fd: key.data for key, _ in self._selector.select(timeout)}
        if self._wakeup in ready:  # first, so that a worker that failed is not taken for one that was stopped
            self._on_signals()
        if self._inbox.fd in ready:
            self._on_commands()
        now = time.monotonic()
        for data in ready.values():
            taken = data.read(self._outbox, now) if data is not None else None
            if taken == 0:
                self._untap(data)
            elif taken and isinstance(data, OutputTap):
                self._heard_at = now
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.tick(self._outbox, now)
        if self._inbox.expired and not self._stopped:
            what = f"{self._spec.host} heard nothing of zrun for {self._spec.lease:g} s"
            self._give_up(what, "see --lease", HostLostError.exit_code)
        self._look_for_keeper()
        self._outbox.flush()

    def _look_for_keeper(self) -> None:
        if os.getppid() != self._keeper:
            self._keeper = os.getppid()
            text = "the agent's keeper was killed: should the agent be killed as well, workers may be left behind"
            self._outbox.put(events.Notice(self._spec.first_rank, "warning", text))

    def _watch_stdout(self) -> None:
        watched = self._outbox.fd in self._selector.get_map()
        if self._outbox.waiting and not watched:
            self._selector.register(self._outbox.fd, selectors.EVENT_WRITE)
        elif watched and not self._outbox.waiting:
            self._selector.unregister(self._outbox.fd)

    def _untap(self, tap: Tap) -> None:
        if tap.fd >= 0:
            self._selector.unregister(tap.fd)
            tap.close()

    # ---- what comes in ---------------------------------------------------------------------------------------------

    def _on_signals(self) -> None:
        numbers = set(os.read(self._wakeup, 4096))
        self._reap()
        self._next_look = 0.0
        for number in numbers.intersection(_ENDING_SIGNALS):
            name = signal.Signals(number).name
            self._give_up(f"the agent on {self._spec.host} was told to end by {name}", "", 128 + number)

    def _reap(self) -> None:
        """Takes leave of children that have ended: workers, and orphans that were adopted."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._workers:
                self._on_exit(self._workers[pid], os.waitstatus_to_exitcode(status))

    def _on_exit(self, worker: Worker, returncode: int) -> None:
        worker.end(returncode)
        drain(worker.taps, self._outbox)
        words = hint = ""
        if self._stopped:
            words = last_traceback(worker.stderr_tail)
        elif returncode:
            words = worker.last_words
            hint = hint_for(-returncode, self._oom_kills)
        at = worker.failed_at() if returncode else time.time()
        self._outbox.put(events.WorkerExited(worker.rank, returncode, self._stopped, at, words, hint))

    def _on_commands(self) -> None:
        try:
            self._handle(self._inbox.read())
        except ProtocolError as error:
            self._give_up(error.message, error.hint, error.exit_code)
        if self._inbox.ended:
            self._selector.unregister(self._inbox.fd)
            self._stop(signal.SIGTERM, self._spec.grace)

    def _handle(self, commands: list[Command]) -> None:
        for command in commands:
            if command.name == "stop":
                self._stop(command.number or signal.SIGTERM, command.grace)
            elif command.name == "kill":
                self._stop(signal.SIGKILL, 0.0)
            elif command.name == "beat":
                silent = None if self._heard_at is None else time.monotonic() - self._heard_at
                self._outbox.put(events.AgentAlive(silent))
            elif command.name == "keep":
                self._keep_output = True
            elif command.name == "signal":
                for worker in self._workers.values():
                    worker.signal(command.number)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def _give_up(self, message: str, hint: str, exit_code: int) -> None:
        self._outbox.put(events.AgentFailed(message, hint, exit_code))
        self._stop(signal.SIGTERM, self._spec.grace)

    def _stop(self, number: int, grace: float) -> None:
        """Begins to end the job, or to end it sooner or with another signal."""
        self._stopped = True
        deadline = time.monotonic() + grace
        if self._ending is None:
            self._ending = Ending(self._processes.find, number, deadline)
        else:
            self._ending.change(number, deadline)
        self._next_look = 0.0

    def _is_over(self) -> bool:
        """Whether nothing is left; looks again if it is time to."""
        now = time.monotonic()
        at_work = [worker for worker in self._workers.values() if worker.returncode is None]
        if self._ending is None:
            if at_work:
                return False
            self._ending = Ending(self._processes.find, signal.SIGTERM, now + min(self._spec.grace, _LEFTOVER_GRACE))
        if now < self._next_look:
            return False
        gone = self._ending.step(now)
        self._next_look = now + _ENDING_SECONDS + 4 * (time.monotonic() - now)  # a look at many processes takes long
        if gone:
            return not at_work  # those that are gone will be reaped in a moment
        if now < self._ending.deadline + GIVE_UP_SECONDS:
            return False
        pids = ", ".join(str(process.pid) for process in self._ending.left)
        message = f"some processes on {self._spec.host} cannot be ended, they hang in the kernel: pid {pids}"
        self._outbox.put(events.AgentFailed(message, "they end when the device or file system they wait for answers"))
        return True

    def _say_farewell(self) -> None:
        keep = self._stopped or self._keep_output
        for worker in self._workers.values():
            drain(worker.taps, self._outbox)  # of what it left behind
            keep = keep or worker.returncode != 0 or worker.output_left_out
        self._outbox.put(events.AgentDone(self._spools.finish(keep) if self._spools else ""))
        self._outbox.flush()
        until = time.monotonic() + _FAREWELL_SECONDS
        while self._outbox.waiting and not self._inbox.ended and (left := until - time.monotonic()) > 0:
            select.select([], [self._outbox.fd], [], left)
            self._outbox.flush()


def _signals_as_bytes() -> int:
    """The reading end of a pipe in which each signal of interest leaves its number.

    Handlers of Python, not SIG_IGN, because workers would inherit the latter. What is ignored already stays so.
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _note)
    for number in _ENDING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _note)
    return reader


def _note(number: int, frame: object) -> None:
    """The number is in the pipe already."""


def _start_failure(error: OSError, spec: JobSpec, spools: SpoolDirectory | None) -> tuple[str, str, int]:
    """Message, hint and exit code for a worker that could not be started."""
    path = os.fsdecode(error.filename or "")
    if spools is None or (path and path.startswith(spools.path)):
        what = f"cannot keep the output of the workers on {spec.host}: {error.strerror}: {path}"
        return what, "choose another place with --log_dir, or with TMPDIR", 2 if spec.log_dir else 3
    what = f"cannot start the workers on {spec.host}: {error.strerror or error}"
    if path:
        what += f": {path}"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return what, "the limit of open files is reached (ulimit -n); a worker takes five", 3
    if error.errno == errno.EAGAIN:
        return what, "the limit of processes of this user is reached (ulimit -u)", 3
    if error.errno in (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR):
        return what, f"the command is {spec.command[0]!r}, the directory {spec.cwd!r}; both must be there", 2
    return what, "", 3


def _read_spec() -> tuple[bytes, bytes]:
    """The first line of stdin, and what was read after it. An empty line: the launcher has gone before it said one."""
    data = b""
    while b"\n" not in data and len(data) <= MAX_SPEC_BYTES:
        more = os.read(0, 64 * 1024)
        if not more:
            return b"", b""
        data += more
    line, _, rest = data.partition(b"\n")
    return line, rest


def _serve(spec: JobSpec, begun: bytes) -> int:
    try:
        Agent(spec, begun).run()
    except Exception:
        traceback.print_exc()  # a bug; the keeper ends the job
        return 1
    return 0


def main() -> None:
    """Entry of `python -m zrun.agent`: greets, reads the job, and becomes keeper and agent."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, no child can be waited for
    greeting = f"zrun-agent {events.PROTOCOL} {zrun.__version__}\n".encode()
    os.write(1, greeting)
    line, begun = _read_spec()
    if line.startswith(QUESTION):
        from zrun.probe import serve  # here: no job has to wait for what only questions need

        line, begun = serve(line, begun)
        os.write(1, greeting)  # what follows begins as it would in a new agent
    if not line:
        return
    try:
        spec = JobSpec.from_line(line)
    except ProtocolError as error:
        os.write(1, events.encode(events.AgentFailed(error.message, error.hint, error.exit_code)))
        return
    agent = os.fork()
    if agent == 0:
        os._exit(_serve(spec, begun))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    for ours in (1, 2):
        os.dup2(null, ours)  # the agent's ends must be the only ones, so that its death is seen
    os._exit(watch(agent, spec))


if __name__ == "__main__":
    main()
