"""ZeRO's table: for each kind of state, how it is laid out between uses and in which tier it lives.

This is the only home of stage numbers beside `config/`. Nobody else asks for the stage: the collective to run follows
from two adjacent layouts (`collectives.redistribute`), and the rest from the four questions below.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from zrun_runtime.errors import ConfigError
from zrun_runtime.layout import Layout

ALL_STAGES = (0, 1, 2, 3)


class TierKind(Enum):
    """Where a kind of state lives between uses."""

    DEVICE = "device"
    CPU = "cpu"
    NVME = "nvme"

    @classmethod
    def of(cls, device: str) -> TierKind:
        """The tier that a config's `device` names: none, cpu or nvme."""
        return cls.DEVICE if device == "none" else cls(device)


@dataclass(frozen=True)
class Residency:
    """Where one kind of state is between uses."""

    layout: Layout
    tier: TierKind = TierKind.DEVICE


@dataclass(frozen=True)
class StatePlan:
    """The residency of parameters, gradients and optimizer state (master weights and moments).

    Gradients that are whole on every rank are PARTIAL until the accumulation boundary: each rank has its own sum.
    """

    params: Residency
    grads: Residency
    optimizer: Residency

    @classmethod
    def of_stage(
        cls, stage: int, params: TierKind = TierKind.DEVICE, optimizer: TierKind = TierKind.DEVICE
    ) -> StatePlan:
        """The plan of a ZeRO stage (Rajbhandari et al. 2020, arXiv:1910.02054), and of what is offloaded.

        params, optimizer: the tiers of these kinds where they are sharded; what is whole on every rank stays on the
        device. Reduced gradients go where the optimizer works: to the host if its state is not on the device.

        Raises:
            ConfigError: the stage is not 0, 1, 2 or 3.
        """
        if stage not in ALL_STAGES:
            raise ConfigError(f"zero_optimization.stage: got {stage}, expected 0, 1, 2 or 3")
        if stage < 3:
            params = TierKind.DEVICE
        if stage < 1:
            optimizer = TierKind.DEVICE
        return cls(
            params=Residency(Layout.SHARDED if stage >= 3 else Layout.REPLICATED, params),
            grads=Residency(Layout.SHARDED if stage >= 2 else Layout.PARTIAL, _beside(optimizer)),
            optimizer=Residency(Layout.SHARDED if stage >= 1 else Layout.REPLICATED, optimizer),
        )

    def with_tiers(self, params: TierKind, optimizer: TierKind) -> StatePlan:
        """The same layouts in other tiers: one group's part of a split."""
        return replace(
            self,
            params=replace(self.params, tier=params),
            grads=replace(self.grads, tier=_beside(optimizer)),
            optimizer=replace(self.optimizer, tier=optimizer),
        )

    @classmethod
    def least_sharded(cls) -> StatePlan:
        """Everything is whole on every rank: training without ZeRO."""
        return cls.of_stage(min(ALL_STAGES))

    @classmethod
    def most_sharded(cls, params: TierKind = TierKind.DEVICE) -> StatePlan:
        """Everything is sharded between uses."""
        return cls.of_stage(max(ALL_STAGES), params)

    @property
    def shards_params(self) -> bool:
        """Parameters exist in full only while they are used."""
        return self.params.layout is Layout.SHARDED

    @property
    def shards_optimizer(self) -> bool:
        """Every rank updates only its own slice, so the new values must be published."""
        return self.optimizer.layout is Layout.SHARDED

    @property
    def reduces_each_backward(self) -> bool:
        """Gradients do not stay whole between micro-batches."""
        return self.grads.layout is Layout.SHARDED

    @property
    def offloads_optimizer(self) -> bool:
        """The update runs on the host."""
        return self.optimizer.tier is not TierKind.DEVICE


def _beside(optimizer: TierKind) -> TierKind:
    """Where reduced gradients wait for an update of state in this tier."""
    return TierKind.DEVICE if optimizer is TierKind.DEVICE else TierKind.CPU
