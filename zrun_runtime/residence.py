"""What a group is made of, where its full values are, and what becomes of what scripts write into them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from zrun_runtime.errors import ParameterError
from zrun_runtime.marks import memory_of


class Residence(Enum):
    """What a group is made of, where its full values are, and what memory that costs on this rank."""

    SHARDED = "sharded"  # the shard alone
    GATHERING = "gathering"  # the shard, and a full buffer that is being filled
    UNSHARDED = "unsharded"  # the shard and the full buffer; parameters can be read


@dataclass(frozen=True)
class GroupSpec:
    """Which parameters make a group: one dtype, one device, one requires_grad, one optimizer group."""

    label: str
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    optimizer_group: int | None  # None: no optimizer updates them
    keep_full: bool = False  # too small to be worth gathering: full between uses, whatever the plan says


class ScriptsWrite:
    """The part of a flat group that looks after what others write; see [Note: what others write] in edits.py."""

    spec: GroupSpec
    comes_and_goes: bool
    residence: Residence
    full: Tensor
    views: list[Tensor]
    _places: list[tuple[int, int, tuple[int, ...]]]
    _versions: list[int]

    @property
    def holders(self) -> int:
        """How many tensors of ours are in the memory of the values: the buffer, our slice, parameters and views."""
        return 2 + 2 * len(self.views)

    def touched(self) -> bool:
        """A parameter was written into since its values were shown last; not seen: writing into `p.data`."""
        return [p._version for p in self.spec.parameters] != self._versions

    def edited(self) -> bool:
        """This rank's part of the values was changed."""
        raise NotImplementedError

    def _renew_storage(self, keep_values: bool = False) -> None:
        raise NotImplementedError

    def _in_place(self) -> bool:
        """Every parameter is where its view is. (Cheaper than `is_set_to`.)"""
        base = memory_of(self.full)
        return [(memory_of(p) - base, p.storage_offset(), p.stride()) for p in self.spec.parameters] == self._places

    def take_back(self) -> bool:
        """Put parameters that were given other memory back into their place, with their values; were there any?

        Raises:
            ParameterError: one has another shape, dtype or device now.
        """
        if self.residence is not Residence.UNSHARDED or self._in_place():
            return False
        moved = {}
        for index, (parameter, view) in enumerate(zip(self.spec.parameters, self.views, strict=True)):
            if not parameter.is_set_to(view):
                self._refuse_misfit(index)
                moved[index] = parameter.detach()
        self._renew_storage(keep_values=True)
        for index, values in moved.items():
            self.views[index].copy_(values)
        for parameter, view in zip(self.spec.parameters, self.views, strict=True):
            parameter.data = view
        return True

    def _refuse_misfit(self, index: int) -> None:
        name, parameter, view = self.spec.names[index], self.spec.parameters[index], self.views[index]
        for what, was, now in (
            ("shape", tuple(view.shape), tuple(parameter.shape)),
            ("dtype", view.dtype, parameter.dtype),
            ("device", view.device, parameter.device),
        ):
            if was != now:
                raise ParameterError(
                    f"{name}: its {what} became {now} after initialize, which laid it out as {was}",
                    "change it before initialize; what it computes in is the config's choice (bf16, fp16)",
                )

    def disturbed(self) -> str | None:
        """The name of a parameter that was written since the values came, where a change is about to be lost.

        Every rank finds the same: what is in its own slice does not matter.
        """
        if not self.comes_and_goes or self.residence is not Residence.UNSHARDED:
            return None
        if self._in_place() and not self.touched():
            return None
        for name, parameter, view in zip(self.spec.names, self.spec.parameters, self.views, strict=True):
            if parameter.data_ptr() != view.data_ptr() and not torch.equal(parameter, view):
                return name
        changed = [p._version != version for p, version in zip(self.spec.parameters, self._versions, strict=True)]
        return self.spec.names[changed.index(True)] if any(changed) else None
