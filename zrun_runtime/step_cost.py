"""How long an optimizer step takes at least, by the bytes it moves and the arithmetic it needs. Pure.

[Note: where the time goes]
The three things that move do so at the same time, so the longest decides; an update on the host comes after them.
- Arithmetic: 6 operations a parameter and token (Kaplan et al. 2020, arXiv:2001.08361), 8 where the forward runs again.
- Communication: what a rank sends (memory.sent_bytes). Rings and trees of NCCL cross the link of each machine once, so
  the link carries the bytes of one rank, whatever the number of devices behind it.
- Parameters in another tier: each gather reads this rank's share first.
An update of optimizer state in another tier moves gradients out and weights back (the width of each), then reads and
writes 28 bytes a parameter in host memory (Adam), or 24 on disk; the devices of a machine share both.
These are lower bounds with honest ratios between layouts, not predictions.
"""

from __future__ import annotations

from dataclasses import dataclass

from zrun_runtime.memory import ModelSize, Widths, sent_bytes
from zrun_runtime.plan import StatePlan, TierKind

_HOST_BYTES, _DISK_BYTES = 28, 24  # a parameter and update


@dataclass(frozen=True)
class Machines:
    """What a job runs on. Bytes, and bytes a second; `flops` a second is what one device reaches, not its peak."""

    nodes: int
    devices: int  # of one node
    device_memory: int
    host_memory: int  # of one node
    network: float  # of the narrowest link: between nodes, else between the devices of one
    flops: float = 150e12
    bus: float = 25e9  # between host and one device, each way
    host_bandwidth: float = 100e9  # of a node's memory
    disk_bandwidth: float = 5e9  # of a node's disks

    @property
    def world(self) -> int:
        return self.nodes * self.devices


@dataclass(frozen=True)
class Work:
    """One optimizer step of one rank."""

    tokens: int  # of a micro-batch
    accumulation: int = 1

    def arithmetic(self, model: ModelSize, checkpointed: bool) -> float:
        """Operations of a step."""
        return (8.0 if checkpointed else 6.0) * model.numel * self.tokens * self.accumulation


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step, by what takes them."""

    arithmetic: float
    network: float
    params: float
    update: float

    @property
    def seconds(self) -> float:
        """See [Note: where the time goes]."""
        return max(self.arithmetic, self.network, self.params) + self.update


def step_cost(
    model: ModelSize, widths: Widths, plan: StatePlan, machines: Machines, work: Work, checkpointed: bool
) -> StepCost:
    """The cost of a step under a plan."""
    sent = sum(sent_bytes(model, widths, plan, machines.world, work.accumulation))
    share = model.numel / machines.world
    read = 2 * work.accumulation * widths.weight * share if plan.params.tier is not TierKind.DEVICE else 0.0
    params = read / machines.bus
    if plan.params.tier is TierKind.NVME:
        params = max(params, read * machines.devices / machines.disk_bandwidth)
    return StepCost(
        arithmetic=work.arithmetic(model, checkpointed) / machines.flops,
        network=sent / machines.network,
        params=params,
        update=_update(model, widths, plan, machines),
    )


def _update(model: ModelSize, widths: Widths, plan: StatePlan, machines: Machines) -> float:
    if plan.optimizer.tier is TierKind.DEVICE:
        return 0.0
    owned = model.trained / machines.world
    moved = (widths.grad + widths.weight) * owned / machines.bus
    computed = _HOST_BYTES * owned * machines.devices / machines.host_bandwidth
    if plan.optimizer.tier is TierKind.NVME:
        computed = max(computed, _DISK_BYTES * owned * machines.devices / machines.disk_bandwidth)
    return moved + computed


def enough_network(
    model: ModelSize, widths: Widths, plan: StatePlan, machines: Machines, work: Work, checkpointed: bool
) -> float:
    """Bytes a second of the network below which communication takes longer than the arithmetic it hides behind."""
    sent = sum(sent_bytes(model, widths, plan, machines.world, work.accumulation))
    return sent / (work.arithmetic(model, checkpointed) / machines.flops)
