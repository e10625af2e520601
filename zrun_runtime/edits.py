"""What scripts write into weights between steps, taken over and told once; see [Note: what others write]."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from zrun_runtime.flat_group import FlatGroup
from zrun_runtime.telemetry import notice


class Edits:
    """Of one model."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._told: set[str] = set()

    def take_back(self, groups: Iterable[FlatGroup]) -> None:
        """Parameters that were given other memory get their place again, with the values they have now.

        Raises:
            ParameterError: one has another shape, dtype or device now.
        """
        for group in groups:
            if group.take_back():
                text = "was given other memory (p.data = , .to(), ...): its values were taken, its layout stays"
                self._tell(f"a parameter of {group.spec.label} {text}")

    def flags(self, groups: Iterable[FlatGroup]) -> dict[FlatGroup, Tensor]:  # () bool, on the device
        """Whether this rank's part of the weights is other than the master weights rounded. Not of those that are one,
        nor of those that are compared piece by piece when they are updated ([Note: edits of offloaded weights])."""
        found = {}
        for group in groups:
            weights = group.weights
            if weights is None or group.comes_and_goes or weights.compares:
                continue
            flag = weights.edit_flag() if not group.plan.offloads_optimizer else torch.tensor(group.touched())
            if flag is not None:
                found[group] = flag
        return found

    def take(self, edited: Sequence[FlatGroup]) -> None:
        """Edits of 16-bit weights would be undone when the master weights are published next."""
        for group in edited:
            group.store()
        self.tell(edited)

    def tell(self, edited: Sequence[FlatGroup]) -> None:
        """The master weights of these groups took what was written into the weights."""
        for group in edited:
            text = "the master weights follow such edits"
            self._tell(f"weights were changed between two steps ({group.spec.label}); {text}")

    def _tell(self, text: str) -> None:
        kind = text.split()[0]
        if self._rank == 0 and kind not in self._told:
            self._told.add(kind)
            notice("info", text)
