"""Buffers that are used in turn: while one is computed on, others are being filled or emptied."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from zrun_runtime.errors import EngineError

T = TypeVar("T")


def _at_once() -> None:
    pass


class Ring(Generic[T]):
    """Up to `count` buffers, made when first needed. Those still being emptied are waited for, the oldest first."""

    def __init__(self, make: Callable[[], T], count: int) -> None:
        self.count = count
        self._make = make
        self._made = 0
        self._free: list[T] = []
        self._busy: deque[tuple[T, Callable[[], None]]] = deque()

    @property
    def exhausted(self) -> bool:
        """All are in use, and none is about to be given back."""
        return not self._free and not self._busy and self._made >= self.count

    def take(self) -> T:
        """A buffer nobody uses.

        Raises:
            EngineError: all are taken and none is about to be given back.
        """
        if self._free:
            return self._free.pop()
        if self._made < self.count:
            self._made += 1
            return self._make()
        if self.exhausted:
            raise EngineError(f"all {self.count} buffers are in use")
        buffer, wait = self._busy.popleft()
        wait()
        return buffer

    def give_back(self, buffer: T, wait: Callable[[], None] = _at_once) -> None:
        """Return a buffer, which may be used again once `wait` has returned."""
        if wait is _at_once:
            self._free.append(buffer)
        else:
            self._busy.append((buffer, wait))

    def drain(self) -> None:
        """Wait until nothing is being emptied; the first error among them is raised, after all have ended."""
        failed: BaseException | None = None
        while self._busy:
            buffer, wait = self._busy.popleft()
            try:
                wait()
            except Exception as error:
                failed = failed or error
            self._free.append(buffer)
        if failed is not None:
            raise failed

    def clear(self) -> None:
        """Free the buffers that nobody uses."""
        self.drain()
        self._made -= len(self._free)
        self._free.clear()
