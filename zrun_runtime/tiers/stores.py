"""Where a group's state lives between uses, behind three verbs: prefetch, fetch, flush.

[Note: double buffering]
State is used tile by tile. `stream` walks over the tiles of all groups as one sequence: while tile k is computed on,
k+1 is being read and k-1 written. It is written once, here, for every tier; where state is in memory already, a tile is
a view of it, and reading and writing it are nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from zrun_runtime.errors import OffloadError
from zrun_runtime.layout import round_up
from zrun_runtime.tiers.disk import PAGE, Disk, aligned_buffer
from zrun_runtime.tiers.ring import Ring

Values = dict[str, Tensor]  # name -> (slot.numel,): views of where the state is, or of the buffer it was read into


@dataclass(frozen=True)
class Slot:
    """Elements start..stop of every tensor of a store: what is fetched and flushed at once."""

    store: Store
    index: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def is_last(self) -> bool:
        """The store ends with it."""
        return self.stop == self.store.numel


class Store(Protocol):
    """Tensors of `numel` elements each, under names, in one tier."""

    numel: int

    def prefetch(self, slot: Slot) -> None:
        """Begin to bring a slot's values, if they have to come from anywhere."""
        ...

    def fetch(self, slot: Slot) -> Values:
        """The values, to be changed in place; what was never flushed is missing. `flush` or `release` must follow."""
        ...

    def room(self, slot: Slot, name: str, dtype: torch.dtype) -> Tensor:
        """Where a slot that was fetched keeps a tensor that it does not have yet."""
        ...

    def flush(self, slot: Slot) -> None:
        """Keep the values as they are now, with what was put into `room`."""
        ...

    def release(self, slot: Slot) -> None:
        """Done with values that did not change."""
        ...

    def finish(self) -> None:
        """Wait for what is still being written.

        Raises:
            OffloadError: it could not be.
        """
        ...


def slots_of(store: Store, tile_numel: int) -> list[Slot]:
    """A store in tiles."""
    starts = range(0, store.numel, max(1, tile_numel))
    return [
        Slot(store, index, start, min(start + tile_numel, store.numel)) for index, start in enumerate(starts)
    ]  # fmt: skip


def stream(slots: Sequence[Slot], ahead: int, changed: bool = True) -> Iterator[tuple[Slot, Values]]:
    """Each slot with its values, in order, flushed when the next is asked for (`changed`: else only let go of).

    See [Note: double buffering].
    """
    for index, slot in enumerate(slots):
        for coming in slots[index : index + 1 + ahead]:
            coming.store.prefetch(coming)
        yield slot, slot.store.fetch(slot)
        if changed:
            slot.store.flush(slot)
        else:
            slot.store.release(slot)


class MemoryStore:
    """State that stays where it is: in a dict of whole tensors, which belongs to someone else (an optimizer)."""

    def __init__(self, numel: int, home: Callable[[], dict[str, Any]], device: torch.device) -> None:
        self.numel = numel
        self._home = home
        self._device = device

    def prefetch(self, slot: Slot) -> None:
        pass

    def fetch(self, slot: Slot) -> Values:
        whole = self._home()
        return {
            name: value[slot.start : slot.stop]
            for name, value in whole.items()
            if isinstance(value, Tensor) and value.shape == (self.numel,)
        }

    def room(self, slot: Slot, name: str, dtype: torch.dtype) -> Tensor:
        whole = self._home()
        if name not in whole:
            whole[name] = torch.empty(self.numel, dtype=dtype, device=self._device)
        return whole[name][slot.start : slot.stop]

    def flush(self, slot: Slot) -> None:
        pass

    def release(self, slot: Slot) -> None:
        pass

    def finish(self) -> None:
        pass


class Buffers:
    """The buffers that all stores of one disk share: as large as the largest tile, and no more than `count`."""

    def __init__(self, count: int) -> None:
        self.nbytes = 0
        self.ring: Ring[Tensor] = Ring(lambda: aligned_buffer(self.nbytes), count)
        # While one tile is computed on, one is written; the others may be read ahead.
        self.ahead = max(count - 2, 1) if count > 1 else 0
        self.coming: dict[tuple[FileStore, int], tuple[Tensor, Callable[[], None]]] = {}  # read ahead, oldest first

    def take(self) -> Tensor:
        """A buffer nobody uses; if need be one whose contents were read ahead."""
        if self.ring.exhausted and self.coming:
            buffer, wait = self.coming.pop(next(iter(self.coming)))
            wait()
            return buffer
        return self.ring.take()

    def fit(self, nbytes: int) -> None:
        """Be large enough for tiles of this size."""
        if nbytes > self.nbytes:
            while self.coming:
                self.ring.give_back(*self.coming.pop(next(iter(self.coming))))
            self.ring.clear()
            self.nbytes = nbytes


