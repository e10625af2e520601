"""The data loader that `initialize(training_data=...)` returns."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from zrun_runtime.distributed import World


def build_loader(
    dataset: Dataset[Any],
    batch_size: int,  # samples of one micro-batch on one rank
    world: World,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    drop_last: bool = False,
) -> DataLoader[Any]:
    """Micro-batches of this rank: a shuffled share of a map-style dataset, or an iterable dataset as it comes."""
    sampler: DistributedSampler[Any] | None = None
    if isinstance(dataset, Sized) and not isinstance(dataset, IterableDataset):
        sampler = DistributedSampler(dataset, world.size, world.rank, shuffle=True, drop_last=drop_last)
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        pin_memory=world.device.type == "cuda",
    )
