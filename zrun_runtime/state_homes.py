"""Where the optimizer's state of each flat group lives, to be updated tile by tile, to be read and to be set.

[Note: state comes with the first step]
Optimizers make their state when they first step. So before that a store is empty: the master weights are what the model
sees, and the optimizer fills in the rest. A file's space is reserved before training all the same: what tensors there
will be is found by letting a copy of the optimizer step on a small parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zrun_runtime.errors import EngineError
from zrun_runtime.flat_group import FlatGroup
from zrun_runtime.group_state import GroupState, is_sized
from zrun_runtime.master import MasterWeights
from zrun_runtime.memory import NVME_TILE, STRIP
from zrun_runtime.optimizers import Lamb, state_fields
from zrun_runtime.plan import TierKind
from zrun_runtime.tiers import FileStore, MemoryStore, NvmeTier, OffloadSettings, Slot, Store, Values, slots_of, stream

MASTER = "master weights"  # among the tensors of a store; no optimizer has state of such a name


class StateHomes:
    """See [Note: state comes with the first step]."""

    def __init__(self, optimizer: torch.optim.Optimizer, offload: OffloadSettings | None) -> None:
        """
        Raises:
            OffloadError: the disk cannot be used.
        """
        self.optimizer, self.offload = optimizer, offload
        self.stores: dict[FlatGroup, Store] = {}
        self.nvme = NvmeTier(offload.disk, offload.buffer_count) if offload is not None and offload.disk else None
        self.ahead = self.nvme.buffers.ahead if self.nvme is not None else 0

    def build(self, groups: Iterable[FlatGroup]) -> None:
        """Homes for these groups alone: new, empty ones for those that have none yet.

        Raises:
            OffloadError: the disk is full.
        """
        before, wanted = self.stores, list(groups)
        for group, store in before.items():
            if group not in wanted and isinstance(store, FileStore):
                store.delete()
        self.stores = {group: before[group] if group in before else self._store(group) for group in wanted}

    def _store(self, group: FlatGroup) -> Store:
        master = master_of(group)
        if self.nvme is None or group.plan.optimizer.tier is not TierKind.NVME:
            return MemoryStore(master.numel(), lambda: self.optimizer.state[master], master.device)
        fields = {MASTER: master.dtype} if weights_of(group).elsewhere else {}
        fields.update(state_fields(self.optimizer, number_of(group), master.dtype))
        return self.nvme.store("optimizer", (master.numel(), self._tile(group)), fields)

    def slots(self, group: FlatGroup) -> list[Slot]:
        """The group's tiles."""
        return slots_of(self.stores[group], self._tile(group))

    def _tile(self, group: FlatGroup) -> int:
        """Elements that are fetched at once; in memory a fetch is a view, and may be of all."""
        return self._piece(group, NVME_TILE if group.plan.optimizer.tier is TierKind.NVME else None)

    def strip(self, group: FlatGroup) -> int:
        """Elements that are updated at once."""
        return self._piece(group, STRIP if group.plan.offloads_optimizer else None)

    def _piece(self, group: FlatGroup, most: int | None) -> int:
        numel = master_of(group).numel()
        if self.offload is None or most is None or isinstance(self.optimizer, Lamb):
            return numel  # LAMB takes norms over whole parameters
        return min(numel, self.offload.tile_numel, most)

    def master_tile(self, group: FlatGroup, slot: Slot, values: Values) -> Tensor:
        """(slot.numel,) master weights of a slot that was fetched, to be updated in place."""
        weights = weights_of(group)
        if not weights.elsewhere:
            return weights.parameter.detach()[slot.start : slot.stop]
        known = values.get(MASTER)
        if known is None:  # never updated: what the model sees is all there is
            values[MASTER] = known = slot.store.room(slot, MASTER, weights.parameter.dtype)
            known.copy_(weights.owned[slot.start : slot.stop])
        return known

    def updates_all(self, group: FlatGroup) -> bool:
        """An update needs nothing of what the model sees: the master weights have it all."""
        weights, store = weights_of(group), self.stores[group]
        first = weights.elsewhere and isinstance(store, FileStore) and MASTER not in store.known
        return weights.apart and not weights.behind and not first

    def finish(self) -> None:
        """Wait for what is being written.

        Raises:
            OffloadError: it could not be.
        """
        for store in self.stores.values():
            store.finish()

    @property
    def begun(self) -> bool:
        """A step was made, or state was given."""
        written = any(store.known for store in self.stores.values() if isinstance(store, FileStore))
        return written or any(self.optimizer.state.values())

    # ---- to read and to set

    def scalars(self, group: FlatGroup) -> dict[str, Any]:
        """What the group has one of."""
        entries, numel = self.optimizer.state.get(master_of(group), {}), master_of(group).numel()
        return {key: value for key, value in entries.items() if not is_sized(value, numel)}

    def read(self, group: FlatGroup) -> GroupState:
        """All of a group's state, master weights with the edits of what the model sees.

        Of a group on a disk: copies, of one group's size.
        """
        master, store = master_of(group), self.stores[group]
        entries = self.optimizer.state.get(master, {})
        moments = {key: value for key, value in entries.items() if is_sized(value, master.numel())}
        weights_of(group).inspect()
        with shown(group, changed=False):
            if not weights_of(group).elsewhere:
                weights_of(group).catch_up(master.detach(), 0)
            for slot, values in stream(self.slots(group), self.ahead, changed=False):
                if isinstance(store, FileStore):
                    self._copy_out(group, slot, values, moments)
        store.finish()
        return GroupState(moments.pop(MASTER, master.detach()), moments, self.scalars(group))

    def _copy_out(self, group: FlatGroup, slot: Slot, values: Values, found: dict[str, Tensor]) -> None:
        if weights_of(group).elsewhere:
            values[MASTER] = self.master_tile(group, slot, values)
            weights_of(group).catch_up(values[MASTER], slot.start)
        for name, value in values.items():
            if name not in found:
                found[name] = torch.empty(slot.store.numel, dtype=value.dtype)
            found[name][slot.start : slot.stop] = value

    def dtypes(self, group: FlatGroup) -> dict[str, torch.dtype]:
        """The dtypes of the group's moments, without their values."""
        master, store = master_of(group), self.stores[group]
        if isinstance(store, FileStore):
            return {name: store.fields[name] for name in sorted(store.known) if name != MASTER}
        entries = self.optimizer.state.get(master, {})
        return {key: value.dtype for key, value in sorted(entries.items()) if is_sized(value, master.numel())}

    def write(self, group: FlatGroup, state: GroupState) -> None:
        """Have this state from now on, and show the master weights."""
        master, weights, store = master_of(group), weights_of(group), self.stores[group]
        if state.master is None:
            raise EngineError(f"{group.spec.label}: no master weights were given")
        with shown(group, changed=True, fresh=True):
            weights.show(state.master, 0)
        weights.behind = False
        if not weights.elsewhere and state.master.data_ptr() != master.data_ptr():
            master.detach().copy_(state.master)
        self.optimizer.state[master] = scalars = self._counted(group, state.scalars)
        if not isinstance(store, FileStore):
            scalars.update(state.moments)
            return
        given = {**({MASTER: state.master} if weights.elsewhere else {}), **state.moments}
        for slot, values in stream(self.slots(group), self.ahead):
            for name in set(values) - set(given):
                store.forget(slot, name)
            for name, value in given.items():
                store.room(slot, name, value.dtype).copy_(value[slot.start : slot.stop])
        store.finish()

    def _counted(self, group: FlatGroup, scalars: dict[str, Any]) -> dict[str, Any]:
        """Scalars as the kernel wants them: a fused one counts steps where the weights are, others on the CPU."""
        found = dict(scalars)
        if self.optimizer.param_groups[number_of(group)].get("fused") and isinstance(found.get("step"), Tensor):
            found["step"] = found["step"].to(master_of(group).device)
        return found

    def change(self, group: FlatGroup, kind: str, values: Tensor) -> None:
        """Keep one tensor of what `read` gave and the caller changed: master weights (which are shown), or a moment."""
        store = self.stores[group]
        if kind == MASTER:
            with shown(group, changed=True, fresh=True):
                weights_of(group).show(values, 0)
        if isinstance(store, FileStore) and kind in store.fields:
            for slot, _ in stream(self.slots(group), self.ahead):
                store.room(slot, kind, values.dtype).copy_(values[slot.start : slot.stop])
            store.finish()

    def close(self) -> None:
        """Remove what is on the disk."""
        if self.nvme is not None:
            self.nvme.close()


@contextmanager
def shown(group: FlatGroup, changed: bool, fresh: bool = False) -> Iterator[None]:
    """Inside, what the model sees of a group is in memory (or on the device), even if it lives on a disk.

    changed: it is kept afterwards. fresh: all of it will be written, so its old values are not wanted.
    """
    weights, owned = weights_of(group), group.owned
    with group.home.opened(changed, fresh) as values:
        weights.owned = values if owned is group.shard else owned
        try:
            yield
        finally:
            weights.owned = owned


def weights_of(group: FlatGroup) -> MasterWeights:
    """The group's master weights."""
    if group.weights is None:
        raise EngineError(f"{group.spec.label}: no optimizer updates it")
    return group.weights


def master_of(group: FlatGroup) -> nn.Parameter:
    """What the optimizer knows of the group."""
    return weights_of(group).parameter


def number_of(group: FlatGroup) -> int:
    """Its optimizer group."""
    if group.spec.optimizer_group is None:
        raise EngineError(f"{group.spec.label}: no optimizer updates it")
    return group.spec.optimizer_group
