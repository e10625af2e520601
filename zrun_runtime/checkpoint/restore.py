"""From a checkpoint into an engine: parameter by parameter, by name and flat range, whatever groups either side has."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zrun_runtime.checkpoint.codec import decode
from zrun_runtime.checkpoint.contents import (
    HOW_IT_COMPUTES,
    Trainer,
    aliases_of,
    canonical,
    extra_state_modules,
    optimizer_of,
    own_slice,
    persistent_buffers,
)
from zrun_runtime.checkpoint.errors import CheckpointError
from zrun_runtime.checkpoint.layout import WEIGHTS, Held, Index, Run
from zrun_runtime.checkpoint.manifest import DTYPES, StoredGroup, StoredTensor
from zrun_runtime.checkpoint.reader import CheckpointReader
from zrun_runtime.flat_group import FlatGroup
from zrun_runtime.optim import GroupState
from zrun_runtime.ownership import home_of
from zrun_runtime.telemetry import notice

_SAME_STATE = frozenset({"Adam", "AdamW"})  # classes whose state means the same


@dataclass(frozen=True)
class Wanted:
    """What of a checkpoint is loaded; see Engine.load_checkpoint."""

    strict: bool = True
    optimizer: bool = True
    scheduler: bool = True
    only_module: bool = False

    @property
    def moments(self) -> bool:
        """The optimizer's state, beside the weights."""
        return self.optimizer and not self.only_module


