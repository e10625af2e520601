"""Master weights: what an optimizer updates, and how it becomes what the model sees.

They are the model's own fp32 (fp64) weights; or a copy, in fp32 of 16-bit ones, where the optimizer's state lives. If
that is on a disk, the parameter that the optimizer knows is one NaN seen through strides of zero.

[Note: edits of offloaded weights]
What scripts write into 16-bit weights reaches the master. Where both are in host memory and somebody may have written
([Note: who may have written]), they are compared when the master is updated, piece by piece. Where the weights are on
another device that would bring them all to the host in every step; there an edit is seen by the parameters' versions,
which every way of writing raises but `p.data`. Weights that come and go are written inside a gathering, which tells.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from zrun_runtime.marks import WriteMark, memory_of
from zrun_runtime.plan import StatePlan, TierKind
from zrun_runtime.tiers.host import Courier, host_empty, is_host

_EXACT = (torch.float32, torch.float64)
_PIECE = 2**18  # elements that are rounded and compared at a time
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_memcmp = ctypes.CDLL(None).memcmp  # five times as fast as torch.equal
_memcmp.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t


class MasterWeights:
    """The master weights of one flat group.

    Attributes:
        owned: (owned_numel,) what this rank has of what the model sees; while that is on a disk, not its values.
        parameter: (owned_numel,) what the optimizer knows.
        apart: they are not `owned` itself, but a finer copy, or one in another tier.
        elsewhere: the values are on a disk.
        behind: edits of `owned` have not reached the values yet.
        compares: edits are seen by comparing, in the pass of an update.
    """

    def __init__(self, owned: Tensor, values: Tensor, plan: StatePlan, comes_and_goes: bool) -> None:
        """values: what `owned` has, wherever it is. comes_and_goes: scripts cannot write into it, but are told on."""
        tier = plan.optimizer.tier
        on_disk = owned.numel() > 0 and owned.stride() == (0,)
        together = is_host(owned.device) if tier is not TierKind.DEVICE else owned.device == values.device
        self.owned, self.behind = owned, False
        self.apart = on_disk or not together or owned.dtype not in _EXACT
        self.elsewhere = self.apart and tier is TierKind.NVME
        self.compares = self.apart and not comes_and_goes and is_host(owned.device)
        self._mark, self._suspect = WriteMark(), False
        dtype = owned.dtype if owned.dtype in _EXACT else torch.float32
        if not self.apart:
            self.parameter = nn.Parameter(owned)
        elif self.elsewhere:
            self.parameter = nn.Parameter(torch.full((), float("nan"), dtype=dtype).expand(owned.shape))
        elif tier is TierKind.DEVICE:
            self.parameter = nn.Parameter(values.to(dtype, copy=True))
        else:
            self.parameter = nn.Parameter(host_empty(values.numel(), dtype, pin=False).copy_(values))

    @property
    def nbytes(self) -> int:
        """Bytes in memory beside what the model sees."""
        return self.parameter.nbytes if self.apart and not self.elsewhere else 0

    def show(self, values: Tensor, start: int) -> None:
        """Put updated values, from element `start` on, into `owned`."""
        if self.apart:
            target = self.owned[start : start + values.numel()]
            if values.device == target.device:
                target.copy_(values)
            else:
                Courier.of(target.device).send(values, target)

    def move(self, owned: Tensor) -> None:
        """What this rank has of what the model sees is here now."""
        self.owned = owned
        if not self.apart:
            self.parameter.data = owned

    def put(self, values: Tensor) -> None:
        """The values, apart from what the model sees, are here now."""
        self.parameter.data = values

    def take_edits(self, owned: Tensor | None = None) -> None:
        """Follow what was edited in `owned`, given if that is on a disk. Values on a disk do when they are fetched."""
        if self.elsewhere:
            self.behind = True
        elif self.apart:
            self._follow(self.parameter.detach(), self.owned if owned is None else owned)

    def inspect(self) -> None:
        """Before values are updated or read: may there be edits that they have to follow?"""
        self._suspect = self.apart and (self.behind or (self.compares and not self._mark.untouched(self.owned)))

    def catch_up(self, values: Tensor, start: int) -> bool:
        """Let inspected values, those from element `start` on, follow edits; were there any?"""
        if not self._suspect:
            return False
        return self._follow(values, self.owned[start : start + values.numel()])

    def mark(self, ours: int, edited: bool) -> None:
        """The model sees the values. ours: how many tensors of ours are in its memory. edited: values had to follow."""
        if self.compares:
            self._mark.begin(self.owned, ours, in_vain=self._suspect and not edited)

    def _follow(self, values: Tensor, owned: Tensor) -> bool:
        """Where `owned` is not `values` rounded, take it; what was not edited keeps its digits. Was anything edited?"""
        owned = owned.to(values.device)
        if is_host(values.device) and _rounds_to(values, owned):
            return False
        values.copy_(torch.where(values.to(owned.dtype) == owned, values, owned.to(values.dtype)))
        return True

    def edit_flag(self) -> Tensor | None:  # () bool, on the device
        """Whether `owned` is other than the values, rounded; None if they are one, or are not on the device."""
        if not self.apart or self.parameter.device != self.owned.device or self.elsewhere:
            return None
        values = self.parameter.detach()
        if is_host(self.owned.device):
            return torch.tensor(not _rounds_to(values, self.owned))
        return (_bits(values.to(self.owned.dtype)) != _bits(self.owned)).any()

    def differ(self) -> bool:
        """`owned` was edited. Where that cannot be seen: perhaps."""
        flag = self.edit_flag()
        return self.apart if flag is None else bool(flag)

    def as_coarse_as_shown(self) -> bool:
        """The values have no digits that `owned` has not. On a disk, and without values, none have before a step."""
        if not self.apart or self.elsewhere or self.owned.is_meta:
            return True
        values = self.parameter.detach()
        return torch.equal(values.to(self.owned.dtype).to(values.dtype), values)


def _rounds_to(values: Tensor, shown: Tensor) -> bool:
    """Values in host memory, rounded, are what is shown, to the bit. In pieces that stay in the cache: three times as
    fast as at once. Nothing was written into tensors without values."""
    if shown.is_meta:
        return True
    rounded = torch.empty(min(_PIECE, shown.numel()), dtype=shown.dtype)
    first = memory_of(shown) + shown.storage_offset() * shown.itemsize
    for start in range(0, shown.numel(), _PIECE):
        part = shown[start : start + _PIECE]
        piece = rounded[: part.numel()].copy_(values[start : start + _PIECE])
        if _memcmp(piece.data_ptr(), first + start * part.itemsize, part.nbytes):
            return False
    return True


def _bits(values: Tensor) -> Tensor:
    return values.view(_INTEGERS[values.dtype.itemsize])
