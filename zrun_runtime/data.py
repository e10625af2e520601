"""The data loader that `initialize(training_data=...)` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from zrun_runtime.distributed import World
from zrun_runtime.telemetry import notice


@dataclass(frozen=True)
class LoaderOptions:
    """sampler: None makes one that gives every rank its own share, shuffled or not. workers: processes that read."""

    collate_fn: Callable[[list[Any]], Any] | None = None
    sampler: Sampler[Any] | None = None
    shuffle: bool = True
    drop_last: bool = False
    pin_memory: bool = True
    workers: int = 0


class ResumableSampler(DistributedSampler[Any]):
    """A rank's share of a dataset, whose next round may begin in the middle. skip: samples of it to leave out."""

    skip = 0

    def __iter__(self) -> Iterator[Any]:
        skip, self.skip = self.skip, 0
        return islice(super().__iter__(), skip, None)


class ResumableLoader(DataLoader[Any]):
    """A loader that knows how far its round has come, and can begin its next round there.

    ranks: that read the same dataset together. taken: batches of this round that were handed out.
    """

    ranks = 1
    taken = 0
    _skip = 0  # batches to leave out of the next round

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        skip, self._skip = self._skip, 0
        self.taken = skip
        if isinstance(self.sampler, ResumableSampler):
            self.sampler.skip = skip * (self.batch_size or 1)
            skip = 0
        before = torch.get_rng_state() if self.taken else None
        batches = islice(super().__iter__(), skip, None)
        if before is not None:  # a round draws a number when it begins, and this one has begun before
            torch.set_rng_state(before)
        for batch in batches:
            self.taken += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Samples that all ranks took in this round, none once it is over, and the sampler's epoch."""
        over = isinstance(self.dataset, Sized) and self.taken >= len(self)
        taken = 0 if over else self.taken
        return {"samples": taken * (self.batch_size or 1) * self.ranks, "epoch": getattr(self.sampler, "epoch", None)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next round where `state` was taken; at another number of ranks or batch size, just before it."""
        self._skip = state["samples"] // ((self.batch_size or 1) * self.ranks)
        if state["epoch"] is not None and hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(state["epoch"])


def build_loader(
    dataset: Dataset[Any],
    batch_size: int,  # samples of one micro-batch on one rank
    world: World,
    how: LoaderOptions,
) -> ResumableLoader:
    """Micro-batches of this rank: a share of a map-style dataset, or an iterable dataset as it comes."""
    sampler = how.sampler
    if sampler is None and isinstance(dataset, Sized) and not isinstance(dataset, IterableDataset):
        sampler = ResumableSampler(dataset, world.size, world.rank, shuffle=how.shuffle, drop_last=how.drop_last)
    if isinstance(dataset, IterableDataset) and world.size > 1 and world.rank == 0:
        notice(
            "info", "training data: an iterable dataset is read as it comes; give each rank samples of its own in it"
        )
    loader = ResumableLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=how.collate_fn,
        drop_last=how.drop_last,
        pin_memory=how.pin_memory and world.device.type == "cuda",
        num_workers=how.workers,
    )
    loader.ranks = world.size
    return loader
