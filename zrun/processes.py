"""Finds and ends the processes of a job on this host.

[Note: whose process is it]
A process belongs to the job if it descends from the agent (which adopts orphans, so a daemon's double fork changes
nothing), sits in a session of a worker, or carries the job's mark in its environment. The mark finds what an agent
that was killed has left; descent finds what has cleared its environment. Nothing is ever found by its name. A pid is
only a number, so every process is known by pid and start time, and a signal goes through a pidfd taken before the
start time is compared again: a process that took over the number is never hit.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_GONE = frozenset("ZXx")


@dataclass(frozen=True)
class Process:
    """One process, as /proc shows it."""

    pid: int
    parent: int
    session: int
    state: str  # one letter: R, S, D, Z, T ...
    start: int  # clock ticks after boot


@dataclass(frozen=True)
class Mark:
    """The environment entries that every process of one agent's workers has."""

    job_id: str
    node_rank: int

    def is_in(self, environment: bytes) -> bool:
        """Whether a /proc/PID/environ holds the mark."""
        entries = environment.split(b"\0")
        return (
            f"ZRUN_JOB_ID={self.job_id}".encode() in entries and f"ZRUN_NODE_RANK={self.node_rank}".encode() in entries
        )


def read_process(pid: int) -> Process | None:
    """The process of that number, or None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            text = file.read(1024)
    except OSError:
        return None
    fields = text[text.rfind(b")") + 2 :].split()  # the name before it may hold blanks and parentheses
    if len(fields) < 20:
        return None
    return Process(pid, int(fields[1]), int(fields[3]), fields[0].decode("ascii"), int(fields[19]))


def adopt_orphans() -> None:
    """Makes this process the new parent of descendants whose parent ends. Does nothing where the kernel cannot."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # where that fails the mark in the environment still finds nearly all


def end_with_parent(parent: int) -> None:
    """Has the kernel send TERM to this process when its parent ends. Called between fork and exec.

    That is for the instant in which agent and keeper are killed together, so that nobody is left to do it. Does nothing
    where the kernel cannot.
    """
    if _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM) and os.getppid() != parent:
        os._exit(128 + signal.SIGTERM)  # it was gone before the kernel knew


def _prctl(option: int, value: int) -> bool:
    try:
        return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def send_signal(process: Process, number: int) -> bool:
    """Signals exactly this process. False if it is gone or not ours to signal."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    except OSError:  # a kernel or sandbox without pidfds: compare and hope
        return _is_same(process) and _kill(process.pid, number)
    try:
        if not _is_same(process):
            return False
        signal.pidfd_send_signal(descriptor, number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(descriptor)
    return True


def _is_same(process: Process) -> bool:
    now = read_process(process.pid)
    return now is not None and now.start == process.start


def _kill(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


class JobProcesses:
    """Finds the processes of one agent's workers: see [Note: whose process is it].

    Args:
        root: the process whose descendants belong to the job; it does not itself.
    """

    def __init__(self, mark: Mark, root: int) -> None:
        self._mark = mark
        self._root = root
        own = read_process(root)
        self._since = own.start if own else 0  # nothing of the job is older
        self._sessions: dict[int, int] = {}  # session -> start of its leader

    def add_session(self, leader: int) -> None:
        """Takes note of a worker, which leads a session of its own."""
        process = read_process(leader)
        if process is not None:
            self._sessions[leader] = process.start

    def find(self) -> list[Process]:
        """Every living process of the job, at this moment."""
        table = {p.pid: p for p in map(read_process, _all_pids()) if p is not None}
        ours = {self._root}
        ours.update(p.pid for p in table.values() if p.start >= self._since and self._is_marked(p, table))
        children: dict[int, list[int]] = {}
        for process in table.values():
            children.setdefault(process.parent, []).append(process.pid)
        waiting = list(ours)
        while waiting:
            for child in children.get(waiting.pop(), ()):
                if child not in ours:
                    ours.add(child)
                    waiting.append(child)
        ours.discard(self._root)
        return [table[pid] for pid in ours if pid in table and table[pid].state not in _GONE]

    def _is_marked(self, process: Process, table: dict[int, Process]) -> bool:
        if process.session in self._sessions:
            leader = table.get(process.session)
            if leader is None or leader.start == self._sessions[process.session]:
                return True
        try:
            if os.stat(f"/proc/{process.pid}").st_uid != os.geteuid():
                return False
            with open(f"/proc/{process.pid}/environ", "rb", buffering=0) as file:
                return self._mark.is_in(file.readall())
        except OSError:
            return False


def _all_pids() -> Iterable[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


class Ending:
    """Ends processes: one polite signal to each, KILL to all that are left at the deadline.

    It is stepped by its owner, which has other things to do meanwhile. Processes that appear while it runs are
    signalled as well.

    Args:
        number: the polite signal.
        deadline: on the clock that `step` is called with.
    """

    def __init__(
        self,
        find: Callable[[], list[Process]],
        number: int,
        deadline: float,
        send: Callable[[Process, int], bool] = send_signal,
    ) -> None:
        self._find = find
        self._send = send
        self._number = number
        self._told: set[tuple[int, int]] = set()
        self.deadline = deadline
        self.left: list[Process] = []  # as of the last step

    def change(self, number: int, deadline: float) -> None:
        """Ends them with another signal, or sooner; never later."""
        if number != self._number:
            self._number = number
            self._told.clear()
        self.deadline = min(self.deadline, deadline)

    def step(self, now: float) -> bool:
        """One look and what follows from it. True when nothing is left."""
        self.left = self._find()
        for process in self.left:
            if now >= self.deadline:
                self._send(process, signal.SIGKILL)
            elif (process.pid, process.start) not in self._told:
                self._told.add((process.pid, process.start))
                self._send(process, self._number)
                self._send(process, signal.SIGCONT)  # a stopped process hears no TERM
        return not self.left
