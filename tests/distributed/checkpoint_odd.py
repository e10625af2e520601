"""What the ranks run for test_checkpoint_odd.py: what scripts hand to save and load, and when they call them."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
import stat
import threading
import time
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

import zrun_runtime
from zrun_runtime.checkpoint.reader import CheckpointReader

from .checkpoint_harm import said_by
from .checkpoint_uses import SmallNet, config_of, engine_of, loss_of, mark_of, train

Point = namedtuple("Point", "x y")
shared_list = [1, 2]
STATES: dict[str, Any] = {
    "nothing": {},
    "nested": {"a": {"b": [{"c": (1, [2.5, {"d": None}])}]}},
    "tensors": {
        "f": torch.arange(6.0).view(2, 3).t(),
        "b": torch.ones(2, dtype=torch.bfloat16),
        "e": torch.empty(0, 3),
    },
    "scalars": {"t": torch.tensor(3), "b": torch.tensor(True), "n": torch.tensor(float("nan")), "c": torch.tensor(1j)},
    "numpy": {"a": np.arange(4, dtype=np.int16), "s": np.float32(1.5), "b": np.bool_(True), "z": np.zeros((0, 2))},
    "sets": {"s": {1, 2, "x"}, "f": frozenset({(1, 2)}), "e": set()},
    "big numbers": {"i": 2**200, "n": -(10**40), "h": 2**63},
    "odd floats": {"nan": float("nan"), "inf": float("inf"), "ninf": -float("inf"), "tiny": 5e-324, "z": -0.0},
    "keys": {1: "a", None: "b", (1, 2): "c", 2.5: "d", False: "e", b"x": "f", "$": "g"},
    "shared": {"one": shared_list, "two": shared_list},
    "kinds": {
        "o": OrderedDict(b=1, a=2),
        "d": defaultdict(list, {"k": [1]}),
        "p": Point(1, 2),
        "n": SimpleNamespace(a=1),
    },
    "text": {"unicode": "żółć \U0001f600 \u0000 \n", "surrogate-free": "a" * 10_000, "": "empty key"},
    "file names": {"s": os.fsdecode(b"caf\xe9"), os.fsdecode(b"\xff"): torch.ones(1), "p": Path(os.fsdecode(b"/\xe9"))},
    "bytes": {"b": b"\x00\xff", "e": b"", "a": bytearray(b"x")},
    "paths": {"p": Path("/tmp/x"), "dtype": torch.bfloat16, "size": torch.Size([1, 2]), "device": torch.device("cpu")},
    "random": {"torch": torch.get_rng_state(), "numpy": np.random.RandomState(3).get_state()},
    "optimizer": torch.optim.AdamW([nn.Parameter(torch.ones(2))]).state_dict(),
    "module": nn.Linear(2, 2).state_dict(),
    "reserved": {"module": 1, "optimizer": 2, "global_steps": -5, "lr_scheduler": None, "ds_config": {}},
    "none": None,
    "a list": [1, 2],
    "views": {"v": torch.arange(100.0)[::7], "x": torch.zeros(1).expand(1000)},
}
REFUSED: dict[str, Any] = {
    "function": {"f": said_by},
    "lambda": {"deep": [0, (lambda: 1,)]},
    "class": {"c": nn.Linear},
    "a module": {"m": nn.Linear(1, 1)},
    "sparse": {"s": torch.eye(2).to_sparse()},
    "meta": {"m": torch.empty(2, device="meta")},
    "objects": {"o": np.array([object()])},
    "key": {said_by: 1},
    "lock": {"l": threading.Lock()},
}


def alike(one: Any, other: Any) -> bool:
    """Equal, tensors and arrays by value, NaN to itself; subclasses of containers may have become plain."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and torch.equal(torch.nan_to_num(one, nan=7.0), torch.nan_to_num(other, nan=7.0))
    if isinstance(one, (np.ndarray, np.generic)):
        return type(one) is type(other) and one.dtype == other.dtype and bool(np.array_equal(one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        keys = list(zip(one, other, strict=False))
        return len(one) == len(other) and all(alike(a, b) and alike(one[a], other[b]) for a, b in keys)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(alike(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, float) and one != one:
        return isinstance(other, float) and other != other
    if isinstance(one, bytearray):
        return bytes(one) == other
    return type(one) is type(other) and one == other and (one != 0 or str(one) == str(other))


def client_states(rank: int, world: int, *, directory: str, background: bool) -> dict[str, Any]:
    """Which states come back as they were given, and what is said of those that cannot be stored."""
    engine = engine_of(config_of(1, checkpoint={"async": background}), SmallNet)
    found: dict[str, Any] = {}
    for number, (what, state) in enumerate({**STATES, **REFUSED}.items()):
        said = said_by(lambda n=number, s=state: engine.save_checkpoint(directory, tag=f"t{n}", client_state=s))
        if said:
            found[what] = said
            continue
        _, back = engine.load_checkpoint(directory)
        found[what] = alike({} if state is None else state, back) or f"{state!r} came back as {back!r}"
    return found


TAGS: dict[str, Any] = {
    "int": 7,
    "zero": 0,
    "unicode": "krok-żółć-1",
    "spaces": "step 1 of 3",
    "dots": "v1.0.final",
    "numpy": np.int64(3),
    "path": Path("step5"),
}


def odd_places(rank: int, world: int, *, directory: str) -> dict[str, Any]:
    """Tags that are names, directories that are relative, of home, links, with a slash at the end."""
    engine = engine_of(config_of(2), SmallNet)
    train(engine, 0, 1)
    mark, found, before = mark_of(engine), {}, os.getcwd()
    for what, tag in TAGS.items():
        engine.save_checkpoint(directory, tag=tag)
        latest = engine.load_checkpoint(directory)[0]
        found[f"tag {what}"] = Path(latest).name, Path(engine.load_checkpoint(directory, tag=tag)[0]).name
    home = Path(directory, "home")
    os.makedirs(home, exist_ok=True)
    old = os.environ["HOME"]
    os.environ["HOME"] = str(home)
    torch.distributed.barrier()
    try:
        os.chdir(home)
        engine.save_checkpoint("relative/deep/down")
        found["relative"] = engine.load_checkpoint("./relative/deep/down/")[0] is not None
        engine.save_checkpoint("~/ck")
        found["home"] = sorted(p.name for p in home.iterdir())
        other = engine_of(config_of(2, checkpoint={"async": True}), SmallNet)
        train(other, 0, 1)
        other.save_checkpoint("background")
        os.chdir("/")  # while it may still be written
        other._saver.wait()
        other._saver.raise_failure()
        found["chdir"] = (home / "background" / "latest").exists()
    finally:
        os.chdir(before)
        os.environ["HOME"] = old
    if rank == 0:
        (home / "link").symlink_to(home / "relative")
    torch.distributed.barrier()
    engine.save_checkpoint(home / "link" / "below")
    found["link"] = (home / "relative" / "below" / "latest").exists()
    found["same"] = engine.load_checkpoint(home / "link" / "below")[0] is not None and mark_of(engine) == mark
    return found


def odd_times(rank: int, world: int, *, directory: str) -> dict[str, Any]:
    """Save and load where scripts have them: twice, from a thread, inside a backward, of two engines at once."""
    engine = engine_of(config_of(2), SmallNet)
    train(engine, 0, 2)
    mark, found = mark_of(engine), {}
    engine.save_checkpoint(directory)
    engine.save_checkpoint(directory)
    found["twice"] = engine.load_checkpoint(directory)[0] == engine.load_checkpoint(directory)[0]
    found["twice is the same"] = mark_of(engine) == mark
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(said_by(lambda: engine.save_checkpoint(directory, tag="th"))))
    thread.start()
    thread.join()
    found["thread"] = said[0]
    loss = loss_of(engine, 5, 0, rank)
    parameter = next(p for p in engine.module.parameters() if p.requires_grad)
    handle = parameter.register_hook(
        lambda grad: said.append(said_by(lambda: engine.save_checkpoint(directory, tag="in")))
    )
    engine.backward(loss)
    handle.remove()
    found["in a backward"] = said[1]
    engine.step()
    engine.load_checkpoint(directory, tag="th")
    found["after a thread"] = mark_of(engine) == mark
    with torch.no_grad():
        found["no_grad"] = said_by(lambda: engine.save_checkpoint(directory, tag="no_grad"))
    with torch.inference_mode():
        found["inference"] = said_by(
            lambda: (engine.save_checkpoint(directory, tag="inf"), engine.load_checkpoint(directory, tag="inf"))
        )
    train(engine, 2, 3)  # goes on
    engine.eval()
    found["eval"] = said_by(lambda: engine.save_checkpoint(directory, tag="eval"))
    other = engine_of(config_of(1, "bf16", checkpoint={"async": True}), SmallNet, seed=4)
    train(other, 0, 1)
    marks = mark_of(engine), mark_of(other)
    other.save_checkpoint(directory, tag="other")
    engine.save_checkpoint(directory, tag="engine")
    other._saver.wait()
    train(other, 1, 2), train(engine, 3, 4)
    engine.load_checkpoint(directory, tag="engine"), other.load_checkpoint(directory, tag="other")
    found["two engines"] = (mark_of(engine), mark_of(other)) == marks
    swapped = said_by(lambda: engine.load_checkpoint(directory, tag="other"))
    found["of the other"] = swapped, mark_of(engine)["masters"] == marks[1]["masters"]
    return found


def kept_in_background(rank: int, world: int, *, directory: str) -> list[list[str]]:
    """keep_last 1 with background saves: which tags there are after each; one that a person named stays."""
    engine = engine_of(config_of(2, checkpoint={"async": True, "keep_last": 1}), SmallNet)
    found = []
    for step in range(4):
        train(engine, step, step + 1)
        engine.save_checkpoint(directory, tag="mine" if step == 1 else None)
        engine._saver.wait()
        found.append(sorted(p for p in os.listdir(directory) if not p.startswith(".")))
        torch.distributed.barrier()
    return found


def removed_right_after(rank: int, world: int, *, directory: str) -> list[Any]:
    """Each rank in turn removes the checkpoint when its own load is over; the others are slow to read."""
    engine, found = engine_of(config_of(3), SmallNet), []
    train(engine, 0, 1)
    mark, true = mark_of(engine), CheckpointReader.fill
    for remover in range(world):
        place = Path(directory, str(remover))
        engine.save_checkpoint(place)

        def slow(self: Any, target: Any, runs: Any, remover: int = remover) -> None:
            if rank != remover:
                time.sleep(0.05)
            true(self, target, runs)

        CheckpointReader.fill = slow  # type: ignore[method-assign]
        try:
            path, _ = engine.load_checkpoint(place)
            if rank == remover:
                shutil.rmtree(place)
        finally:
            CheckpointReader.fill = true  # type: ignore[method-assign]
        found.append((path is not None, mark_of(engine) == mark))
        torch.distributed.barrier()
    return found


@contextmanager
def network_disk() -> Iterator[None]:
    """Inside, files are as on NFS: no locks, no O_DIRECT, no fsync of directories; what is open is only renamed."""
    flock, unlink, fsync, control = fcntl.flock, os.unlink, os.fsync, fcntl.fcntl

    def refused(code: int) -> OSError:
        return OSError(code, os.strerror(code))

    def no_lock(descriptor: int, operation: int) -> None:
        raise refused(errno.ENOLCK)

    def no_sync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise refused(errno.EINVAL)
        fsync(descriptor)

    def no_direct(descriptor: int, command: int, argument: int = 0) -> Any:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise refused(errno.EINVAL)
        return control(descriptor, command, argument)

    def renamed(path: Any, *, dir_fd: int | None = None) -> None:
        mine = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                other = os.stat(f"/proc/self/fd/{name}")
                if (other.st_dev, other.st_ino) == (mine.st_dev, mine.st_ino):
                    silly = os.path.join(os.path.dirname(path), f".nfs{mine.st_ino:016x}")
                    os.rename(path, silly, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
                    return
        unlink(path, dir_fd=dir_fd)

    fcntl.flock, os.unlink, os.fsync, fcntl.fcntl = no_lock, renamed, no_sync, no_direct  # type: ignore[assignment]
    try:
        yield
    finally:
        fcntl.flock, os.unlink, os.fsync, fcntl.fcntl = flock, unlink, fsync, control  # type: ignore[assignment]


def on_a_network_disk(rank: int, world: int, *, directory: str, background: bool) -> tuple[bool, list[str]]:
    """Save, save the same tag again, prune and load; what lies there at the end."""
    engine = engine_of(config_of(2, checkpoint={"async": background, "keep_last": 1}), SmallNet)
    with network_disk():
        for step in range(3):
            train(engine, step, step + 1)
            engine.save_checkpoint(directory)
            engine.save_checkpoint(directory, tag="again")
        engine._saver.wait()
        engine._saver.raise_failure()
        mark = mark_of(engine)
        train(engine, 3, 4)
        engine.load_checkpoint(directory)
    found = sorted(str(path.relative_to(directory)) for path in Path(directory).glob("**/.*"))
    return mark_of(engine) == mark, found


# ---- another engine than the one that saved

WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}


def _engine(  # groups: 2 are those of one dimension and the others; other numbers, and -2, deal them out
    kind: str = "AdamW", model: nn.Module | None = None, groups: int = 2, scheduler: Any = WARMUP, **config: Any
) -> Any:
    torch.manual_seed(8)
    model = model if model is not None else SmallNet()
    trained = [p for p in model.parameters() if p.requires_grad]
    cut = [trained[i :: abs(groups)] for i in range(abs(groups))] if groups != 2 else None
    lists = cut or [[p for p in trained if p.dim() > 1], [p for p in trained if p.dim() == 1]]
    settings = config_of(1, **config)
    settings["optimizer"] = {"type": kind, "params": {"lr": 0.01}}
    settings["scheduler"] = scheduler
    if scheduler is None:
        del settings["scheduler"]
    named = [{"params": members} for members in lists]
    return zrun_runtime.initialize(model=model, model_parameters=named, config=settings)[0]


class Renamed(SmallNet):
    """One layer has another name."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = self.conv
        del self.conv

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.__dict__["conv"] = self.convolution
        return super().forward(tokens)


class Larger(SmallNet):
    """One layer more."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(3, 3)


def other_engines(rank: int, world: int, *, directory: str) -> tuple[dict[str, Any], dict[str, str]]:
    """What an engine that is not like the one that saved gets, or is told; after an error it is as it was."""
    source = _engine()
    train(source, 0, 2)
    source.save_checkpoint(directory)
    wanted = mark_of(source)
    larger = _engine(model=Larger())
    larger.save_checkpoint(directory, tag="larger", save_latest=False)
    frozen = _engine()
    frozen.save_checkpoint(directory, tag="trained", save_latest=False, exclude_frozen_parameters=True)
    found: dict[str, Any] = {}
    told: dict[str, str] = {}

    def attempt(what: str, engine: Any, **how: Any) -> None:
        before, text = mark_of(engine), io.StringIO()
        with redirect_stderr(text):
            said = said_by(lambda: engine.load_checkpoint(directory, **how))
        told[what] = text.getvalue()
        after = mark_of(engine)
        loaded = after["masters"] == wanted["masters"], after["moments"] == wanted["moments"]
        found[what] = said, after == before, loaded
        if not said:
            train(engine, 2, 3)

    attempt("Adam", _engine("Adam"))
    attempt("SGD", _engine("SGD"))
    attempt("SGD weights", _engine("SGD"), load_optimizer_states=False)
    attempt("three groups", _engine(groups=3))
    attempt("one group", _engine(groups=1))
    attempt("groups changed", _engine(groups=-2))
    attempt("fp16", _engine(dtype="fp16"))
    attempt("bf16 module", _engine(dtype="bf16"), load_module_only=True)
    attempt("renamed", _engine(model=Renamed()))
    attempt("renamed, lax", _engine(model=Renamed()), load_module_strict=False)
    attempt("more were saved", _engine(), tag="larger")
    attempt("more were saved, lax", _engine(), tag="larger", load_module_strict=False)
    attempt("without frozen ones", _engine(), tag="trained")
    everything = SmallNet().requires_grad_(True)
    attempt("more is trained", _engine(model=everything))
    attempt("no schedule here", _engine(scheduler=None))
    attempt("another schedule", _engine(scheduler={"type": "WarmupCosineLR", "params": {"total_num_steps": 20}}))
    return found, told
