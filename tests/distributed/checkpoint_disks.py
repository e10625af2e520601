"""In mounts of its own, `checkpoint_disks DIRECTORY SCENE ...` saves onto disks that get into trouble.

Each disk is a real one of a few MiB, mounted below DIRECTORY; a scene is called `tmpfs:full`, for example. Prints a
JSON line for each save: what it was, what it said, and what is whole afterwards.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from zrun_runtime.checkpoint.compare import verify
from zrun_runtime.checkpoint.files import list_tags, read_latest

from .checkpoint_harm import CALLS, said_by
from .checkpoint_uses import SmallNet, config_of, engine_of, train

SIZE = 8 * 2**20
CAPABILITIES_VERSION = 0x20080522  # of Linux, _LINUX_CAPABILITY_VERSION_3


def tmpfs(directory: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "zrun-test", directory], check=True)


def ext4(directory: Path) -> None:
    """In a file, on a loop device; an error of the disk makes it read-only."""
    image = directory.with_name(f"{directory.name}.image")
    with image.open("wb") as file:
        file.truncate(SIZE)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", image], check=True)
    subprocess.run(["mount", "-o", "loop,errors=remount-ro", image, directory], check=True)
    shutil.rmtree(directory / "lost+found")


class Disk:
    """One engine, and a directory on the disk that it saves into."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.scene = directory.name
        self.directory, self.ballast = directory / "ck", directory / "ballast"
        self.engine = engine_of(config_of(2, checkpoint={"timeout": 20, **settings}), SmallNet)
        self.count = 0
        train(self.engine, 0, 1)
        self.say("first", self.save("first"))

    def save(self, tag: str | None = None) -> str:
        """What saving says, in the background too."""
        self.count += 1
        engine, tag = self.engine, tag or f"n{self.count}"
        said = said_by(lambda: (engine.save_checkpoint(self.directory, tag=tag), engine._saver.wait()))
        return said or said_by(engine._saver.raise_failure)

    def say(self, what: str, said: str) -> None:
        """One line. whole: `latest` can be loaded, and all that has the look of a checkpoint is whole."""
        tags = list_tags(self.directory)
        troubles = [f"{tag}: {trouble}" for tag in tags if (trouble := verify(self.directory, tag))]
        latest = read_latest(self.directory)
        line = {
            "scene": self.scene,
            "what": what,
            "said": said,
            "latest": latest,
            "tags": len(tags),
            "troubles": troubles,
        }
        print(json.dumps({**line, "whole": latest in tags and not troubles}), flush=True)

    def fill(self, leave: int = 0) -> None:
        """Take all space but so many bytes."""
        with self.ballast.open("wb", buffering=0) as file:
            for piece in (65536, 1024, 1):
                with suppress(OSError):
                    while True:
                        file.write(bytes(piece))
        if leave and (size := self.ballast.stat().st_size) >= leave:
            os.truncate(self.ballast, size - leave)
        os.sync()

    def drain(self) -> None:
        """Give the space back, and remove all checkpoints but `latest`."""
        self.ballast.unlink(missing_ok=True)
        for tag in set(list_tags(self.directory)) - {read_latest(self.directory)}:
            shutil.rmtree(self.directory / tag)


