"""Bulk movements over gloo, peer to peer.

[Note: why peer to peer]
Measured on torch 2.13: gloo has no reduce-scatter of its own. c10d's is an all-reduce of the whole buffer and a copy,
so it sends twice the bytes; its all-gather stages through a fresh buffer and copies every slice out. Sends and
receives of slices move exactly the bytes of the formula, straight into place, and skip gloo's thread pool.

Sums are taken in rank order, whatever arrives first, so results repeat bit by bit.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from zrun_runtime.collectives.transport import DONE, Pending, begin, finish
from zrun_runtime.distributed import World
from zrun_runtime.watch import PeerError

# Tags keep messages of different movements apart: 3 bits of stream, then a number. Exchanges (ledger.py) use 3.
_GATHER, _REDUCE = 1 << 28, 2 << 28


class GlooTransport:
    """See [Note: why peer to peer]."""

    def __init__(self, world: World, group: dist.ProcessGroup) -> None:
        self.world, self.group = world, group
        self._gathers = 0
        self._reductions: Counter[int] = Counter()  # by ticket
        self._scratch: list[Tensor] = []

    def reduce_scatter(self, full: Tensor, out: Tensor, accumulate: bool, ticket: int) -> Pending:
        rank, size = self.world.rank, self.world.size
        tag = _REDUCE | ((self._reductions[ticket] & 0xFFF) << 16) | (ticket & 0xFFFF)
        self._reductions[ticket] += 1
        slices = full.chunk(size)
        received = self._borrow(out.numel() * (size - 1), full)
        incoming = dict(zip((p for p in range(size) if p != rank), received.chunk(max(1, size - 1)), strict=True))
        messages = []
        for peer in self._peers():
            messages.append(begin(self.group.recv, incoming[peer], peer, tag))
            messages.append(begin(self.group.send, slices[peer], peer, tag))

        def complete() -> None:
            finish(messages)
            terms = [slices[p] if p == rank else incoming[p] for p in range(size)]
            _sum_into(out, terms, accumulate)
            self._scratch.append(received)

        return Pending(complete)

    def all_gather(self, full: Tensor, own: Tensor, ticket: int) -> Pending:
        rank, size = self.world.rank, self.world.size
        # The ticket is part of the tag, so that slices of ranks that diverged never meet ([Note: tickets]).
        tag = _GATHER | ((self._gathers & 0xFFF) << 16) | (ticket & 0xFFFF)
        self._gathers += 1
        slices = full.chunk(size)
        messages = []
        for peer in self._peers():
            messages.append(begin(self.group.recv, slices[peer], peer, tag))
            messages.append(begin(self.group.send, own, peer, tag))
        if slices[rank].data_ptr() != own.data_ptr():
            slices[rank].copy_(own)

        def complete() -> None:
            finish(messages)

        return Pending(complete)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        try:
            dist.broadcast(tensor, group_src=source, group=self.group)
        except RuntimeError as error:
            raise PeerError(source, str(error)) from error

    def release_scratch(self) -> None:
        """Give back the receive buffers; they are wanted only while gradients are reduced."""
        self._scratch.clear()

    def _peers(self) -> list[int]:
        """The other ranks, each rank beginning with its neighbour so that no one is everybody's first."""
        rank, size = self.world.rank, self.world.size
        return [(rank + step) % size for step in range(1, size)]

    def _borrow(self, numel: int, like: Tensor) -> Tensor:
        for index, buffer in enumerate(self._scratch):
            if buffer.numel() >= numel and buffer.dtype is like.dtype:
                del self._scratch[index]
                return buffer[:numel]
        return torch.empty(numel, dtype=like.dtype, device=like.device)


class LonelyTransport:
    """A world of one: every layout is the same, so nothing moves."""

    def reduce_scatter(self, full: Tensor, out: Tensor, accumulate: bool, ticket: int) -> Pending:
        if full.data_ptr() != out.data_ptr():
            _sum_into(out, [full], accumulate)
        return DONE

    def all_gather(self, full: Tensor, own: Tensor, ticket: int) -> Pending:
        if full.data_ptr() != own.data_ptr():
            full.copy_(own)
        return DONE

    def broadcast(self, tensor: Tensor, source: int) -> None:
        pass

    def release_scratch(self) -> None:
        pass


def _sum_into(out: Tensor, terms: list[Tensor], accumulate: bool) -> None:
    """out = (out +) terms[0] + terms[1] + ..., in that order, in out's dtype. `out` may be one of the terms."""
    if not accumulate and any(term.data_ptr() == out.data_ptr() for term in terms):
        total = terms[0]
        for term in terms[1:]:
            total.add_(term)
        if total.data_ptr() != out.data_ptr():
            out.copy_(total)
        return
    if accumulate:
        first = 0
    elif len(terms) > 1 and terms[0].dtype is out.dtype:
        torch.add(terms[0], terms[1], out=out)
        first = 2
    else:
        out.copy_(terms[0])
        first = 1
    for term in terms[first:]:
        out.add_(term)