class Restorer:
    """Puts one checkpoint into one trainer. `check` before anything is changed, then `read`, then `finish`."""

    def __init__(self, trainer: Trainer, reader: CheckpointReader, wanted: Wanted) -> None:
        self.trainer, self.reader, self.wanted = trainer, reader, wanted
        self.index, self.manifest = reader.index, reader.manifest
        self.world = trainer.collectives.world
        self.state = self.manifest.state
        self._decoded: dict[str, Any] = {}  # what is plain data

    @property
    def same_world(self) -> bool:
        """There are as many ranks as there were, so each takes what was its own."""
        return self.manifest.world_size == self.world.size

    # ---- does it fit?

    def check(self) -> None:
        """Find what does not fit, before anything is changed.

        Raises:
            CheckpointError: names, shapes, or the kind of optimizer differ.
        """
        self._check_names()
        for name, parameter in self.trainer.module.named_parameters():
            if home_of(parameter) not in (None, self.trainer.zero) and hasattr(parameter, "ds_id"):
                raise CheckpointError(
                    f"load_checkpoint: another engine has {name} sharded",
                    "load with that engine, whose weights this one shares; or build the model anew",
                )
        self._check_schedule()
        self._decode()
        optimizer = optimizer_of(self.trainer)
        fresh = [
            name
            for flat in self.trainer.zero.groups
            for name in map(canonical, flat.spec.names)
            if flat.master is not None and (held := self.index.find(name)) is not None and not held.trained
        ]
        if fresh and self.wanted.moments:
            self._say(f"were not trained when it was saved, so their optimizer state begins at zero: {_some(fresh)}")
        saved = self.state.get("optimizer")
        if self.wanted.moments and optimizer is not None and saved is not None:
            now = type(optimizer).__name__
            if now != saved and not {now, saved} <= _SAME_STATE and any(h.moments for h in self.index.held.values()):
                raise CheckpointError(
                    f"{self.reader.where}: the optimizer's state is that of {saved}, and this engine trains with {now}",
                    "train with the same optimizer, or pass load_optimizer_states=False",
                )

    def _check_schedule(self) -> None:
        scheduler, saved = self.trainer.lr_scheduler, self.state.get("scheduler")
        wanted = self.wanted.scheduler and not self.wanted.only_module and hasattr(scheduler, "load_state_dict")
        if wanted and self.state.get("scheduler_state") is not None and saved not in (None, type(scheduler).__name__):
            raise CheckpointError(
                f"{self.reader.where}: the schedule was a {saved}, and this engine has a {type(scheduler).__name__}",
                "use the same schedule, or pass load_lr_scheduler_states=False",
            )

    def _decode(self) -> None:
        """Read what is plain data, so that nothing in it is found out half-way."""
        own = self._own_state()
        found = {key: own.get(key) for key in ("client_state", "extra_state", "random")}
        found |= {key: self.state.get(key) for key in ("param_groups", "scheduler_state")}
        try:
            self._decoded = {key: decode(value, self._fetch) for key, value in found.items()}
        except CheckpointError as error:
            raise CheckpointError(f"{self.reader.where}: {error.message}", error.hint) from error

    def _check_names(self) -> None:
        shapes = {canonical(n): tuple(p.shape) for n, p in self.trainer.module.named_parameters()}
        aliases, stored = aliases_of(self.trainer.module), self.manifest
        buffers = {canonical(name): tuple(b.shape) for name, b in persistent_buffers(self.trainer.module)}
        kept = {t.name: t.shape for t in stored.tensors if t.what == "buffer"}
        known = {*self.index.held, *stored.aliases, *stored.left_out}
        found = {
            "not in the checkpoint": [n for n in shapes if n not in known] + [n for n in buffers if n not in kept],
            "not in the model": [n for n in known if n not in shapes and n not in aliases]
            + [n for n in kept if n not in buffers],
        }
        wrong = [n for n, s in shapes.items() if (h := self.index.find(n)) is not None and h.shape != s]
        wrong += [n for n, s in buffers.items() if n in kept and kept[n] != s]
        text = "; ".join(f"{what}: {_some(names)}" for what, names in found.items() if names)
        if text and not wrong and not self.wanted.strict:
            self._say(f"load_module_strict is off, so these stay as they are: {text}")
        elif text or wrong:
            text = "; ".join(filter(None, (f"of another shape: {_some(wrong)}" if wrong else "", text)))
            hint = "load into the same model" + ("" if wrong else ", or pass load_module_strict=False")
            raise CheckpointError(f"{self.reader.where}: does not fit the model: {text}", hint)

    # ---- weights and optimizer state

    def read(self) -> None:
        """Read this rank's share into place. No collective but those of a regrouping.

        Raises:
            CheckpointError: a file cannot be read.
        """
        zero = self.trainer.zero
        zero.end_step()
        self.trainer.window.move_on(updated=True)
        if self.manifest.gradient_order and zero.gradient_order is None:
            names = {canonical(name): name for name in zero.managed}
            zero.follow_order([names[name] for name in self.manifest.gradient_order if name in names])
        for flat in zero.groups:
            self._read_group(flat)
        grouped = {id(p) for flat in zero.groups for p in flat.spec.parameters}
        with torch.no_grad():
            for name, parameter in self.trainer.module.named_parameters():
                held = self.index.find(canonical(name))
                if id(parameter) not in grouped and held is not None:
                    self._read_whole_into(parameter.detach(), held)
            for name, buffer in persistent_buffers(self.trainer.module):
                stored = self._own("buffer", canonical(name))
                if stored is not None:
                    buffer.copy_(self.reader.tensor(stored))

    def _read_group(self, flat: FlatGroup) -> None:
        updater = self.trainer.updater
        rank = self.world.rank
        if updater is None or flat.master is None:
            self._fill(flat.shard, flat, WEIGHTS)
            return
        state = updater.read_state(flat)
        if state.master is None:
            raise CheckpointError(f"{flat.spec.label}: it has no master weights")
        self._fill(own_slice(state.master, flat, rank), flat, WEIGHTS)
        moments, scalars = state.moments, state.scalars
        if self.wanted.moments:
            sources = [h for h in (self.index.find(canonical(n)) for n in flat.spec.names) if h is not None and h.group]
            kinds = {kind: h for h in sources for kind in h.moments}
            moments = {}
            for kind, held in kinds.items():
                dtype = DTYPES[held.group.kinds[kind]] if held.group is not None else state.master.dtype
                moments[kind] = state.moments.get(kind, torch.empty(0))
                if moments[kind].numel() != state.master.numel():
                    moments[kind] = torch.zeros_like(state.master, dtype=dtype)
                else:
                    moments[kind].zero_()
                self._fill(own_slice(moments[kind], flat, rank), flat, kind)
            scalars = self._scalars(flat, [h.group for h in sources if h.group is not None and h.trained])
        updater.write_state(flat, GroupState(state.master, moments, scalars))

    def _scalars(self, flat: FlatGroup, groups: Sequence[StoredGroup]) -> dict[str, Any]:
        found = {repr(group.scalars): group.scalars for group in groups}
        if len(found) > 1:
            raise CheckpointError(
                f"{flat.spec.label}: its parameters were trained for different numbers of steps: {', '.join(found)}",
                "give them optimizer groups of their own, or pass load_optimizer_states=False",
            )
        scalars = next(iter(found.values()), None)
        return dict(decode(scalars, self._no_tensor)) if scalars else {}

    def _no_tensor(self, name: str) -> Tensor:
        raise CheckpointError(f"{self.reader.where}: optimizer state {name} cannot be read")

    def _fill(self, target: Tensor, flat: FlatGroup, kind: str) -> None:
        """Read this rank's slice of a kind of state. target: (shard_numel,)."""
        runs: list[Run] = []
        for part in flat.layout.fragments(self.world.rank):
            held = self.index.find(canonical(flat.spec.names[part.index]))
            if held is None or (kind != WEIGHTS and kind not in held.moments):
                continue
            view = flat.views[part.index]
            last = part.param_offset + part.numel
            if order_of(view.shape, view.stride()) == order_of(held.shape, held.strides):
                runs += self.index.runs(held, kind, part.param_offset, last, part.shard_offset)
            else:
                whole = torch.empty_strided(view.shape, view.stride(), dtype=target.dtype)
                whole.copy_(read_whole(self.reader, held, kind))
                flat_values = whole.as_strided((whole.numel(),), (1,))
                target[part.shard_offset :][: part.numel].copy_(flat_values[part.param_offset : last])
        self.reader.fill(target, runs)

    def _read_whole_into(self, target: Tensor, held: Held) -> None:
        if target.is_contiguous() and held.strides is None and target.numel():
            self.reader.fill(target.view(-1), self.index.runs(held, WEIGHTS, 0, target.numel(), 0))
        else:
            target.copy_(read_whole(self.reader, held))

    def _own(self, what: str, name: str) -> StoredTensor | None:
        """What was this rank's own; where it had the same as its leader, or ranks are others now, the leader's."""
        rank = self.world.rank if self.same_world else 0
        return own_tensors(self.index, rank).get((what, name))

    # ---- the rest

    def share(self) -> None:
        """Show the model what was read. A collective."""
        rank, collectives = self.world.rank, self.trainer.collectives
        for flat in self.trainer.zero.groups:
            updater = self.trainer.updater
            if updater is not None and flat.master is not None and flat.owned is flat.full and self.world.size > 1:
                state = updater.read_state(flat)
                whole = [t for t in (state.master, *state.moments.values()) if t is not None]
                for tensor in whole if self.wanted.moments else whole[:1]:
                    collectives.all_gather(tensor, own_slice(tensor, flat, rank), flat.ticket).wait()
                updater.write_state(flat, state)
            flat.publish().wait()

    def finish(self) -> Any:
        """Counters, schedule, loss scale, random states; returns the client state."""
        trainer, state = self.trainer, self.state
        for name, part in extra_state_modules(trainer.module):
            if name in (self._decoded["extra_state"] or {}):
                part.set_extra_state(self._decoded["extra_state"][name])
        client_state = self._decoded["client_state"]
        if self.wanted.only_module:
            return client_state
        trainer.global_steps, trainer.micro_steps = state["global_steps"], state["micro_steps"]
        trainer.skipped_steps, trainer.progress.samples = state["skipped_steps"], state["global_samples"]
        scaler, saved = trainer.scaler, state["loss_scaler"]
        if scaler is not None and saved is not None and not scaler.settings.static:
            trainer.scaler = scaler.restored(saved)
        if self.wanted.optimizer:
            self._restore_options()
        if self.wanted.scheduler:
            self._restore_scheduler()
        if self.same_world and self._decoded["random"] is not None:
            _set_random_states(self._decoded["random"], self.world.device)
        for loader, position in zip(trainer.loaders, state["loaders"], strict=False):
            loader.load_state_dict(position)
        return client_state

    def _own_state(self) -> dict[str, Any]:
        own = self.manifest.own
        mine = own[self.world.rank] if self.same_world and own else None
        found = mine if mine is not None else (own[0] if own else {})
        return found if isinstance(found, dict) else {}

    def _fetch(self, name: str) -> Tensor:
        stored = self._own("data", name)
        if stored is None:
            raise CheckpointError(f"{self.reader.where}: {name} is not there", "the checkpoint is damaged")
        return self.reader.tensor(stored)

    def _restore_options(self) -> None:
        optimizer = optimizer_of(self.trainer)
        saved = self._decoded["param_groups"]
        if optimizer is None or not saved:
            return
        if len(saved) != len(optimizer.param_groups):
            self._say(
                f"{len(saved)} optimizer groups were saved, here are {len(optimizer.param_groups)}: their options stay"
            )
            return
        numbers = {p.name: group.optimizer_group for group in self.manifest.groups for p in group.parameters}
        moved = [
            name
            for flat in self.trainer.zero.groups
            for name in map(canonical, flat.spec.names)
            if None not in (flat.spec.optimizer_group, numbers.get(name)) and numbers[name] != flat.spec.optimizer_group
        ]
        if moved:
            self._say(f"were in another optimizer group, whose options go by number: {_some(moved)}")
        for group, options in zip(optimizer.param_groups, saved, strict=True):
            for key, value in options.items():
                if key in HOW_IT_COMPUTES:
                    continue
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value

    def _restore_scheduler(self) -> None:
        scheduler, saved = self.trainer.lr_scheduler, self._decoded["scheduler_state"]
        if not hasattr(scheduler, "load_state_dict"):
            return
        if saved is None:
            self._say("no learning rate schedule was saved: this engine's begins anew")
            return
        scheduler.load_state_dict(saved)

    def _say(self, text: str) -> None:
        if self.world.rank == 0:
            notice("warning", f"load_checkpoint: {text}")


