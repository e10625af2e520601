"""The agent's tiny parent. Should the agent be killed, the keeper ends what it had started; should it be stopped, the
keeper wakes it.
"""

from __future__ import annotations

import os
import signal
import time

from zrun.job import JobSpec
from zrun.processes import Ending, JobProcesses, Mark, adopt_orphans

GIVE_UP_SECONDS = 10.0  # after KILL: what is still there hangs in the kernel
_POLL_SECONDS = 0.05


def watch(agent: int, spec: JobSpec) -> int:
    """Waits for the agent, then ends the job's processes if the agent did not do so itself.

    Returns:
        the exit code for the keeper: the agent's own, 128+N if signal N killed it.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _outlive)
    adopt_orphans()
    code = os.waitstatus_to_exitcode(_wait_for(agent, spec.lease))
    if code != 0:
        _end_all(JobProcesses(Mark(spec.job_id, spec.node_rank), os.getpid()), spec.grace)
    return code if code >= 0 else 128 - code


def _wait_for(agent: int, lease: float) -> int:
    """How the agent ended. One that somebody has stopped is woken after a lease: stopped, it could end nothing."""
    while True:
        _, status = os.waitpid(agent, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            return status
        until = time.monotonic() + lease
        while time.monotonic() < until:
            ended, status = os.waitpid(agent, os.WNOHANG)
            if ended:
                return status
            time.sleep(_POLL_SECONDS)
        os.kill(agent, signal.SIGCONT)


def _outlive(number: int, frame: object) -> None:
    """The keeper ends with the agent and not before."""


def _end_all(processes: JobProcesses, grace: float) -> None:
    deadline = time.monotonic() + grace
    ending = Ending(processes.find, signal.SIGTERM, deadline)
    while not ending.step(now := time.monotonic()) and now < deadline + GIVE_UP_SECONDS:
        _reap()
        time.sleep(_POLL_SECONDS)
    _reap()


def _reap() -> None:
    """Takes leave of adopted children that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
