"""Starts real `zrun` jobs and knows every process that comes of them, by a tag in the environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.folded import unfolded

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 30.0  # seconds for what should take one


class Job:
    """One run of `zrun`. Files of it lie in `directory`."""

    def __init__(self, directory: Path, arguments: list[str], environ: dict[str, str], stdout: int | None) -> None:
        self.directory = directory
        self.tag = f"ZRUN_TEST_TAG={uuid.uuid4().hex}"
        self.out_path, self.err_path = directory / "out", directory / "err"
        self.temp = directory / "temp"
        self.temp.mkdir(exist_ok=True)
        name, _, value = self.tag.partition("=")
        base = {k: v for k, v in os.environ.items() if not k.startswith("ZRUN_")}
        with self.out_path.open("wb") as out, self.err_path.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "zrun", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out if stdout is None else stdout,
                stderr=err,
                cwd=directory,
                env={
                    **base,
                    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                    "TMPDIR": str(self.temp),
                    name: value,
                    **environ,
                },
                preexec_fn=os.setpgrp,  # a group whose parent is in another one can be stopped, however tests are run
            )

    @property
    def out(self) -> str:
        """What was printed, with a line for each rank also where several said the same."""
        return unfolded(self.out_path.read_text("utf-8"))

    @property
    def err(self) -> str:
        return self.err_path.read_text("utf-8")

    def wait(self, timeout: float = PATIENCE) -> int:
        """The exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"zrun still runs after {timeout} s\n{self.out}\n{self.err}") from None

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def pids(self) -> list[int]:
        """Every living process of this run except the launcher."""
        return [pid for pid in processes_with(self.tag) if pid != self.process.pid]

    def workers(self) -> list[int]:
        """Those of `pids` that are ranks, or children of ranks."""
        return [pid for pid in self.pids() if "\0RANK=" in read(f"/proc/{pid}/environ")]

    def agents(self) -> tuple[int, int]:
        """Pids of keeper and agent."""
        commands = {pid: read(f"/proc/{pid}/cmdline") for pid in self.pids()}
        found = [pid for pid, command in commands.items() if command.endswith("-m\0zrun.agent\0")]
        keeper = next(pid for pid in found if parent_of(pid) == self.process.pid)
        return keeper, next(pid for pid in found if parent_of(pid) == keeper)

    def wait_for(self, what: str | Callable[[], bool], timeout: float = PATIENCE) -> None:
        """Waits until a file of that name is in the directory, or until a condition holds."""
        holds = what if callable(what) else (self.directory / what).exists
        end = time.monotonic() + timeout
        while not holds():
            assert time.monotonic() < end, f"waited in vain for {what}\n{self.out}\n{self.err}"
            time.sleep(0.02)

    def wait_gone(self, timeout: float) -> float:
        """Waits until no process of this run is left; the seconds that took."""
        start = time.monotonic()
        self.wait_for(lambda: not self.pids(), timeout)
        return time.monotonic() - start


@contextmanager
def job(directory: Path, script: str, *options: str, **more: object) -> Iterator[Job]:
    """A job of `script` (Python code), whose leftovers a failing test cannot leave behind.

    Args:
        more: `args`: of the script. `environ`: variables. `stdout`: a descriptor in place of a file.
    """
    path = directory / "script.py"
    path.write_text(textwrap.dedent(script), "utf-8")
    arguments = [*options, str(path), *more.get("args", ())]  # type: ignore[misc]
    with command(directory, *arguments, environ=more.get("environ", {}), stdout=more.get("stdout")) as run:  # type: ignore[arg-type]
        yield run


@contextmanager
def command(
    directory: Path, *arguments: str, environ: dict[str, str] | None = None, stdout: int | None = None
) -> Iterator[Job]:
    """`zrun` with these very arguments."""
    run = Job(directory, list(arguments), environ or {}, stdout)
    try:
        yield run
    finally:
        for pid in [run.process.pid, *processes_with(run.tag)]:
            kill(pid)
        run.process.wait(PATIENCE)
        run.wait_gone(PATIENCE)


def processes_with(entry: str) -> list[int]:
    """Living processes whose environment holds `entry`. Deliberately not the product's own way to find them."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        if entry in read(f"{path}/environ").split("\0") and state_of(int(path.name)) not in ("Z", ""):
            found.append(int(path.name))
    return found


def read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace")
    except OSError:
        return ""


def state_of(pid: int) -> str:
    """One letter; empty if the process is gone."""
    return read(f"/proc/{pid}/stat").rpartition(") ")[2][:1]


def parent_of(pid: int) -> int:
    return int(read(f"/proc/{pid}/stat").rpartition(") ")[2].split()[1])


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
