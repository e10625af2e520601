"""Bulk movements over NCCL, with its own collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from zrun_runtime.collectives.transport import Pending
from zrun_runtime.distributed import World
from zrun_runtime.watch import PeerError

# torch 2.13 renamed these two and warns about the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class NcclTransport:
    """One process group and one issuing thread, so that all ranks issue in one order.

    Buffers stay referenced by the Pending until it was waited for, which orders the current stream after the movement;
    so the allocator cannot hand their memory out too early, and `record_stream` is not needed.
    """

    def __init__(self, world: World, group: dist.ProcessGroup) -> None:
        self.world, self.group = world, group

    def reduce_scatter(self, full: Tensor, out: Tensor, accumulate: bool, ticket: int) -> Pending:
        received = torch.empty_like(out, dtype=full.dtype) if accumulate or out.dtype is not full.dtype else out
        work = _reduce_scatter(received, full, group=self.group, async_op=True)

        def complete() -> None:
            _wait(work)
            if accumulate:
                out.add_(received)
            elif received is not out:
                out.copy_(received)

        return Pending(complete)

    def all_gather(self, full: Tensor, own: Tensor, ticket: int) -> Pending:
        work = _all_gather(full, own, group=self.group, async_op=True)

        def complete() -> None:
            _wait(work)
            _ = own  # held until here

        return Pending(complete)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        try:
            dist.broadcast(tensor, group_src=source, group=self.group)
        except dist.DistBackendError as error:
            raise PeerError(None, str(error)) from error

    def release_scratch(self) -> None:
        pass


def _wait(work: dist.Work) -> None:
    """Order the current stream after a movement. The host does not wait, so this fails only after the fact."""
    try:
        work.wait()
    except dist.DistBackendError as error:
        raise PeerError(None, str(error)) from error
