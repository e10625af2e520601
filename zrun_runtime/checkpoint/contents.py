"""What of an engine goes into a checkpoint: described without its values, then given slice by slice."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from zrun_runtime.checkpoint.codec import encode
from zrun_runtime.checkpoint.errors import CheckpointError
from zrun_runtime.checkpoint.manifest import MASTER, NAMES, PARAM, Role, StoredGroup, StoredParameter, What, role_of
from zrun_runtime.checkpoint.writer import bytes_of
from zrun_runtime.collectives import Collectives
from zrun_runtime.config import Config
from zrun_runtime.data import ResumableLoader
from zrun_runtime.flat_group import FlatGroup
from zrun_runtime.optim import ShardedOptimizer
from zrun_runtime.precision import LossScaler
from zrun_runtime.progress import Progress
from zrun_runtime.window import Window
from zrun_runtime.zero_model import ZeroModel

# Options of an optimizer that say how it computes, not what: those of the engine that loads stay.
HOW_IT_COMPUTES = frozenset({"params", "fused", "foreach", "capturable", "differentiable"})
# Where the parameters of a group are in it, which never changes.
_places: WeakKeyDictionary[FlatGroup, tuple[StoredParameter, ...]] = WeakKeyDictionary()


class Trainer(Protocol):
    """What a checkpoint is of: the fields of an Engine that are saved and restored."""

    module: nn.Module
    zero: ZeroModel
    updater: ShardedOptimizer | None
    lr_scheduler: Any
    settings: Config
    collectives: Collectives
    scaler: LossScaler | None
    progress: Progress
    loaders: list[ResumableLoader]
    global_steps: int
    micro_steps: int
    skipped_steps: int

    @property
    def window(self) -> Window: ...


@dataclass(frozen=True)
class OwnTensor:
    """A tensor that is not part of a flat group. what: as in StoredTensor."""

    what: What
    name: str
    values: Tensor

    @property
    def key(self) -> str:
        """Its name in a file."""
        return f"{self.what}:{self.name}"

    def digest(self) -> str:
        """Equal if and only if dtype, shape and every byte are."""
        flat = self.values.detach().cpu().contiguous().reshape(-1)
        mark = hashlib.sha256(f"{self.values.dtype}{tuple(self.values.shape)}".encode())
        mark.update(bytes_of(flat))
        return mark.hexdigest()


@dataclass
class Contents:
    """groups, flats: what is stored of each flat group, and the group. shared: the same on every rank, own: may differ.

    state, own_state: JSON, the same on every rank or not.
    """

    groups: list[StoredGroup] = field(default_factory=list)
    flats: list[FlatGroup] = field(default_factory=list)
    shared: list[OwnTensor] = field(default_factory=list)
    own: list[OwnTensor] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    own_state: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    gradient_order: tuple[str, ...] = ()


def canonical(name: str) -> str:
    """A parameter's name without what torch.compile adds to it."""
    return name.replace("_orig_mod.", "")


def collect(trainer: Trainer, client_state: Any, exclude_frozen: bool) -> Contents:
    """Everything that is stored of a trainer.

    Raises:
        CheckpointError: something in it cannot be stored; it says what.
    """
    zero = trainer.zero
    zero.edits.take_back(zero.groups)
    zero.edits.take([flat for flat, flag in zero.edits.flags(zero.groups).items() if bool(flag)])
    found = Contents()
    grouped: set[int] = set()
    for flat in zero.groups:
        grouped.update(id(p) for p in flat.spec.parameters)
        if exclude_frozen and flat.master is None:
            found.left_out += [canonical(name) for name in flat.spec.names]
            continue
        found.groups.append(_describe(flat, trainer.updater))
        found.flats.append(flat)
    for name, parameter, first in all_names(trainer.module):
        if name != first:
            found.aliases[canonical(name)] = canonical(first)
        if name != first or id(parameter) in grouped:
            continue
        if exclude_frozen and not parameter.requires_grad:
            found.left_out.append(canonical(name))
            continue
        found.shared.append(OwnTensor("parameter", canonical(name), _storable(name, parameter)))
    found.gradient_order = tuple(map(canonical, zero.gradient_order or ()))
    for name, buffer in persistent_buffers(trainer.module):
        found.own.append(OwnTensor("buffer", canonical(name), _storable(name, buffer)))
    tensors: dict[str, Tensor] = {}
    found.state = _state_of(trainer, tensors)
    found.own_state = _own_state_of(trainer, client_state, tensors)
    found.own += [OwnTensor("data", name, tensor) for name, tensor in tensors.items()]
    return found


