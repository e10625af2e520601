"""The data loader that `initialize(training_data=...)` returns."""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from zrun_runtime.distributed import World


@dataclass(frozen=True)
class LoaderOptions:
    """sampler: None makes one that gives every rank its own share, shuffled or not. workers: processes that read."""

    collate_fn: Callable[[list[Any]], Any] | None = None
    sampler: Sampler[Any] | None = None
    shuffle: bool = True
    drop_last: bool = False
    pin_memory: bool = True
    workers: int = 0


def build_loader(
    dataset: Dataset[Any],
    batch_size: int,  # samples of one micro-batch on one rank
    world: World,
    how: LoaderOptions,
) -> DataLoader[Any]:
    """Micro-batches of this rank: a share of a map-style dataset, or an iterable dataset as it comes."""
    sampler = how.sampler
    if sampler is None and isinstance(dataset, Sized) and not isinstance(dataset, IterableDataset):
        sampler = DistributedSampler(dataset, world.size, world.rank, shuffle=how.shuffle, drop_last=how.drop_last)
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=how.collate_fn,
        drop_last=how.drop_last,
        pin_memory=how.pin_memory and world.device.type == "cuda",
        num_workers=how.workers,
    )
