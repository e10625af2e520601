"""Every layout of a model on given machines: what it takes, whether it fits, how fast it can be, and which to choose.

Pure. What is compared is what a config can ask for: a stage, and the tiers of optimizer state and parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zrun_runtime.memory import KEEP, Footprint, Keep, ModelSize, TierSettings, Widths, footprint, sent_bytes
from zrun_runtime.plan import ALL_STAGES, StatePlan, TierKind
from zrun_runtime.savings import in_words
from zrun_runtime.step_cost import Machines, StepCost, Work, enough_network, step_cost

USABLE_DEVICE, USABLE_HOST = 0.92, 0.90  # of memory: the rest is the driver's, the allocator's, the program's
_DEVICE, _CPU, _NVME = TierKind.DEVICE, TierKind.CPU, TierKind.NVME
_MOST_NODES = 1024


@dataclass(frozen=True)
class Choice:
    """What a config asks for."""

    stage: int
    optimizer: TierKind = _DEVICE
    params: TierKind = _DEVICE

    @property
    def name(self) -> str:
        """In words, for a table."""
        if self.optimizer is self.params is not _DEVICE:
            return f"ZeRO {self.stage}, all on {self.optimizer.value}"
        away = [(self.optimizer, "optimizer"), (self.params, "parameters")]
        return ", ".join([f"ZeRO {self.stage}", *(f"{w} on {t.value}" for t, w in away if t is not _DEVICE)])

    @property
    def places(self) -> tuple[str, str, str]:
        """The stage, where optimizer state is, where parameters are; in words."""
        return str(self.stage), self.optimizer.value, self.params.value

    def plan(self) -> StatePlan:
        """The residency of every kind of state."""
        return StatePlan.of_stage(self.stage, self.params, self.optimizer)

    def section(self, nvme_path: str) -> dict[str, Any]:
        """The config's section zero_optimization."""
        found: dict[str, Any] = {"stage": self.stage}
        for key, tier in (("offload_optimizer", self.optimizer), ("offload_param", self.params)):
            if tier is not _DEVICE:
                found[key] = {"device": tier.value, **({"nvme_path": nvme_path} if tier is _NVME else {})}
        return found


CHOICES = (
    *(Choice(stage) for stage in ALL_STAGES),
    *(Choice(stage, tier) for tier in (_CPU, _NVME) for stage in ALL_STAGES[1:]),
    *(Choice(ALL_STAGES[-1], optimizer, params) for optimizer, params in ((_CPU, _CPU), (_NVME, _CPU), (_NVME, _NVME))),
)


@dataclass(frozen=True)
class Question:
    """What is to be trained, and how.

    activations: bytes of a micro-batch, without and with activation checkpointing.
    """

    model: ModelSize
    widths: Widths
    machines: Machines
    work: Work
    activations: tuple[int, int]
    keep: Keep = KEEP
    tiers: TierSettings = field(default_factory=TierSettings)


@dataclass(frozen=True)
class Offer:
    """A choice and what it comes to. Bytes; of one device or one node."""

    choice: Choice
    held: Footprint
    plain: int  # of device memory at the peak of a step
    checkpointed: int  # the same with activation checkpointing
    host: int
    disk: int
    sent: int  # by a rank in an optimizer step
    lacking: str  # what does not fit, in words; empty if it does, if need be with checkpointing
    needs_checkpointing: bool
    cost: StepCost  # with checkpointing where that is needed

    @property
    def fits(self) -> bool:
        return not self.lacking


def offers(question: Question) -> list[Offer]:
    """All choices, in the order of CHOICES."""
    return [_offer(question, choice) for choice in CHOICES]


def _offer(question: Question, choice: Choice) -> Offer:
    machines, plan = question.machines, choice.plan()
    held = footprint(
        question.model, question.widths, plan, machines.world, question.keep, question.tiers
    )  # fmt: skip
    plain, checkpointed = (held.device.peak + kept for kept in question.activations)
    host, disk = held.host.peak * machines.devices, held.disk.peak * machines.devices
    device_limit, host_limit = USABLE_DEVICE * machines.device_memory, USABLE_HOST * machines.host_memory
    lacking = []
    if min(plain, checkpointed) > device_limit:
        lacking.append(f"{in_words(min(plain, checkpointed) - device_limit)} of device memory")
    if host > host_limit:
        lacking.append(f"{in_words(host - host_limit)} of host memory")
    tight = plain > device_limit
    return Offer(
        choice=choice,
        held=held,
        plain=plain,
        checkpointed=checkpointed,
        host=host,
        disk=disk,
        sent=sum(
            sent_bytes(question.model, question.widths, plan, machines.world, question.work.accumulation, question.keep)
        ),
        lacking=" and ".join(lacking),
        needs_checkpointing=tight,
        cost=step_cost(question.model, question.widths, plan, machines, question.work, tight),
    )


def fastest(found: Sequence[Offer]) -> Offer | None:
    """The one to choose of those that fit: the least time; at equal times, what sends less; then the simplest."""
    fitting = [offer for offer in found if offer.fits]
    return min(fitting, key=lambda offer: (round(offer.cost.seconds, 3), offer.sent), default=None)


def nodes_needed(question: Question) -> int | None:
    """The least number of such nodes, in powers of two, on which something fits."""
    nodes = 1
    while nodes <= _MOST_NODES:
        more = replace(question, machines=replace(question.machines, nodes=nodes))
        if fastest(offers(more)) is not None:
            return nodes
        nodes *= 2
    return None


def networks_wanted(question: Question) -> dict[int, float]:
    """By stage: bytes a second of network below which its communication outlasts the arithmetic it hides behind."""
    return {
        stage: enough_network(
            question.model, question.widths, StatePlan.of_stage(stage), question.machines, question.work, False
        )
        for stage in ALL_STAGES
    }
