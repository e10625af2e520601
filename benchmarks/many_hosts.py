"""From a command to its end on 1, 8 and 32 hosts: namespaces of this machine, a real sshd in each, a no-op script.

All hosts share the cores of this machine, so what each costs in CPU is counted and set apart. Needs root.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import BenchmarkError, Promise, Report, machine, main, numbers, parser, progress, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.cluster import lab as labs

SHORT = ["--runs", "3"]
# Where a group of processes has its CPU time counted: directory, file, what a number of it is in seconds.
_GROUPS = ((Path("/sys/fs/cgroup/cpuacct"), "cpuacct.usage", 1e-9), (Path("/sys/fs/cgroup"), "cpu.stat", 1e-6))


class Clock:
    """CPU seconds of this process and of all that it starts, whoever's children they become."""

    def __init__(self, directory: Path, name: str, unit: float) -> None:
        self._file = directory / name
        self._unit = unit

    def read(self) -> float:
        words = self._file.read_text().split()
        return int(words[1] if len(words) > 1 else words[0]) * self._unit


@contextmanager
def cpu_clock() -> Iterator[Clock]:
    """Counts in a control group of its own.

    Raises:
        BenchmarkError: this machine has no place for one.
    """
    for parent, name, unit in _GROUPS:
        group = parent / f"zrun-bench-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / name).exists():
                (group / "cgroup.procs").write_text(str(os.getpid()))
                yield Clock(group, name, unit)
                return
        finally:
            (parent / "cgroup.procs").write_text(str(os.getpid()))
            group.rmdir()
    raise BenchmarkError("no control group can be made to count CPU time in")


def run_once(lab: labs.Lab, scratch: Path, hosts: int, clock: Clock) -> tuple[float, float]:
    """Wall and CPU seconds."""
    hostfile = lab.hostfile("".join(f"{node.name} slots=1\n" for node in lab.nodes[:hosts]))
    wall, cpu = time.monotonic(), clock.read()
    with labs.zrun(lab, scratch, "--hostfile", hostfile, "--backend", "gloo", "nop.py") as run:
        while run.process.poll() is None:
            time.sleep(0.005)
        wall, cpu = time.monotonic() - wall, clock.read() - cpu
        if run.process.returncode:
            raise BenchmarkError(f"zrun on {hosts} hosts ended with {run.process.returncode}{run.said}")
    return wall, cpu


def bench(arguments: Sequence[str]) -> Report:
    """See the top of the file."""
    options = parse(arguments)
    lacking = labs.missing()
    if lacking:
        raise BenchmarkError(lacking)
    cores = len(os.sched_getaffinity(0))
    scratch = Path(tempfile.mkdtemp(prefix="zrun-bench-"))
    found: dict[int, list[tuple[float, float]]] = {}
    lab = labs.Lab(scratch / "lab", max(options.hosts))
    try:
        with cpu_clock() as clock:
            lab.build()
            (scratch / "nop.py").write_text("")
            for hosts in options.hosts:
                with progress(f"{hosts} hosts"):
                    run_once(lab, scratch, hosts, clock)  # warms the caches
                    found[hosts] = [run_once(lab, scratch, hosts, clock) for _ in range(options.runs)]
            lab.remove()
    finally:
        lab.remove()
        shutil.rmtree(scratch)
    walls = {hosts: statistics.median(wall for wall, _ in runs) for hosts, runs in found.items()}
    cpus = {hosts: statistics.median(cpu for _, cpu in runs) for hosts, runs in found.items()}
    few, many = min(walls), max(walls)
    rows = [(str(n), walls[n], walls[n] / walls[few], cpus[n], cpus[n] / n, cpus[n] / cores) for n in walls]
    return Report(
        "Launch time on many hosts, an empty script, seconds",
        [machine(), f"median of {options.runs} runs after one that warms the caches; preflight included"],
        [table(("hosts", "wall", f"x {few} host", "CPU of all", "CPU a host", f"CPU / {cores} cores"), rows)],
        [
            Promise(
                f"{many} hosts less what {cores} cores cost, x {few} host",
                (walls[many] - cpus[many] / cores) / walls[few],
                3,
            )
        ],
        {str(hosts): runs for hosts, runs in found.items()},
    )


def parse(arguments: Sequence[str]) -> Any:
    """The options of a run."""
    made = parser(__doc__)
    made.add_argument("--hosts", type=numbers, default=[1, 8, 32])
    made.add_argument("--runs", type=int, default=5)
    return made.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(bench, parse))