def read_whole(reader: CheckpointReader, held: Held, kind: str = WEIGHTS) -> Tensor:
    """One parameter's state of a kind, in its shape, on the CPU."""
    dtype = held.dtype if kind == WEIGHTS or held.group is None else held.group.kinds[kind]
    numel = torch.Size(held.shape).numel()
    flat = torch.empty(numel, dtype=DTYPES[dtype])
    reader.fill(flat, reader.index.runs(held, kind, 0, numel, 0))
    return flat.view(held.shape) if held.strides is None else flat.as_strided(held.shape, held.strides)


def own_tensors(index: Index, rank: int) -> dict[tuple[str, str], StoredTensor]:
    """What rank `rank` had: its own, and of its leader what it had alike. By (what, name)."""
    node = index.manifest.file_of["model", rank].node
    return {
        (t.what, t.name): t
        for owner in (node, rank)  # a node's number is that of its leader
        for t in index.manifest.tensors
        if t.rank == owner
    }


def order_of(shape: Sequence[int], strides: Sequence[int] | None) -> tuple[int, ...]:
    """Dimensions from the slowest to the fastest, those of size 1 left out; strides None: C order."""
    dims = [d for d, size in enumerate(shape) if size != 1]
    return tuple(dims) if strides is None else tuple(sorted(dims, key=lambda d: -strides[d]))


def _set_random_states(states: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and states["device"] is not None:
        torch.cuda.set_rng_state(states["device"], device)
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    np.random.set_state(states["numpy"])


def _some(names: Iterable[str], most: int = 5) -> str:
    found = sorted(names)
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")
