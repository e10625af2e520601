"""The order of operations that ranks must agree on, checked by exchanging a few numbers.

[Note: tickets]
Two ranks that enter different modules at stage 3 would each send the shard the other did not ask for: mixed weights, or
a hang. So every gather and every step has a ticket, a small number with a label that all ranks register in the same
order, and a place in one sequence. Before a gather is believed, the ranks exchange the ticket that each holds at this
place. All pairs are compared, so every rank that differs from any other one knows it at once, and can say who is where.

The exchange is one 64-byte message to each peer: on loopback 0.1 ms, where a small gloo all-reduce takes 0.6 ms.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zrun_runtime.collectives.transport import begin, finish
from zrun_runtime.distributed import World
from zrun_runtime.errors import DistributedError, RanksDivergedError
from zrun_runtime.positions import ranks_text
from zrun_runtime.watch import Watch

SLOTS = 8  # float64 numbers of one message: the ticket and up to seven values
_TAG = 3 << 28  # the tags of exchanges; see collectives/gloo.py for the other streams
_SEQUENCE_MASK = (1 << 28) - 1


class Exchange:
    """One exchange under way: what every rank said at this place of the sequence."""

    def __init__(self, ledger: Ledger, said: Tensor, heard: Tensor, messages: list[tuple[int, dist.Work]]) -> None:
        self._ledger, self._said, self._heard, self._messages = ledger, said, heard, messages

    def wait(self) -> Tensor:
        """(world, 7) float64: the values of every rank, in rank order.

        Raises:
            RanksDivergedError: ranks hold different tickets at this place, or at an earlier one not yet looked at; or
                a rank does not come.
        """
        self._ledger.settle(self)
        return self._heard[:, 1:]

    def settle(self) -> None:
        """Hear the others, and compare."""
        with self._ledger.watch.waiting(self._ledger.label(int(self._said[0]))):
            finish(self._messages)
        tickets = [int(t) for t in self._heard[:, 0].tolist()]
        if len(set(tickets)) > 1:
            raise self._ledger.diverged(tickets)


class Ledger:
    """See [Note: tickets]. One per process group: the engines of a process share its sequence."""

    def __init__(self, world: World, watch: Watch) -> None:
        self.world, self.watch = world, watch
        self._process = os.getpid()
        self._labels: list[str] = []
        self._sequence = 0
        self._unsettled: deque[Exchange] = deque()

    def register(self, label: str) -> int:
        """A new ticket, called `label` in errors. All ranks register in the same order."""
        self._labels.append(label)
        return len(self._labels) - 1

    def check_process(self) -> None:
        """Messages of a fork would be taken for those of its rank.

        Raises:
            DistributedError: this is one.
        """
        if os.getpid() != self._process:
            raise DistributedError(
                f"rank {self.world.rank}: this process was forked off it (a data loader's worker?), and is no rank",
                "give workers a model that is not sharded: a copy from before initialize(), or of engine.state_dict()",
            )

    def exchange(self, ticket: int, values: Sequence[float] = ()) -> Exchange:
        """Say a ticket and up to seven values, and hear those of all ranks."""
        world, group = self.world, self.world.control
        self.check_process()
        said = torch.zeros(SLOTS, dtype=torch.float64)
        said[0] = ticket
        if values:
            said[1 : 1 + len(values)] = torch.as_tensor(values, dtype=torch.float64)
        heard = said.repeat(world.size, 1) if world.imagined else torch.zeros(world.size, SLOTS, dtype=torch.float64)
        heard[world.rank] = said
        tag = _TAG | (self._sequence & _SEQUENCE_MASK)
        self._sequence += 1
        self.watch.operation += 1
        messages: list[tuple[int, dist.Work]] = []
        with self.watch.waiting(self.label(ticket)):
            for peer in range(world.size):
                if peer != world.rank and group is not None and not world.imagined:
                    messages.append(begin(group.send, said, peer, tag))
                    messages.append(begin(group.recv, heard[peer], peer, tag))
        self._unsettled.append(Exchange(self, said, heard, messages))
        return self._unsettled[-1]

    def settle(self, exchange: Exchange) -> None:
        """Look at all places up to this one, in order: who diverged at an earlier one will never come to this."""
        while exchange in self._unsettled:
            self._unsettled.popleft().settle()

    def diverged(self, tickets: list[int]) -> RanksDivergedError:
        """The error that says which ranks are where."""
        places: dict[int, list[int]] = {}
        for rank, ticket in enumerate(tickets):
            places.setdefault(ticket, []).append(rank)
        where = "; ".join(f"{ranks_text(ranks)} at {self.label(ticket)}" for ticket, ranks in places.items())
        return RanksDivergedError(
            f"ranks run different operations: {where}",
            "every rank must enter the same modules in the same order; modules that are meant to differ "
            "(a mixture of experts) belong in zrun_runtime.zero.set_z3_leaf_modules",
        )

    def label(self, ticket: int) -> str:
        """What errors call it."""
        return (
            self._labels[ticket]
            if 0 <= ticket < len(self._labels)
            else f"an operation that this rank has not come to ({ticket})"
        )
