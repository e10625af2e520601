"""What a transport must do: the three bulk movements that ZeRO needs, asynchronously, over equal slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from zrun_runtime.watch import PeerError


class Pending:
    """A movement under way. `wait()` returns when its result may be read (on CUDA: by the current stream)."""

    def __init__(self, complete: Callable[[], None] | None = None) -> None:
        self._complete = complete

    def wait(self) -> None:
        """Finish the movement. A second call does nothing."""
        complete, self._complete = self._complete, None
        if complete is not None:
            complete()


DONE = Pending()


def finish(messages: Sequence[tuple[int, dist.Work]]) -> None:
    """Wait for messages, each with the rank that it goes to or comes from.

    Raises:
        PeerError: a rank is gone, or silent for longer than the process group's time-out.
    """
    for peer, work in messages:
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerError(peer, str(error)) from error


def begin(
    message: Callable[[list[Tensor], int, int], dist.Work],  # `send` or `recv` of a process group
    tensor: Tensor,
    peer: int,
    tag: int,
) -> tuple[int, dist.Work]:
    """Begin a message to or from a rank; for `finish`.

    Raises:
        PeerError: it is gone.
    """
    try:
        return peer, message([tensor], peer, tag)
    except RuntimeError as error:
        raise PeerError(peer, str(error)) from error


class Transport(Protocol):
    """Moves flat, contiguous buffers whose length is a multiple of the world size.

    Each method, and the `wait()` of what it returns, raises PeerError where another rank is gone or silent.
    """

    def reduce_scatter(
        self,
        full: Tensor,  # (n * world,) any dtype, PARTIAL
        out: Tensor,  # (n,) SHARDED; receives, or is increased by, the sum over ranks of this rank's slice
        accumulate: bool,
        ticket: int,  # names what is reduced: the n-th reduction of a ticket meets the n-th of every rank
    ) -> Pending: ...

    def all_gather(
        self,
        full: Tensor,  # (n * world,) REPLICATED when done
        own: Tensor,  # (n,) SHARDED; may be the slice of `full` itself
        ticket: int,  # names the movement; slices of different tickets never meet
    ) -> Pending: ...

    def broadcast(self, tensor: Tensor, source: int) -> None: ...
