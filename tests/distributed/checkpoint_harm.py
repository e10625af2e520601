"""What the ranks run for test_checkpoint_harm.py: disks that fail, files that are damaged, ranks that do not agree."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from zrun_runtime.checkpoint import writer
from zrun_runtime.checkpoint.manifest import sealed
from zrun_runtime.integrations import entry

from .checkpoint_uses import SmallNet, config_of, engine_of, mark_of, train

CALLS = ("open", "write", "pwrite", "fsync", "rename", "replace", "mkdir")


def said_by(call: Callable[[], Any]) -> str:
    """The type and text of what a call raises; "" if nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextmanager
def failing_call(number: int, code: int = errno.ENOSPC) -> Iterator[list[str]]:
    """The `number`-th call that changes a disk fails, counted from 0; yields the names of all such calls."""
    calls: list[str] = []
    lock = threading.Lock()
    true = {name: getattr(os, name) for name in CALLS}

    def wrap(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not (len(args) > 1 and args[1] & os.O_CREAT):
                return true[name](*args, **kwargs)
            with lock:  # the disk's thread and the caller's
                calls.append(name)
                mine = len(calls) - 1
            if mine == number:
                if name == "pwrite":  # a part of it still gets there
                    with suppress(OSError):  # (O_DIRECT does not take this)
                        true[name](args[0], bytes(args[1][:512]), *args[2:])
                raise OSError(code, os.strerror(code))
            return true[name](*args, **kwargs)

        return call

    sizes = writer.BufferPair.__init__.__defaults__
    writer.BufferPair.__init__.__defaults__ = (8192,)  # many writes a file
    for name in CALLS:
        setattr(os, name, wrap(name))
    try:
        yield calls
    finally:
        for name in CALLS:
            setattr(os, name, true[name])
        writer.BufferPair.__init__.__defaults__ = sizes


def every_write_fails_once(rank: int, world: int, *, directory: str, bad: int, background: bool, again: bool) -> Any:
    """Each call that changes the disk fails in turn, on rank `bad`. After each, the checkpoint before still loads.

    again: save a tag that is there already.
    """
    engine = engine_of(config_of(2, checkpoint={"async": background, "keep_last": 1}))
    train(engine, 0, 1)
    engine.save_checkpoint(directory)
    train(engine, 1, 2)
    engine._saver.wait()
    number, texts = 0, []
    while True:
        with failing_call(number if rank == bad else -1) as calls:
            tag = "new" if again else f"new{number}"
            said = said_by(lambda tag=tag: (engine.save_checkpoint(directory, tag=tag), engine._saver.wait()))
            said = said or said_by(engine._saver.raise_failure)
        last = [number >= len(calls)] if rank == bad else [None]
        heard = engine._saver.meeting.exchange("test", last[0], 30)
        if heard[bad]:
            return {"texts": texts, "calls": calls, "said": said, "leftovers": _leftovers(directory)}
        whole = rank != 0 or _is_whole(directory)
        texts.append((calls[number] if rank == bad else "", said, whole))
        number += 1


def _is_whole(directory: str) -> bool:
    """`latest` names a checkpoint whose every byte is right; what has a manifest is whole."""
    from zrun_runtime.checkpoint.files import list_tags, read_latest
    from zrun_runtime.checkpoint.load import survey
    from zrun_runtime.checkpoint.reader import CheckpointReader

    path = Path(directory)
    latest = read_latest(path)
    tags = list_tags(path)
    assert latest in tags, (latest, os.listdir(path))
    for tag in tags:
        with CheckpointReader(path / tag, survey(path, tag, ["model", "optimizer"]).manifest) as reader:
            for file in reader.manifest.files:
                reader.verify(file)
    return True


def _leftovers(directory: str) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith(".")]


# ---- damage


