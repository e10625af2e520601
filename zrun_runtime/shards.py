"""This rank's slice of a group's parameters, in the tier where it lives while the full values are not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from zrun_runtime.plan import TierKind
from zrun_runtime.tiers import FileStore, NvmeTier, slots_of
from zrun_runtime.tiers.host import Courier, host_empty, is_host, nothing

_NAME = "weights"


class Shard(Protocol):
    """values: (shard_numel,) param dtype: the slice, or on a disk one NaN seen through strides of zero."""

    values: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes beside the full values."""
        ...

    def prefetch(self) -> None:
        """It will be wanted soon."""
        ...

    def bring(self, own: Tensor) -> Tensor:
        """What a gather sends: the slice itself, or `own`, its place in the full values, with a copy that is on its way
        (see Courier.join)."""
        ...

    def keep(self, own: Tensor) -> None:
        """Take the values of its place in the full ones."""
        ...

    def opened(self, changed: bool, fresh: bool = False) -> AbstractContextManager[Tensor]:
        """The slice in memory inside, to be read, or also changed in place; fresh: all of it will be written."""
        ...

    def discard(self) -> None:
        """Nobody will want it again."""
        ...


class MemoryShard:
    """A slice in memory: the device's or the host's."""

    def __init__(self, values: Tensor, is_view: bool) -> None:
        self.values = values
        self._is_view = is_view
        self._left = nothing  # waits until a device has what it was last sent

    @property
    def nbytes(self) -> int:
        return 0 if self._is_view else self.values.nbytes

    def prefetch(self) -> None:
        pass

    def bring(self, own: Tensor) -> Tensor:
        if self.values.device == own.device:
            return self.values
        self._left = Courier.of(own.device).send_lasting(self.values, own)
        return own

    def keep(self, own: Tensor) -> None:
        with self.opened(changed=True) as values:
            values.copy_(own)

    @contextmanager
    def opened(self, changed: bool, fresh: bool = False) -> Iterator[Tensor]:
        if changed:
            self._left()
        yield self.values

    def discard(self) -> None:
        pass


class FileShard:
    """A slice on a disk."""

    def __init__(self, values: Tensor, store: FileStore) -> None:
        """store: made by `reserve`."""
        numel = values.numel()
        self.store = store
        self.values = torch.full((), float("nan"), dtype=values.dtype).expand(numel)
        self._slot = slots_of(self.store, numel)[0]
        self.keep(values)

    @property
    def nbytes(self) -> int:
        return 0

    def prefetch(self) -> None:
        self.store.prefetch(self._slot)

    def bring(self, own: Tensor) -> Tensor:
        with self.opened(changed=False) as values:
            Courier.of(own.device).send(values, own)
        return own

    def keep(self, own: Tensor) -> None:
        with self.opened(changed=True, fresh=True) as values:
            values.copy_(own)

    @contextmanager
    def opened(self, changed: bool, fresh: bool = False) -> Iterator[Tensor]:
        found = self.store.fetch(self._slot, fresh)
        try:
            yield found[_NAME] if found else self.store.room(self._slot, _NAME, self.values.dtype)
        finally:
            if changed:
                self.store.flush(self._slot)
            else:
                self.store.release(self._slot)

    def discard(self) -> None:
        self.store.delete()


def leaves_device(tier: TierKind, device: torch.device) -> bool:
    """A slice in this tier takes none of the device's memory."""
    return tier is TierKind.NVME or (tier is TierKind.CPU and not is_host(device))


def reserve(disk: NvmeTier, numel: int, dtype: torch.dtype) -> FileStore:
    """A file for a slice, before there is a group: a disk that is full is told to all ranks before they communicate.

    Raises:
        OffloadError: the disk is full.
    """
    return disk.store("weights", (numel, numel), {_NAME: dtype})


def make_shard(own: Tensor, tier: TierKind, file: FileStore | None) -> Shard:
    """A home for a slice whose place in the full values is `own`, which will be gone."""
    if file is not None:
        return FileShard(own, file)
    if leaves_device(tier, own.device):
        return MemoryShard(host_empty(own.numel(), own.dtype, pin=True).copy_(own), is_view=False)
    return MemoryShard(own.clone(), is_view=False)