def _describe(flat: FlatGroup, updater: ShardedOptimizer | None) -> StoredGroup:
    kinds = updater.state_dtypes(flat) if updater is not None and flat.master is not None else {}
    kinds = {MASTER: kinds[MASTER], **kinds} if MASTER in kinds else {PARAM: flat.full.dtype}
    if flat not in _places:  # thousands of small objects, made once: a background save waits for them
        _places[flat] = tuple(
            StoredParameter(
                name=canonical(name),
                shape=tuple(view.shape),
                offset=offset,
                strides=None if view.is_contiguous() else tuple(view.stride()),
            )
            for name, view, offset in zip(flat.spec.names, flat.views, flat.layout.offsets, strict=True)
        )
    scalars = updater.homes.scalars(flat) if updater is not None and flat.master is not None else {}
    return StoredGroup(
        label=canonical(flat.spec.label),
        padded_numel=flat.layout.padded_numel,
        kinds={kind: NAMES[dtype] for kind, dtype in kinds.items()},
        parameters=_places[flat],
        optimizer_group=flat.spec.optimizer_group,
        scalars=encode(scalars, f"the optimizer's state of {flat.spec.label}", {}) if scalars else None,
    )


def _storable(name: str, tensor: Tensor) -> Tensor:
    plain = tensor.detach() if not tensor.is_meta else tensor
    if type(plain) is not Tensor or plain.is_meta or plain.layout is not torch.strided or plain.dtype not in NAMES:
        raise CheckpointError(
            f"{name}: a {type(plain).__name__} of {plain.dtype} on {plain.device} cannot be stored",
            "leave frozen parameters out (exclude_frozen_parameters=True), or make it a plain tensor",
        )
    return plain


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a state dict has, by full name, each tensor once."""
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{prefix}.{name}" if prefix else name, buffer


def all_names(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, str]]:
    """(a name, its parameter, the first name of that) for every name that a parameter has."""
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield name, parameter, first.setdefault(id(parameter), name)


def aliases_of(module: nn.Module) -> dict[str, str]:
    """The further names of tied parameters -> the first."""
    return {canonical(name): canonical(first) for name, _, first in all_names(module) if name != first}


def extra_state_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that have state of their own making (`get_extra_state`), by name."""
    for name, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            yield canonical(name), part


def optimizer_of(trainer: Trainer) -> torch.optim.Optimizer | None:
    """The torch optimizer; None if nothing is trained."""
    return trainer.updater.optimizer if trainer.updater is not None else None


def _state_of(trainer: Trainer, tensors: dict[str, Tensor]) -> dict[str, Any]:
    optimizer, scheduler, config = optimizer_of(trainer), trainer.lr_scheduler, trainer.settings
    groups = optimizer.param_groups if optimizer is not None else []
    options = [{key: value for key, value in group.items() if key not in HOW_IT_COMPUTES} for group in groups]
    return {
        "global_steps": trainer.global_steps,
        "micro_steps": trainer.micro_steps,
        "skipped_steps": trainer.skipped_steps,
        "global_samples": trainer.progress.samples,
        "precision": config.precision,
        "train_batch_size": config.train_batch_size,
        "loss_scaler": None if trainer.scaler is None else trainer.scaler.state_dict(),
        "optimizer": None if optimizer is None else type(optimizer).__name__,
        "param_groups": encode(options, "optimizer.param_groups", tensors),
        "scheduler": None if scheduler is None else type(scheduler).__name__,
        "scheduler_state": encode(scheduler.state_dict(), "lr_scheduler", tensors)
        if hasattr(scheduler, "state_dict")
        else None,
        "loaders": [loader.state_dict() for loader in trainer.loaders],
    }


def _own_state_of(trainer: Trainer, client_state: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    extra = {name: part.get_extra_state() for name, part in extra_state_modules(trainer.module)}
    return {
        "client_state": encode(client_state, "client_state", tensors),
        "random": encode(random_states(trainer.collectives.world.device), "random", tensors),
        "extra_state": encode(extra, "extra_state", tensors),
    }


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of this process's random generators, as plain data."""
    version, numbers, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
        "numpy": np.random.get_state(legacy=True),
    }


def slices(contents: Contents, updater: ShardedOptimizer | None, rank: int) -> Iterator[tuple[Role, Tensor]]:
    """This rank's slices, in the order in which files have them: (shard_numel,) each. One group is read at a time."""
    for flat, stored in zip(contents.flats, contents.groups, strict=True):
        state = updater.read_state(flat) if updater is not None and flat.master is not None else None
        for kind in stored.kinds:
            if state is None or state.master is None:
                yield role_of(kind), flat.shard
            else:
                yield role_of(kind), own_slice(state.master if kind == MASTER else state.moments[kind], flat, rank)


def own_slice(tensor: Tensor, flat: FlatGroup, rank: int) -> Tensor:
    """The slice of this rank of state that it has as a slice, or whole. (shard_numel,)"""
    start, stop = flat.layout.shard_bounds(rank)
    return tensor if tensor.numel() == flat.layout.shard_numel else tensor[start:stop]


def digests(tensors: Sequence[OwnTensor]) -> dict[str, str]:
    """Of each tensor, by its key."""
    return {one.key: one.digest() for one in tensors}