class FileStore:
    """State in one file: tile after tile, and in a tile one tensor after the other, each from a new page on."""

    def __init__(
        self, disk: Disk, name: str, tiling: tuple[int, int], fields: Mapping[str, torch.dtype], buffers: Buffers
    ) -> None:
        """tiling: (elements of each tensor, elements of a tile)."""
        self.numel, self.tile_numel = tiling
        self.fields = dict(fields)
        self._disk, self._buffers = disk, buffers
        self._path = disk.create(name, self._offset(-(-self.numel // self.tile_numel)))
        self._known: dict[int, set[str]] = {}  # slot -> names of what the file has of it
        self._here: dict[int, tuple[Tensor, set[str]]] = {}
        self._writing: dict[int, Callable[[], None]] = {}  # slot -> waits until the file has it
        buffers.fit(self._offset(1))

    @property
    def nbytes(self) -> int:
        """Bytes on the disk."""
        return self._offset(-(-self.numel // self.tile_numel))

    def _offset(self, index: int) -> int:
        """Where a slot begins. Every tile has the room of a full one but the last."""
        full, rest = divmod(min(index * self.tile_numel, self.numel), self.tile_numel)
        return full * self._extent(self.tile_numel) + (self._extent(rest) if rest else 0)

    def _extent(self, numel: int) -> int:
        return sum(round_up(numel * dtype.itemsize, PAGE) for dtype in self.fields.values())

    def _views(self, slot: Slot, buffer: Tensor) -> Values:
        views, start = {}, 0
        for name, dtype in self.fields.items():
            nbytes = slot.numel * dtype.itemsize
            views[name] = buffer[start : start + nbytes].view(dtype)
            start += round_up(nbytes, PAGE)
        return views

    def prefetch(self, slot: Slot) -> None:
        key = self, slot.index
        if key in self._buffers.coming or slot.index in self._here or slot.index not in self._known:
            return
        if not self._buffers.ring.exhausted:
            buffer = self._buffers.ring.take()
            self._buffers.coming[key] = buffer, self._read(slot, buffer)

    def fetch(self, slot: Slot, fresh: bool = False) -> Values:
        """fresh: nothing of it is wanted, all will be written."""
        known = self._known.get(slot.index, set()) if not fresh else set()
        if (self, slot.index) in self._buffers.coming:
            buffer, wait = self._buffers.coming.pop((self, slot.index))
            wait()
        else:
            buffer = self._buffers.take()
            if known:
                self._read(slot, buffer)()
        self._here[slot.index] = buffer, set(known)
        return {name: view for name, view in self._views(slot, buffer).items() if name in known}

    def _settle(self, slot: Slot) -> None:
        """Wait until the file has the slot: with several threads a request may overtake another."""
        if slot.index in self._writing:
            self._writing.pop(slot.index)()

    def _read(self, slot: Slot, buffer: Tensor) -> Callable[[], None]:
        self._settle(slot)
        return self._disk.read(self._path, self._offset(slot.index), buffer[: self._extent(slot.numel)])

    def room(self, slot: Slot, name: str, dtype: torch.dtype) -> Tensor:
        buffer, present = self._here[slot.index]
        if self.fields.get(name) is not dtype:
            raise OffloadError(
                f"the optimizer's state has a new tensor {name!r} of {dtype}, for which {self._path.name} has no room",
                "set the optimizer's options before initialize(), or offload to cpu",
            )
        present.add(name)
        return self._views(slot, buffer)[name]

    @property
    def known(self) -> list[str]:
        """Names of the tensors that were flushed."""
        return [name for name in self.fields if any(name in names for names in self._known.values())]

    def forget(self, slot: Slot, name: str) -> None:
        """A slot that was fetched does not have this tensor any more."""
        self._here[slot.index][1].discard(name)

    def flush(self, slot: Slot) -> None:
        buffer, present = self._here.pop(slot.index)
        self._known[slot.index] = present
        self._settle(slot)
        writing = self._disk.write(self._path, self._offset(slot.index), buffer[: self._extent(slot.numel)])
        self._writing[slot.index] = writing
        self._buffers.ring.give_back(buffer, writing)

    def release(self, slot: Slot) -> None:
        self._buffers.ring.give_back(self._here.pop(slot.index)[0])

    def finish(self) -> None:
        for key in [key for key in self._buffers.coming if key[0] is self]:  # read ahead and then not wanted
            self._buffers.ring.give_back(*self._buffers.coming.pop(key))
        for buffer, _ in self._here.values():
            self._buffers.ring.give_back(buffer)
        self._here.clear()
        self._writing.clear()
        self._buffers.ring.drain()

    def delete(self) -> None:
        """Remove the file."""
        self.finish()
        self._disk.delete(self._path)
