"""Tells the other ranks, and the launcher, where this rank stands still, and asks where they are.

[Note: the watch]
A rank that waits for another one cannot ask it why. So each rank has a thread that looks once a second whether
training has moved on, by comparing two numbers. Only if it has not, the thread publishes where the rank is: in the
store that the process group was built with, and to the launcher. When a wait fails, the positions of all ranks are
therefore known, whatever the other ranks are busy with. A wait that is only long is reported before the process group's
time-out, because the time-out of NCCL ends the process, with a message that names neither rank nor module.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import itertools
import os
import queue
import re
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import psutil
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from zrun_runtime.distributed import World, group_timeout
from zrun_runtime.errors import RanksDivergedError
from zrun_runtime.positions import Position, end_text, position_text, ranks_text, table
from zrun_runtime.telemetry import notice, telemetry

LOOK_SECONDS = 1.0
PATIENCE = 60.0  # seconds of a wait that are worth a word, or half the group's time-out, if that is sooner
_END_SECONDS = 10.0  # for the thread to come back from the store: Python aborts if one returns from torch at its end
_ANSWER_SECONDS = 3.0  # for the store to answer; it is in the process of rank 0, which may hang
_NOISE = re.compile(r"\[/[^\]]*\] |\. This is typically caused by.*", re.DOTALL)  # around what gloo has to say
_numbers = itertools.count()


class PeerError(Exception):
    """Messages to or from a rank failed. peer: its number; None: the transport does not say whose."""

    def __init__(self, peer: int | None, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer


class Watch:
    """See [Note: the watch]. One for a process group; the engines that train over it count on."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.operation = self.step = 0
        self._awaited = ""  # the operation in which this rank waits for others
        self._since = time.time()  # this rank is where it is, to a second
        self._models: list[weakref.ref[nn.Module]] = []
        self._posts = _Posts(world)
        self._process = os.getpid()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if world.size > 1 and not world.imagined and world.data is not None:
            self._thread = threading.Thread(target=self._run, name="zrun-watch", daemon=True)
            self._thread.start()
            atexit.register(self._end)

    def know(self, model: nn.Module) -> None:
        """Modules of it are called by their names in it."""
        self._models = [known for known in self._models if known() is not None] + [weakref.ref(model)]

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Inside, this rank waits for others in the operation `what`.

        Raises:
            RanksDivergedError: in place of a PeerError: who is gone or silent, and where all ranks are.
        """
        self._awaited = what
        try:
            yield
        except PeerError as error:
            raise self._lost(what, error) from None  # torch's own words are in it
        finally:
            self._awaited = ""

    def _lost(self, what: str, error: PeerError) -> RanksDivergedError:
        whom = "other ranks" if error.peer is None else f"rank {error.peer}"
        reason = _NOISE.sub("", str(error))
        how = "silent" if "imed out" in reason else "gone"
        return RanksDivergedError(
            f"rank {self.world.rank} waited for {whom} at {what}, but found it {how}: {reason}"
            + "".join(f"\n    {line}" for line in self.where(error.peer, how)),
            "look at the rank that is behind, or failed first; ranks must run the same number of forwards, backwards "
            "and steps",
        )

    def where(self, awaited: int | None = None, how: str = "") -> list[str]:
        """The table of all ranks, as far as they are known.

        awaited: a rank that should have something to say. how: "gone" if what it said is its last word.
        """
        mine = self._now()
        positions = self._posts.ask(awaited) if self._thread is not None else []
        if not positions:
            return [f"{ranks_text([self.world.rank])}: {mine.text}", "no word of the other ranks"]
        positions[self.world.rank] = mine
        last = positions[awaited] if awaited is not None else None
        if awaited is not None and last is not None and how == "gone" and not last.is_last:
            positions[awaited] = dataclasses.replace(last, text=f"gone; last seen: {last.text}")
        return table(positions, time.time())

    # ---- the thread

    def _run(self) -> None:
        last, patience = -1, _patience(self.world)
        while not self._ended.is_set():
            if self.operation != last:
                last, self._since, told_after = self.operation, time.time(), patience
                self._posts.forget()
            else:
                self._posts.say(self._now())
            if self._awaited and time.time() - self._since >= told_after:
                told_after *= 2
                self._tell(time.time() - self._since)
            self._posts.serve(LOOK_SECONDS)

    def _now(self) -> Position:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        text = position_text(frame, self._awaited, self._name_of)
        return Position(self.operation, self.step, text, self._since)

    def _name_of(self, module: Any) -> str:
        for known in self._models:
            model = known()
            for name, part in model.named_modules() if model is not None else ():
                if part is module:
                    return f"{name} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
        return type(module).__name__

    def _tell(self, seconds: float) -> None:
        """Say who waits for whom. The first of those that wait does so for all."""
        positions = self._posts.read()
        waiting = [rank for rank, one in enumerate(positions) if one is not None and one.waits]
        if positions and self.world.rank == min(waiting, default=-1):
            text = f"rank {self.world.rank} has waited {seconds:.0f} s for other ranks at {self._awaited}"
            notice("warning", "\n    ".join([text, *table(positions, time.time())]), self.world.rank, from_watch=True)

    def _end(self) -> None:
        """At the end of the process: say how it ends, while that can still be said. A fork of it has nothing to say."""
        if os.getpid() != self._process:
            return
        self._ended.set()
        self._posts.wake()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)
            if not self._thread.is_alive():
                self._posts.say(Position(self.operation, self.step, end_text(), time.time()))


class _Posts:
    """What the ranks have said: each writes its own, and reads those of all. Only one thread asks the store."""

    def __init__(self, world: World) -> None:
        self.world = world
        number = next(_numbers)  # the same on all ranks, which build their groups in one order
        self._keys = [f"zrun/positions/{number}/{rank}" for rank in range(world.size)]
        self._store: Any = None
        self._opened = False
        self._port: int | None = None  # of the store's server; None: it has none
        self._said: Position | None = None
        self._heard: list[Position | None] = []
        self._requests: queue.SimpleQueue[tuple[int | None, threading.Event] | None] = queue.SimpleQueue()

    def say(self, position: Position) -> None:
        """Publish where this rank stands, if that is news."""
        if position == self._said:
            return
        self._said = position
        self._set(position.to_json())
        telemetry().emit("position", rank=self.world.rank, **vars(position))

    def forget(self) -> None:
        """This rank has moved on."""
        if self._said is not None:
            self._said = None
            self._set("")
            telemetry().emit("position", rank=self.world.rank, operation=0, step=0, text="", since=time.time())

    def read(self) -> list[Position | None]:
        """By rank; None: it has not stood still. Empty: the store cannot be reached."""
        try:
            self._heard = [self._one(key) for key in self._keys] if self._reachable() else self._heard
        except dist.DistError:
            self._store = None  # rank 0 is gone; what was heard before still stands
        return list(self._heard)

    def ask(self, awaited: int | None) -> list[Position | None]:
        """`read`, from another thread, within bounded time; waits a little for the word of one rank."""
        answered = threading.Event()
        self._requests.put((awaited, answered))
        answered.wait(_ANSWER_SECONDS)
        return list(self._heard)

    def serve(self, seconds: float) -> None:
        """Answer whoever asks within so many seconds."""
        try:
            request = self._requests.get(timeout=seconds)
        except queue.Empty:
            return
        if request is None:
            return
        awaited, answered = request
        until = time.monotonic() + 1.5 * LOOK_SECONDS  # a rank says where it stands, or that it ends, within that
        heard = self.read()
        while heard and awaited is not None and heard[awaited] is None and time.monotonic() < until:
            time.sleep(0.05)
            heard = self.read()
        answered.set()

    def wake(self) -> None:
        """Let `serve` return at once."""
        self._requests.put(None)

    def _one(self, key: str) -> Position | None:
        text = self._store.get(key) if self._store.check([key]) else b""
        return Position.from_json(text) if text else None

    def _set(self, text: str) -> None:
        try:
            if self._reachable():
                self._store.set(self._keys[self.world.rank], text)
        except dist.DistError:
            self._store = None

    def _reachable(self) -> bool:
        """The store is open and its server lives: asking one that is gone makes torch write a page to stderr."""
        if not self._opened:
            self._opened = True
            with contextlib.suppress(RuntimeError, ValueError):  # the process group was destroyed meanwhile
                store: Any = _get_default_store()
                self._store = store.clone()  # a connection of its own: nobody else's wait holds it up
                while hasattr(store, "underlying_store"):
                    store = store.underlying_store
                self._port = getattr(store, "port", None)
        if self._store is not None and self._port is not None and hung_up(self._port):
            self._store = None
        return self._store is not None


def hung_up(port: int) -> bool:
    """A server that this process is connected to, at this port, has closed the connection."""
    connections = psutil.Process().net_connections("tcp")
    return any(c.status == psutil.CONN_CLOSE_WAIT and c.raddr and c.raddr.port == port for c in connections)


def _patience(world: World) -> float:
    if world.data is None:
        return PATIENCE
    return min(PATIENCE, group_timeout(world.data, world.device).total_seconds() / 2)
