"""What can be said about a worker that a signal has killed: was the memory used up, is /dev/shm full."""

from __future__ import annotations

import os
import signal

CGROUP_ROOT = "/sys/fs/cgroup"


def count_oom_kills() -> int | None:
    """Processes of our cgroup that the kernel killed for want of memory, so far; None where it cannot be read."""
    for group in _cgroups():
        for path in (f"{CGROUP_ROOT}{group}/memory.events", f"{CGROUP_ROOT}/memory{group}/memory.oom_control"):
            found = _read_counter(path, "oom_kill")
            if found is not None:
                return found
    return None


def hint_for(number: int, oom_kills_before: int | None) -> str:
    """A sentence about a worker killed by signal `number`; empty if there is nothing to say."""
    if number == signal.SIGKILL:
        now = count_oom_kills()
        if now is not None and oom_kills_before is not None and now > oom_kills_before:
            return "the kernel killed it because memory ran out: oom_kill of this job's cgroup went up"
        return (
            "nothing of zrun killed it: most often the host ran out of memory. "
            "`dmesg | grep -i 'killed process'` tells, where you may read it"
        )
    if number == signal.SIGBUS:
        return f"a bus error mostly means that /dev/shm is full: {_free_space('/dev/shm')}"
    if number == signal.SIGSEGV:
        return "run with --env PYTHONFAULTHANDLER=1 to see where in the script it happened"
    return ""


def _cgroups() -> list[str]:
    """Paths of our own memory cgroup and of its parents, nearest first."""
    try:
        with open("/proc/self/cgroup") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return [""]
    path = next((p for _, kind, p in lines if "memory" in kind.split(",")), None)
    if path is None:
        path = next((p for number, _, p in lines if number == "0"), "/")
    groups = []
    while path not in ("", "/"):
        groups.append(path)
        path = os.path.dirname(path)
    return [*groups, ""]


def _read_counter(path: str, key: str) -> int | None:
    try:
        with open(path) as file:
            for line in file:
                name, _, value = line.partition(" ")
                if name == key:
                    return int(value)
    except (OSError, ValueError):
        pass
    return None


def _free_space(path: str) -> str:
    try:
        state = os.statvfs(path)
    except OSError:
        return f"there is no {path}"
    free, whole = state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize
    return f"{free >> 20} MiB of {whole >> 20} MiB are free"
