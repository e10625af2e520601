"""Whether anybody may have written into memory since a moment, which torch can tell without looking at a value.

[Note: who may have written]
Tensors of torch can share memory until one of them is written into ("copy on write"). Their memory is marked then, and
whoever asks for a pointer to write through, with whatever tensor there (a parameter, its `p.data`, a view of long ago),
takes the mark away. Memory of one tensor alone can be marked, too, and costs nothing: as long as the mark is there,
nobody had such a pointer.

Pointers taken before are not seen: those of numpy arrays and of other libraries. They hold the memory, so it is marked
only while nobody does but us. Some kernels ask for such a pointer and only read (those of LSTM). Where that is found in
two windows running the memory is not marked again: it would tell nothing, and torch does not stand two threads that
take a mark away at the same moment. A torch that lacks what this needs marks nothing, so everything is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

_VAIN = 2  # windows running

_NAMES = "_is_cow_tensor", "_data_address", "_storage_Use_Count"  # of torch._C, none of them documented
_CAN_MARK = hasattr(torch, "_lazy_clone") and all(hasattr(torch._C, name) for name in _NAMES)


def _where(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# Where the memory of a tensor begins; asking for data_ptr() would take the mark away.
memory_of: Callable[[Tensor], int] = torch._C._data_address if _CAN_MARK else _where  # type: ignore[attr-defined]


class WriteMark:
    """See [Note: who may have written]. Of memory of the CPU."""

    def __init__(self) -> None:
        self._marked = False
        self._vain = 0  # windows running in which the mark went and nothing had changed

    def begin(self, memory: Tensor, ours: int, in_vain: bool) -> None:
        """From here on.

        ours: how many tensors of ours are in that memory; if there are more, it is not marked.
        in_vain: it was touched since the last time, and nothing had changed.
        """
        if not _CAN_MARK:
            return
        if self._marked:
            self._vain = self._vain + 1 if in_vain else 0
        tensors = torch._C._storage_Use_Count(memory.untyped_storage()._cdata) - 1  # without the storage just made
        self._marked = False
        if tensors <= ours and self._vain < _VAIN:
            with suppress(RuntimeError):  # memory that torch did not allocate itself, such as what processes share
                torch._lazy_clone(memory)
                self._marked = True

    def untouched(self, memory: Tensor) -> bool:
        """Nobody has written into it. If not, perhaps nobody has either."""
        return self._marked and bool(torch._C._is_cow_tensor(memory))  # type: ignore[attr-defined]
