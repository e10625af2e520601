"""Starts one worker and keeps what belongs to it."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import subprocess
import time
from dataclasses import dataclass

from zrun.cores import bound
from zrun.environment import worker_environment
from zrun.job import JobSpec
from zrun.outputs import last_traceback, last_words
from zrun.processes import end_with_parent
from zrun.spool import SpoolDirectory
from zrun.taps import EventTap, OutputTap, Tap

_SLOW_END_SECONDS = 30.0
_PIPE_BYTES = 256 * 1024
_ERROR_FILE_LIMIT = 1024 * 1024  # characters


@dataclass
class Worker:
    """One rank's process."""

    rank: int
    local_rank: int
    process: subprocess.Popen[bytes]
    taps: list[Tap]
    error_file: str
    returncode: int | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    def end(self, returncode: int) -> None:
        """It was reaped; from now on its pid means nothing."""
        self.returncode = self.process.returncode = returncode

    def signal(self, number: int) -> None:
        """Passes a signal to the process itself, not to its children."""
        if self.returncode is None:
            os.kill(self.pid, number)  # not reaped, so the pid is still its own

    @property
    def output_left_out(self) -> bool:
        """Some of its output is only in the files."""
        return any(tap.left_out for tap in self.taps if isinstance(tap, OutputTap))

    @property
    def stderr_tail(self) -> str:
        """The end of its stderr."""
        return self._stderr.tail.decode("utf-8", "replace")

    @property
    def last_words(self) -> str:
        """Why it failed, in its own words: its last traceback, also one that is only in its error file; else the end
        of its stderr.
        """
        tail = self.stderr_tail
        return last_traceback(tail) or _recorded(self.error_file) or last_words(tail)

    def failed_at(self) -> float:
        """When it failed, seconds since the epoch. Called when it has ended.

        That is when its traceback came, if it has just come: a process may take long to end after that, longer than
        others that fail because of it.
        """
        now, trouble = time.time(), self._stderr.trouble_at
        return trouble if now - trouble < _SLOW_END_SECONDS else now

    @property
    def _stderr(self) -> OutputTap:
        return next(tap for tap in self.taps if isinstance(tap, OutputTap) and tap.stream == "stderr")


def start_worker(spec: JobSpec, local_rank: int, spools: SpoolDirectory, base: dict[str, str], cores: int) -> Worker:
    """Starts the worker of `local_rank` in a session of its own, with nothing to read on stdin.

    Raises:
        OSError: the files or pipes cannot be made, or the command cannot be run.
    """
    if not spec.bind_cores:
        return _start(spec, local_rank, spools, base, cores)
    with bound(local_rank, spec.local_world_size) as threads:  # inherited, so it holds before the worker's first thread
        return _start(spec, local_rank, spools, {"OMP_NUM_THREADS": str(threads), **base}, cores)


def _start(spec: JobSpec, local_rank: int, spools: SpoolDirectory, base: dict[str, str], cores: int) -> Worker:
    rank = spec.first_rank + local_rank
    streams = 2 * spec.local_world_size
    environment = worker_environment(spec, local_rank, base, cores)
    command = list(spec.command)
    if spec.local_rank_arg:
        command.insert(spec.local_rank_at, f"{spec.local_rank_arg}={local_rank}")
    pipes = [os.pipe() for _ in range(3)]
    (out, out_write), (err, err_write), (said, said_write) = pipes
    try:
        taps: list[Tap] = [
            OutputTap(out, rank, "stdout", spools.open(rank, "stdout"), streams),
            OutputTap(err, rank, "stderr", spools.open(rank, "stderr"), streams),
            EventTap(said, rank),
        ]
        for reader in (out, err):
            _enlarge(reader)
        error_file = os.path.join(spools.rank_directory(rank), "error.json")
        environment.setdefault("TORCHELASTIC_ERROR_FILE", error_file)  # torch's @record writes it
        environment["ZRUN_EVENT_FD"] = f"{said_write}:{os.fstat(said_write).st_ino}"
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out_write,
            stderr=err_write,
            pass_fds=(said_write,),
            env=environment,
            cwd=spec.cwd,
            start_new_session=True,
            preexec_fn=functools.partial(end_with_parent, os.getpid()),  # the agent has one thread
        )
    except BaseException:
        for reader in (out, err, said):
            os.close(reader)
        raise
    finally:
        for writer in (out_write, err_write, said_write):
            os.close(writer)
    return Worker(rank, local_rank, process, taps, error_file)


def _recorded(path: str) -> str:
    """The traceback in an error file as torch.distributed.elastic writes it; empty without one."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            message = json.loads(file.read(_ERROR_FILE_LIMIT))["message"]
        return last_traceback(message["extraInfo"]["py_callstack"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ""


def _enlarge(pipe: int) -> None:
    """A larger pipe means fewer turns with a worker that writes much; the limit of the user may forbid it."""
    try:
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    except OSError:
        pass