def _edit_manifest(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    edit(manifest)
    del manifest["crc32"]
    (path / "manifest.json").write_bytes(sealed(json.dumps(manifest).encode()))


def _flip(path: Path, place: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 1
    path.write_bytes(data)


def _file(path: Path, role: str) -> Path:
    return next(path.glob(f"{role}-*.safetensors"))


def _link(path: Path) -> None:
    elsewhere = path.parents[2] / f"elsewhere-{path.name}"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


class Boom:
    """A pickle of it writes a file when it is loaded."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __reduce__(self) -> Any:
        return os.mkdir, (self.where,)


def _pickle_instead(path: Path) -> None:
    torch.save({"x": Boom(str(path.parent / "boom"))}, path)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "a bit of the weights": lambda p: _flip(_file(p, "model"), 0.9),
    "a bit of the header": lambda p: _flip(_file(p, "model"), 0.001),
    "a bit of the moments": lambda p: _flip(_file(p, "optimizer"), 0.5),
    "truncated": lambda p: os.truncate(_file(p, "optimizer"), 5000),
    "longer": lambda p: os.truncate(_file(p, "model"), 10**6),
    "missing": lambda p: _file(p, "model").unlink(),
    "empty directory": lambda p: (shutil.rmtree(p), p.mkdir()),
    "no directory": lambda p: shutil.rmtree(p),
    "no manifest": lambda p: (p / "manifest.json").unlink(),
    "half a manifest": lambda p: os.truncate(p / "manifest.json", 700),
    "empty manifest": lambda p: os.truncate(p / "manifest.json", 0),
    "nested manifest": lambda p: (p / "manifest.json").write_text("[" * 100_000),
    "a file that is a link": lambda p: _link(_file(p, "model")),
    "a manifest that is a link": lambda p: _link(p / "manifest.json"),
    "a tag that is a link": lambda p: _link(p),
    "a file that is a directory": lambda p: (_file(p, "model").unlink(), (p / _name(p)).mkdir()),
    "a pipe": lambda p: (_file(p, "model").unlink(), os.mkfifo(p / _name(p))),
    "a pickle": lambda p: _pickle_instead(_file(p, "model")),
    "a pickled manifest": lambda p: _pickle_instead(p / "manifest.json"),
    "traversal": lambda p: _edit_manifest(p, lambda m: m["files"][0].update(name="../../secret.safetensors")),
    "absolute": lambda p: _edit_manifest(p, lambda m: m["files"][0].update(name="/etc/passwd")),
    "another version": lambda p: _edit_manifest(p, lambda m: m.update(version=2)),
    "a shape": lambda p: _edit_manifest(p, lambda m: m["groups"][0]["parameters"][0].update(shape=[3, 3])),
    "a huge shape": lambda p: _edit_manifest(p, lambda m: m["groups"][0]["parameters"][0].update(shape=[2**40, 2**40])),
    "a huge group": lambda p: _edit_manifest(p, lambda m: m["groups"][0].update(padded_numel=2**50)),
    "a huge tensor": lambda p: _edit_manifest(p, lambda m: m["tensors"][0].update(shape=[2**50])),
    "a huge world": lambda p: _edit_manifest(p, lambda m: m.update(world_size=10**6)),
    "a negative offset": lambda p: _edit_manifest(p, lambda m: m["groups"][0]["parameters"][0].update(offset=-1)),
    "a number as text": lambda p: _edit_manifest(p, lambda m: m["groups"][0].update(padded_numel="64")),
    "a dtype": lambda p: _edit_manifest(p, lambda m: m["groups"][0]["kinds"].update(master="F33")),
    "twice": lambda p: _edit_manifest(p, lambda m: m["groups"][0].update(parameters=m["groups"][0]["parameters"] * 2)),
    "a bit of the manifest": lambda p: _flip(p / "manifest.json", 0.9),
    "a bit of its checksum": lambda p: os.truncate(p / "manifest.json", 12),
}  # fmt: skip


# Whole, but nothing that this engine can use: no other checkpoint is taken in its place.
MISFITS: dict[str, Callable[[Path], Any]] = {
    "another name": lambda p: _edit_manifest(p, lambda m: m["groups"][0]["parameters"][0].update(name="other")),
    "no kind": lambda p: _edit_manifest(p, lambda m: m["own"][0].update(client_state={"$": "os.system", "v": "1"})),
    "no dtype": lambda p: _edit_manifest(p, lambda m: m["own"][0].update(client_state={"$": "dtype", "v": "load"})),
    "no tensor": lambda p: _edit_manifest(p, lambda m: m["own"][0].update(client_state={"$": "bytes", "name": "x"})),
    "optimizer": lambda p: _edit_manifest(p, lambda m: m["state"].update(optimizer="SGD")),
}  # fmt: skip


def _name(path: Path) -> str:
    return str(json.loads((path / "manifest.json").read_text())["files"][0]["name"])


def damaged(rank: int, world: int, *, directory: str) -> Any:
    """What load says of every kind of damage, and whether the one before is offered, and loaded if asked for."""
    engine = engine_of(config_of(2))
    engine.save_checkpoint(directory)  # before any step
    train(engine, 0, 1)
    engine.save_checkpoint(directory)
    first = mark_of(engine)
    train(engine, 1, 2)
    engine.save_checkpoint(directory)
    second = mark_of(engine)
    good = Path(directory).with_name("good")
    found = {}
    if rank == 0:
        shutil.copytree(directory, good)
    for what, harm in {**DAMAGE, **MISFITS}.items():
        if rank == 0:
            shutil.rmtree(directory)
            shutil.copytree(good, directory)
            harm(Path(directory, "global_step2"))
        engine._saver.meeting.exchange("test", None, 30)
        said = said_by(lambda: engine.load_checkpoint(directory))
        untouched = mark_of(engine) == second
        if what in MISFITS:
            found[what] = said, untouched, "", True
            continue
        path, _ = engine.load_checkpoint(directory, fallback=True)
        found[what] = (said, untouched, Path(path).name, mark_of(engine) == first)
        engine.load_checkpoint(str(good))
    return found, Path(directory, "global_step2", "boom").exists()


LATEST: dict[str, bytes | None] = {
    "nothing": None,
    "nowhere": b"global_step9",
    "a newline": b"global_step1\n",
    "a path": b"../good/global_step1",
    "empty": b"",
    "binary": bytes(range(256)),
    "long": b"x" * 10_000,
}


def latest_is_odd(rank: int, world: int, *, directory: str) -> Any:
    """What load says of each odd `latest`, of tags that are paths, and of the wrong level of the tree."""
    engine = engine_of(config_of(1))
    train(engine, 0, 1)
    engine.save_checkpoint(directory)
    found: dict[str, Any] = {}
    latest = Path(directory, "latest")
    for what, text in LATEST.items():
        latest.unlink(missing_ok=True)
        if text is not None:
            latest.write_bytes(text)
        found[what] = said_by(lambda: found.update(result=engine.load_checkpoint(directory))) or found.pop("result")
    latest.unlink()
    latest.symlink_to("global_step1")
    found["a link"] = said_by(lambda: engine.load_checkpoint(directory))
    for tag in ("../x", "a/b", "..", ".", "", ".hidden", "x" * 300, "a\nb", "latest"):
        found[f"tag {tag[:9]!r}"] = said_by(lambda tag=tag: engine.save_checkpoint(directory, tag=tag))
        found[f"load tag {tag[:9]!r}"] = said_by(lambda tag=tag: engine.load_checkpoint(directory, tag=tag))
    found["the tag's directory"] = engine.load_checkpoint(directory + "/global_step1")
    found["no directory"] = engine.load_checkpoint(directory + "/none")
    other = entry.initialize(model=SmallNet(), config={"train_batch_size": world})[0]
    found["as deepspeed"] = other.load_checkpoint(directory + "/none")
    found["no name"] = said_by(lambda: engine.save_checkpoint(""))
    found["missing tag"] = said_by(lambda: engine.load_checkpoint(directory, tag="global_step7"))
    return found


# ---- ranks that do not agree


def disagreeing(rank: int, world: int, *, directory: str) -> Any:
    """What each rank is told when it is alone, or elsewhere, or calls something else; then all is well again."""
    engine = engine_of(config_of(2, checkpoint={"timeout": 1.0}))
    train(engine, 0, 1)
    found = {}

    def together(what: str, call: Callable[[], Any]) -> None:
        found[what] = said_by(call)
        torch.distributed.barrier()

    for alone in range(world):
        together(f"only {alone}", lambda a=alone: rank == a and engine.save_checkpoint(directory))
    together("load alone", lambda: rank == 1 and engine.load_checkpoint(directory))
    together("tags", lambda: engine.save_checkpoint(directory, tag=f"tag{rank}"))
    together("directories", lambda: engine.save_checkpoint(f"{directory}/{rank}", tag="x"))
    together("save and load", lambda: (engine.load_checkpoint if rank else engine.save_checkpoint)(directory))
    together("one cannot", lambda: engine.save_checkpoint(directory, client_state={"f": said_by} if rank else {}))
    together("load tags", lambda: engine.load_checkpoint(directory, tag=f"tag{rank}"))
    together("all", lambda: engine.save_checkpoint(directory))
    for mode in ("Warn", "Ignore"):
        other = engine_of(config_of(2, checkpoint={"tag_validation": mode}))
        other.save_checkpoint(directory, tag=f"{mode}{rank}")
    return found, sorted(os.listdir(directory))


def in_the_middle(rank: int, world: int, *, directory: str) -> Any:
    """Saving inside a window, and between backward and step."""
    engine = engine_of(config_of(2, accumulation=4))
    found = []
    from .checkpoint_uses import loss_of

    for micro in range(4):
        engine.backward(loss_of(engine, 0, micro, rank))
        found.append(said_by(lambda: engine.save_checkpoint(directory)))
        engine.step()
        found.append(said_by(lambda: engine.save_checkpoint(directory)))
    return found


def read_only(rank: int, world: int, *, directory: str) -> Any:
    """A directory that cannot be written (a file is in its place): an error, and training goes on."""
    engine = engine_of(config_of(2))
    train(engine, 0, 1)
    Path(directory).mkdir(exist_ok=True)
    Path(directory, "file").write_text("")
    said = said_by(lambda: engine.save_checkpoint(f"{directory}/file/below"))
    methods = (engine.save_checkpoint, engine.load_checkpoint, engine.save_16bit_model)
    unnamed = [said_by(lambda m=method, n=name: m(n)) for method in methods for name in (None, "")]
    train(engine, 1, 2)
    return said, unnamed, engine.global_steps


def stored_kinds(rank: int, world: int, *, directory: str) -> Any:
    """Errors about client states that cannot be stored, by where."""
    engine = engine_of(config_of(0))
    cycle: list[Any] = []
    cycle.append(cycle)
    bad = {"function": {"a": [1, said_by]}, "object": {"b": {"c": re.compile("x")}}, "cycle": {"d": cycle}}
    found = {}
    for what, state in bad.items():
        found[what] = said_by(lambda s=state: engine.save_checkpoint(directory, client_state=s))
    return found