@contextmanager
def before_call(number: int, act: Callable[[], None]) -> Iterator[list[str]]:
    """`act` runs right before the `number`-th call that changes a disk; yields the names of those calls."""
    calls: list[str] = []
    true = {name: getattr(os, name) for name in CALLS}

    def wrap(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name != "open" or (len(args) > 1 and args[1] & os.O_CREAT):
                calls.append(name)
                if len(calls) == number + 1:
                    act()
            return true[name](*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, wrap(name))
    try:
        yield calls
    finally:
        for name, function in true.items():
            setattr(os, name, function)


def each_call(disk: Disk, act: Callable[[], None], undo: Callable[[], None]) -> None:
    """Trouble begins before each call in turn that a save makes."""
    number = 0
    while True:
        with before_call(number, act) as calls:
            said = disk.save()
        begun = len(calls) > number
        undo()
        disk.say(f"{number} {calls[number] if begun else 'over'}", said)
        if not begun:
            return
        disk.drain()
        number += 1


# ---- scenes


def full(place: Path) -> None:
    """Every amount of free space from none to enough."""
    disk = Disk(place)
    used = sum(p.stat().st_size for p in (disk.directory / "first").iterdir())
    for leave in range(0, used + 65536, 16384):
        disk.fill(leave)
        disk.say(f"leaves {leave}", disk.save())
        disk.drain()


def fills_up(place: Path) -> None:
    """Something else takes all space while the checkpoint is being written."""
    disk = Disk(place)
    each_call(disk, disk.fill, disk.drain)


def fills_up_in_background(place: Path) -> None:
    """The same, of an asynchronous save."""
    disk = Disk(place, **{"async": True})
    each_call(disk, disk.fill, disk.drain)


def file_limit(place: Path) -> None:
    """A limit on the size of a file, as a quota is."""
    disk = Disk(place)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (100, 8192, 20_000, 60_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        said = disk.save()
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        disk.say(f"limit {limit}", said)
    disk.say("over", disk.save())


def goes_away(place: Path) -> None:
    """Somebody removes the directory while the checkpoint is being written."""
    disk = Disk(place)
    aside = place / "aside"

    def back() -> None:
        if aside.exists():
            shutil.rmtree(disk.directory, ignore_errors=True)
            os.rename(aside, disk.directory)

    each_call(disk, lambda: os.rename(disk.directory, aside), back)


def forbidden(place: Path) -> None:
    """The right to write is taken away meanwhile."""
    disk = Disk(place)
    # Rights are checked for root as well then.
    head, none = struct.pack("Ii", CAPABILITIES_VERSION, 0), bytes(24)
    if ctypes.CDLL(None, use_errno=True).capset(head, none):
        raise OSError(ctypes.get_errno(), "capset")

    def change(mode: int) -> None:
        for path in (disk.directory, *(p for p in disk.directory.iterdir() if p.is_dir())):
            path.chmod(mode)

    each_call(disk, lambda: change(0o555), lambda: change(0o755))
    change(0o555)
    disk.say("from the beginning", disk.save())
    change(0o755)


def read_only(place: Path) -> None:
    """The disk has an error and the kernel makes it read-only (ext4 only)."""
    disk = Disk(place)
    image = place.with_name(f"{place.name}.image")
    device = Path(subprocess.check_output(["findmnt", "-no", "SOURCE", place], text=True).strip())

    def fail() -> None:
        Path("/sys/fs/ext4", device.name, "trigger_fs_error").write_text("zrun test")

    def mend() -> None:
        subprocess.run(["umount", place], check=True)
        subprocess.run(["e2fsck", "-fy", image], check=False, capture_output=True)
        subprocess.run(["mount", "-o", "loop,errors=remount-ro", image, place], check=True)

    number = 0
    while True:
        with before_call(number, fail) as calls:
            said = disk.save()
        begun = len(calls) > number
        disk.say(f"{number} {calls[number] if begun else 'over'}", said)
        if not begun:
            return
        mend()
        number += 1


def main(directory: str, *scenes: str) -> None:
    """Mount the disks and run the scenes, one after the other."""
    torch.set_num_threads(1)
    for one in scenes:
        kind, scene = one.split(":")
        place = Path(directory, one)
        place.mkdir(parents=True)
        {"tmpfs": tmpfs, "ext4": ext4}[kind](place)
        SCENES[scene](place)


SCENES = {
    scene.__name__: scene
    for scene in (full, fills_up, fills_up_in_background, file_limit, goes_away, forbidden, read_only)
}

if __name__ == "__main__":
    main(*sys.argv[1:])
