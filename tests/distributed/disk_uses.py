"""What runs for test_offload_disks.py: training on disks that are full, odd or failing, and jobs that are killed."""

from __future__ import annotations

import errno
import os
import re
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import zrun_runtime

from .offload_uses import Job, make, run_steps
from .training import digest, masters

# ---- jobs that are killed, and what is beside them


def endless(path: str, stage: int = 2) -> None:
    """A program: train with state below `path` until somebody ends it; say when the first step is over."""
    engine = make(Job(stage=stage, optimizer_tier="nvme", dtype="bf16", path=path, zero={"sub_group_size": 256}))
    run_steps(engine, Job(), 0, range(1))
    print("training", flush=True)
    for step in range(1, 1_000_000):
        run_steps(engine, Job(), 0, range(step, step + 1))


def refused(rank: int, world: int, *, job: Job) -> str:
    """What initialize says if rank 1 alone names a path that is not there."""
    try:
        make(replace(job, path=f"{job.path}/nowhere") if rank == 1 else job)
    except zrun_runtime.ZeroRuntimeError as error:
        return str(error)
    return ""


# ---- disks that fail within a step


def host_name() -> str:
    """As directories of offloaded state have it."""
    return re.sub(r"[^A-Za-z0-9-]", "_", socket.gethostname())


def _files(path: str) -> list[Path]:
    return [file for file in Path(path).glob("zrun-offload.*/*") if file.name != "in-use"]


@contextmanager
def failing(how: str, path: str) -> Iterator[None]:
    """Inside, requests to the disk meet what disks, file systems and other programs do."""
    read, write = os.preadv, os.pwritev

    def few(file: int, buffers: Any, offset: int) -> int:
        return write(file, [buffers[0][:4096]], offset)

    def slowly(file: int, buffers: Any, offset: int) -> int:
        time.sleep(0.03)
        return write(file, buffers, offset)

    def none(file: int, buffers: Any, offset: int) -> int:
        return 0

    def refusal(number: int) -> Callable[..., int]:
        def refuse(*_: Any) -> int:
            raise OSError(number, os.strerror(number))

        return refuse

    if how == "deleted":
        for file in _files(path):
            file.unlink()
    elif how == "truncated":
        for file in _files(path):
            os.truncate(file, 4096)
    os.pwritev = {  # type: ignore[assignment]
        "few bytes a write": few,
        "slowly": slowly,
        "nothing is written": none,
        "bad block on writing": refusal(errno.EIO),
        "full": refusal(errno.ENOSPC),
        "read-only": refusal(errno.EROFS),
    }.get(how, write)
    os.preadv = refusal(errno.EIO) if how == "bad block on reading" else read  # type: ignore[assignment]
    try:
        yield
    finally:
        os.preadv, os.pwritev = read, write


def trained_on_a_failing_disk(how: str, job: Job, checkpoints: str) -> tuple[list[str], str, str]:
    """Train and save; let the disk fail in a step, try twice more, and try to save; load what was saved and train on.

    (what was said each time, the digest of the masters at saving, and after loading)
    """
    engine = make(job)
    run_steps(engine, job, 0, range(2))
    engine.save_checkpoint(checkpoints, tag="before")
    mark, said = digest(masters(engine.module)), []

    def attempt(action: Callable[[], Any]) -> None:
        try:
            action()
            said.append("")
        except zrun_runtime.ZeroRuntimeError as error:
            said.append(str(error))

    with failing(how, job.path):
        attempt(lambda: run_steps(engine, job, 0, range(2, 4)))  # what is written in a step is read in the next
    attempt(lambda: run_steps(engine, job, 0, range(4, 5)))
    attempt(lambda: engine.save_checkpoint(checkpoints, tag="after"))
    engine.destroy()
    engine = make(job, seed=1)
    engine.load_checkpoint(checkpoints)
    loaded = digest(masters(engine.module))
    engine.destroy()
    return said, mark, loaded


def trained_on_an_odd_disk(how: str, job: Job) -> str:
    """The digest of the masters after three steps on a disk that is odd and whole."""
    with failing(how, job.path):
        engine = make(job)
        run_steps(engine, job, 0, range(3))
        mark = digest(masters(engine.module))
        engine.destroy()
    return mark


def refused_for_want_of_room(rank: int, world: int, *, job: Job, room: int) -> str:
    """What initialize says if rank 1 alone may write no larger files."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        make(job)
    except zrun_runtime.ZeroRuntimeError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return ""
