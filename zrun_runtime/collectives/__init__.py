"""The only callers of torch.distributed's collectives. What moves follows from two adjacent layouts, and is counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from zrun_runtime.collectives.gloo import GlooTransport, LonelyTransport
from zrun_runtime.collectives.ledger import SLOTS, Exchange, Ledger
from zrun_runtime.collectives.nccl import NcclTransport
from zrun_runtime.collectives.transport import DONE, Pending, Transport
from zrun_runtime.distributed import World
from zrun_runtime.layout import Layout
from zrun_runtime.watch import Watch

__all__ = ["Channel", "Collectives", "Exchange", "Pending", "Traffic"]


@dataclass
class Traffic:
    """Bytes that this rank sent, by kind of movement, and how many movements there were."""

    sent: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def count(self, kind: str, nbytes: int) -> None:
        """Add one movement."""
        self.sent[kind] = self.sent.get(kind, 0) + nbytes
        self.calls[kind] = self.calls.get(kind, 0) + 1

    def take(self) -> dict[str, int]:
        """Bytes since the last call, by kind: reduce_scatter, all_gather, other."""
        taken = {kind: self.sent.get(kind, 0) for kind in ("reduce_scatter", "all_gather", "other")}
        self.sent.clear()
        self.calls.clear()
        return taken


class Channel:
    """A process group's transport and ledger, shared by every engine of the process that trains over it."""

    _open: dict[dist.ProcessGroup | None, Channel] = {}

    def __init__(self, world: World) -> None:
        self.world = world
        self.watch = Watch(world)
        self.ledger = Ledger(world, self.watch)
        self.transport = _transport(world)

    @classmethod
    def of(cls, world: World) -> Channel:
        """The channel of this world's process group."""
        channel = cls._open.get(world.data)
        if channel is None:
            channel = cls._open[world.data] = cls(world)
        return channel


def _transport(world: World) -> GlooTransport | NcclTransport | LonelyTransport:
    if world.size == 1 or world.data is None:
        return LonelyTransport()
    native = "nccl" in world.backend or world.imagined
    return NcclTransport(world, world.data) if native else GlooTransport(world, world.data)


class Collectives:
    """What one engine asks of its channel."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.traffic = Traffic()
        channel = Channel.of(world)
        self._transport: Transport = channel.transport
        self._release = channel.transport.release_scratch
        self._ledger = channel.ledger
        self.watch = channel.watch

    def register(self, label: str) -> int:
        """A ticket for gathers or steps, called `label` in errors (see [Note: tickets])."""
        return self._ledger.register(label)

    def reduce(self, full: Tensor, target: Layout, out: Tensor, accumulate: bool, ticket: int) -> Pending:
        """PARTIAL -> `target`: sum `full` over ranks.

        full: (padded_numel,) wire dtype; contents undefined afterwards.
        ticket: of the group; see Transport.
        out: SHARDED: (shard_numel,), set to (or increased by) this rank's slice. REPLICATED: `full` itself.
        """
        self._ledger.check_process()
        size, rank = self.world.size, self.world.rank
        own = full.chunk(size)[rank]
        if target is Layout.SHARDED:
            self._count("reduce_scatter", full)
            return self._begun(ticket, lambda: self._transport.reduce_scatter(full, out, accumulate, ticket))
        if size == 1:
            return DONE
        self._count("reduce_scatter", full)
        first = self._begun(ticket, lambda: self._transport.reduce_scatter(full, own, False, ticket))

        def complete() -> None:
            first.wait()
            self._count("all_gather", full)
            self._begun(ticket, lambda: self._transport.all_gather(full, own, 0)).wait()

        return Pending(complete)

    def _begun(self, ticket: int, begin: Callable[[], Pending]) -> Pending:
        """A movement whose errors tell who is missing, and at what."""
        what = self._ledger.label(ticket)
        self.watch.operation += 1
        with self.watch.waiting(what):
            pending = begin()

        def complete() -> None:
            with self.watch.waiting(what):
                pending.wait()

        return Pending(complete)

    def checked(self, pending: Pending, ticket: int) -> Pending:
        """The same movement, whose `wait()` first makes sure that all ranks came to this ticket at this place."""
        exchange = self.exchange(ticket)

        def complete() -> None:
            exchange.wait()
            pending.wait()

        return Pending(complete)

    def all_gather(self, full: Tensor, own: Tensor, ticket: int) -> Pending:
        """SHARDED -> REPLICATED at a place where all ranks are known to agree (inside `step`). ticket: for errors."""
        self._count("all_gather", full)
        return self._begun(ticket, lambda: self._transport.all_gather(full, own, 0))

    def checked_all_gather(self, full: Tensor, own: Tensor, ticket: int) -> Pending:
        """SHARDED -> REPLICATED where ranks might have gone different ways: the ticket is compared first.

        `wait()` raises RanksDivergedError if another rank is somewhere else.
        """
        if self.world.size == 1:
            return self._transport.all_gather(full, own, ticket)
        self._ledger.check_process()
        self._count("all_gather", full)
        return self.checked(self._begun(ticket, lambda: self._transport.all_gather(full, own, ticket)), ticket)

    def exchange(self, ticket: int, values: Sequence[float] = ()) -> Exchange:
        """Say a ticket and up to seven numbers; hear those of all ranks, in rank order."""
        self.traffic.count("other", 8 * SLOTS * (self.world.size - 1))
        return self._ledger.exchange(ticket, values)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Give every rank the values of `source`, in place. Tensors of any dtype, stride and size, empty ones too."""
        if self.world.size == 1 or not tensor.numel():
            return
        if self.world.rank == source:
            self.traffic.count("other", tensor.numel() * tensor.element_size())
        dense = tensor.detach().contiguous()
        self.watch.operation += 1
        with self.watch.waiting(f"a broadcast from rank {source}"):
            self._transport.broadcast(dense.view(-1).view(torch.uint8), source)  # bytes: not all dtypes can be sent
        if dense.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(dense)

    def broadcast_order(self, order: Sequence[int]) -> list[int]:
        """Rank 0's order of the same numbers."""
        if self.world.imagined:
            return list(order)
        numbers = torch.tensor(order, dtype=torch.int64, device=self.world.device)
        self.broadcast(numbers)
        return numbers.tolist()

    def read(self, values: Tensor) -> list[float]:
        """Numbers of the device, on the host. In an imagined world all are 0."""
        if self.world.imagined:
            return [0.0] * values.numel()
        with self.watch.waiting("the reductions of a step"):  # on a GPU the host waits for them only here
            return values.tolist()

    def release_scratch(self) -> None:
        """Give back buffers that are wanted only while gradients are reduced."""
        self._release()

    def _count(self, kind: str, full: Tensor) -> None:
        size = self.world.size
        if size > 1:
            self.traffic.count(kind, full.numel() // size * (size - 1) * full.element_size())
