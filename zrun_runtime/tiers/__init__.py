"""Tiers below the device: where state lives between uses, and how it comes and goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from zrun_runtime.errors import OffloadError
from zrun_runtime.tiers.disk import REQUEST_BYTES, Disk, DiskSettings
from zrun_runtime.tiers.stores import Buffers, FileStore, MemoryStore, Slot, Store, Values, slots_of, stream

__all__ = [
    "REQUEST_BYTES", "Buffers", "DiskSettings", "FileStore", "MemoryStore", "NvmeTier", "OffloadSettings", "Slot",
    "Store", "Values", "on_every_rank", "slots_of", "stream",
]  # fmt: skip

T = TypeVar("T")


@dataclass(frozen=True)
class OffloadSettings:
    """How the optimizer's state is kept off the device.

    tile_numel: the most elements that are updated at once. disk: for state on NVMe. buffer_count: tiles of it in memory
    at a time. share: of the elements; the groups whose gradients come last stay on the device.
    """

    tile_numel: int
    disk: DiskSettings | None = None
    buffer_count: int = 4
    share: float = 1.0


class NvmeTier:
    """One disk and the buffers between it and the memory."""

    def __init__(self, settings: DiskSettings, buffer_count: int) -> None:
        self.disk = Disk(settings)
        self.buffers = Buffers(buffer_count)
        self._made = 0

    def store(self, label: str, tiling: tuple[int, int], fields: Mapping[str, torch.dtype]) -> FileStore:
        """A new file. See FileStore.

        Raises:
            OffloadError: the disk is full.
        """
        self._made += 1
        return FileStore(self.disk, f"{label}-{self._made:06}", tiling, fields, self.buffers)

    def close(self) -> None:
        """Remove all files."""
        self.disk.close()


def on_every_rank(action: Callable[[], T], agree: Callable[[bool], bool]) -> T:
    """Do something that a disk may refuse: on every rank, or on none.

    agree: whether all ranks are fine, given whether this one is; a collective.

    Raises:
        OffloadError: some rank's disk refused.
    """
    failed, result = None, None
    try:
        result = action()
    except OffloadError as error:
        failed = error
    if not agree(failed is None) or result is None:
        raise failed or OffloadError("another rank cannot use its disk for offload; it says why")
    return result
