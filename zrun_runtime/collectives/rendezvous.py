"""Ranks that meet to tell each other something, and know in time, and by number, who did not come.

[Note: why the store]
Checkpoints are written by a thread beside training, and may be asked for on some ranks only. A collective is wrong for
both: on a group that training uses it can deadlock, and after a time-out a gloo group cannot be used any more. So these
few small messages go through the store that the process group was built with: any thread may ask it, it never blocks
longer than a look, and a meeting that failed leaves it as it was.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from zrun_runtime.distributed import World
from zrun_runtime.errors import RanksDivergedError
from zrun_runtime.positions import ranks_text

_SHORTEST, _LONGEST = 0.0005, 0.02  # seconds between two looks
_MARGIN = 1.5  # rank 0 is waited for longer than it waits: its answer names who is missing
_numbers = itertools.count()


class Rendezvous:
    """One sequence of meetings of all ranks. All ranks make theirs in the same order. See [Note: why the store]."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._prefix = f"zrun/rendezvous/{next(_numbers)}"
        self._met = 0  # meetings that are over
        self._attempt = 0

    def exchange(self, what: str, said: Any, timeout: float, last: bool = False) -> list[Any]:
        """Say something (JSON) and hear what every rank said, in rank order.

        Args:
            what: the place in the program, as errors call it; ranks that are at different places do not meet.
            timeout: seconds that rank 0 waits for the others.
            last: rank 0 also waits until all have heard: it may end afterwards, and the store with it.

        Raises:
            RanksDivergedError: a rank did not come in time, or came to something else; it names the ranks.
        """
        if self.world.size == 1:
            return [said]
        self._attempt += 1
        store, here = _get_default_store(), f"{self._prefix}/{self._met}"
        message = json.dumps({"at": what, "attempt": self._attempt, "said": said})
        try:
            store.set(f"{here}/{self.world.rank}", message)
            heard = (
                self._preside(store, here, what, timeout)
                if self.world.rank == 0
                else self._attend(store, here, what, timeout * _MARGIN)
            )
            if last and store.add(f"{here}/heard", 1) and self.world.rank == 0:
                _until(lambda: store.add(f"{here}/heard", 0) == self.world.size, timeout)
        except dist.DistStoreError as error:
            raise RanksDivergedError(
                f"rank {self.world.rank} at {what}: the other ranks cannot be reached ({error})",
                "is rank 0 still alive? Look at the first rank that failed",
            ) from error
        self._met += 1
        places: dict[str, list[int]] = {}
        for rank, one in enumerate(heard):
            places.setdefault(one["at"], []).append(rank)
        if len(places) > 1:
            raise RanksDivergedError(
                "ranks do different things: " + "; ".join(f"{ranks_text(r)} at {at}" for at, r in places.items()),
                "every rank must call it, at the same place of the program",
            )
        return [one["said"] for one in heard]

    def _preside(self, store: dist.Store, here: str, what: str, timeout: float) -> list[Any]:
        """Rank 0: collect, then tell everyone."""
        keys = [f"{here}/{rank}" for rank in range(self.world.size)]
        if not _until(lambda: store.check(keys), timeout):
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            for rank, key in enumerate(keys):
                if rank not in missing:
                    attempt = json.loads(store.get(key))["attempt"]
                    store.set(f"{here}/sorry/{rank}/{attempt}", json.dumps(missing))
                    store.delete_key(key)
            raise _absent(what, missing, timeout)
        heard = [json.loads(text) for text in store.multi_get(keys)]
        store.set(f"{here}/all", json.dumps(heard))
        if self._met:
            before = f"{self._prefix}/{self._met - 1}"  # everyone who is here has read it
            for key in ["all", *map(str, range(self.world.size))]:
                store.delete_key(f"{before}/{key}")
        return heard

    def _attend(self, store: dist.Store, here: str, what: str, timeout: float) -> list[Any]:
        """The others: wait for what rank 0 has collected."""
        everything, sorry = f"{here}/all", f"{here}/sorry/{self.world.rank}/{self._attempt}"
        if not _until(lambda: store.check([everything]) or store.check([sorry]), timeout):
            store.delete_key(f"{here}/{self.world.rank}")
            raise _absent(what, [0], timeout)
        if store.check([sorry]):
            raise _absent(what, json.loads(store.get(sorry)), timeout / _MARGIN)
        heard: list[Any] = json.loads(store.get(everything))
        return heard


def _until(done: Callable[[], bool], timeout: float) -> bool:
    deadline, pause = time.monotonic() + timeout, _SHORTEST
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST)
    return True


def _absent(what: str, missing: Sequence[int], timeout: float) -> RanksDivergedError:
    return RanksDivergedError(
        f"{what}: {ranks_text(missing)} did not come within {timeout:g} s",
        f"{what} is for all ranks: call it on every rank, at the same place of the program",
    )
