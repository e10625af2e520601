"""Master weights: what an optimizer updates, and how it becomes what the model sees.

They are the model's own fp32 (fp64) weights, or a copy in fp32 of 16-bit ones. Where the optimizer's state is on a
disk such a copy is there too; the parameter that the optimizer knows is then one NaN seen through strides of zero.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zrun_runtime.plan import TierKind

_EXACT = (torch.float32, torch.float64)


class MasterWeights:
    """The master weights of one flat group.

    Attributes:
        owned: (owned_numel,) what this rank has of what the model sees.
        parameter: (owned_numel,) what the optimizer knows.
        elsewhere: the values are on a disk.
    """

    def __init__(self, owned: Tensor, tier: TierKind) -> None:
        self.owned = owned
        self.elsewhere = tier is TierKind.NVME and owned.dtype not in _EXACT
        if owned.dtype in _EXACT:
            self.parameter = nn.Parameter(owned)
        elif self.elsewhere:
            self.parameter = nn.Parameter(torch.full((), float("nan")).expand(owned.shape))
        else:
            self.parameter = nn.Parameter(owned.float())

    @property
    def apart(self) -> bool:
        """They are not what the model sees, but a finer copy."""
        return self.parameter.dtype is not self.owned.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in memory beside what the model sees."""
        return self.parameter.nbytes if self.apart and not self.elsewhere else 0

    def show(self, values: Tensor, start: int) -> None:
        """Put updated values, from element `start` on, into `owned`."""
        if self.apart:
            self.owned[start : start + values.numel()].copy_(values)

    def move(self, owned: Tensor) -> None:
        """What this rank has of what the model sees is here now."""
        self.owned = owned
        if not self.apart:
            self.parameter.data = owned

    def take_edits(self) -> None:
        """Follow what was edited in `owned`. Values on a disk do when they are fetched next."""
        if self.apart and not self.elsewhere:
            self.follow(self.parameter.detach(), 0)

    def follow(self, values: Tensor, start: int) -> bool:
        """Let values, those from element `start` on, be what `owned` is; what was not edited keeps its digits.

        Returns whether anything was edited.
        """
        owned = self.owned[start : start + values.numel()]
        rounded = values.to(owned.dtype)
        if torch.equal(rounded.view(torch.int16), owned.view(torch.int16)):
            return False
        values.copy_(torch.where(rounded == owned, values, owned.to(values.dtype)))
        return True

    def edit_flag(self) -> Tensor | None:  # () bool, on the device
        """Whether `owned` is other than the values in memory, rounded; None if they are one, or on a disk."""
        if not self.apart or self.elsewhere:
            return None
        return (self.parameter.detach().to(self.owned.dtype).view(torch.int16) != self.owned.view(torch.int16)).any()

    def differ(self) -> bool:
        """`owned` was edited. Of values on a disk: perhaps."""
        flag = self.edit_flag()
        return self.elsewhere or (flag is not None and bool(flag))

    def as_coarse_as_shown(self) -> bool:
        """The values have no digits that `owned` has not. On a disk, and without values, none have before a step."""
        if not self.apart or self.elsewhere or self.owned.is_meta:
            return True
        values = self.parameter.detach()
        return torch.equal(values.to(self.owned.dtype).to(values.dtype), values)
