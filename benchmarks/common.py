"""What the benchmarks share: ranks as fresh processes, the machine in words, tables, promises and reports.

A benchmark is a file with a function `bench(arguments) -> Report`. What its ranks do is a function in the same file,
started by `run_ranks("file:function", ...)` in fresh processes with torch's environment variables, no launcher between.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"  # peers.sh makes it
# What an outer launcher may have set, in the beginnings of its names.
_LAUNCHER_PREFIXES = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "MASTER_", "CROSS_", "ROLE_", "ZRUN_", "TORCHELASTIC_")


class BenchmarkError(RuntimeError):
    """Nothing was measured: a wrong option, or a rank that died or hung (with the end of what it printed)."""


# ---- ranks


def base_environment() -> dict[str, str]:
    """Our environment without what a launcher set, with the repository on the path and one thread a process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER_PREFIXES)}
    path = [str(HERE), str(ROOT), environment.get("PYTHONPATH", "")]
    environment.update(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(filter(None, path)))
    return environment


def run_ranks(
    task: str,  # "file:function" of this directory
    arguments: dict[str, Any],
    world: int = 2,
    python: str = sys.executable,
    timeout: float = 900.0,  # seconds for all of it
) -> list[Any]:
    """Call a function with these keywords in `world` fresh processes on the CPU; its results (JSON) by rank.

    Raises:
        BenchmarkError: a rank failed, or was not done in time. No process is left behind.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="zrun-bench-") as scratch:
        command = [python, str(HERE / "rank.py"), task, json.dumps(arguments), scratch]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world):
                with open(Path(scratch, f"{rank}.log"), "wb") as log:
                    environment = _rank_environment(rank, world, port, python)
                    processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
            _await(processes, task, scratch, timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [json.loads(Path(scratch, f"{rank}.json").read_text()) for rank in range(world)]


def _rank_environment(rank: int, world: int, port: int, python: str) -> dict[str, str]:
    environment = base_environment()
    environment.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="",
        PATH=os.pathsep.join([str(Path(python).parent), environment.get("PATH", "")]),
        TORCH_EXTENSIONS_DIR=str(Path(python).parent.parent / "extensions"),  # what peers compile at their first start
    )  # fmt: skip
    return environment


def _await(processes: Sequence[subprocess.Popen[bytes]], task: str, scratch: str, timeout: float) -> None:
    """Until all have ended well; sleeps on their process descriptors, so that it takes no time from the ranks."""
    deadline = time.monotonic() + timeout
    waiting = {os.pidfd_open(process.pid): rank for rank, process in enumerate(processes)}
    try:
        while waiting:
            ended = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            for descriptor in [d for d in waiting if d in ended]:
                rank = waiting.pop(descriptor)
                os.close(descriptor)
                if code := processes[rank].wait():
                    raise BenchmarkError(f"{task}: rank {rank} ended with {code}\n{_tail(scratch, rank)}")
            if not ended:
                rank = min(waiting.values())
                raise BenchmarkError(f"{task}: rank {rank} was not done in {timeout:.0f} s\n{_tail(scratch, rank)}")
    finally:
        for descriptor in waiting:
            os.close(descriptor)


def _tail(scratch: str, rank: int, limit: int = 4000) -> str:
    return Path(scratch, f"{rank}.log").read_text(errors="replace")[-limit:]


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, whatever ends that (PR_SET_PDEATHSIG = 1)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


# ---- what is printed


def machine() -> str:
    """The machine and the versions, on one line."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    load = os.getloadavg()[0]
    return (
        f"{len(os.sched_getaffinity(0))} cores, {cpu}, {platform.system()} {platform.release()}; "
        f"Python {platform.python_version()}, torch {importlib.metadata.version('torch')}; "
        f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M %Z}, load {load:.1f} at the start"
    )


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table that also reads well as text. Floats show three digits; the first column is words."""
    cells = [list(headers), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    lines = ["| " + " | ".join(_pad(i, text, widths[i]) for i, text in enumerate(row)) + " |" for row in cells]
    rule = "|" + "|".join("-" * (width + 1) + (":" if i else "-") for i, width in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _pad(column: int, text: str, width: int) -> str:
    return text.rjust(width) if column else text.ljust(width)


@dataclass(frozen=True)
class Promise:
    """Something that must hold: `value` is at most `limit`."""

    text: str
    value: float
    limit: float

    @property
    def kept(self) -> bool:
        return self.value <= self.limit  # false for NaN


@dataclass
class Report:
    """What one benchmark found."""

    title: str
    notes: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    promises: list[Promise] = field(default_factory=list)
    data: Any = None  # everything measured, for --json

    def text(self) -> str:
        """The report in Markdown."""
        parts = [f"## {self.title}", "\n".join(f"- {note}" for note in self.notes), *self.tables]
        if self.promises:
            rows = [(p.text, f"{p.value:.4g}", f"{p.limit:.4g}", "kept" if p.kept else "BROKEN") for p in self.promises]
            parts.append(table(("promise", "is", "at most", ""), rows))
        return "\n\n".join(part for part in parts if part)

    def finish(self, json_path: str | None = None) -> int:
        """Print it, write the data if a path is given, and say with 1 that a promise is broken."""
        print(self.text(), flush=True)
        if json_path:
            promises = [{"text": p.text, "value": p.value, "limit": p.limit, "kept": p.kept} for p in self.promises]
            content = {"title": self.title, "notes": self.notes, "promises": promises, "data": self.data}
            Path(json_path).write_text(json.dumps(content, indent=1) + "\n")
        return 0 if all(promise.kept for promise in self.promises) else 1


def words(text: str) -> list[str]:
    """An option's value: words with commas between."""
    return [word for word in text.split(",") if word]


def numbers(text: str) -> list[int]:
    """An option's value: whole numbers with commas between."""
    return [int(word) for word in words(text)]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with what all benchmarks take."""
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    made.add_argument("--json", metavar="FILE", help="write everything measured to FILE")
    return made


def main(bench: Callable[[Sequence[str]], Report], parse: Callable[[Sequence[str]], Any]) -> int:
    """Run a benchmark as a command: 0 all promises kept, 1 one broken, 2 it could not be measured."""
    try:
        return bench(sys.argv[1:]).finish(parse(sys.argv[1:]).json)
    except BenchmarkError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2


@contextmanager
def progress(text: str) -> Iterator[None]:
    """Say on stderr what runs now, and how long it took."""
    start = time.monotonic()
    print(f"  {text} ...", file=sys.stderr, end="", flush=True)
    try:
        yield
    finally:
        print(f" {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
