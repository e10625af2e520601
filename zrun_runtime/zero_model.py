"""A model whose state is laid out as a plan says: its groups, its hooks, its gradients and its update, in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from zrun_runtime.collectives import Collectives
from zrun_runtime.edits import Edits
from zrun_runtime.errors import EngineError, ParameterError
from zrun_runtime.flat_group import FlatGroup, GroupSpec
from zrun_runtime.grouping import (
    GroupingPolicy,
    find_units,
    manageable,
    specs_in_order,
    specs_of_units,
)
from zrun_runtime.holder import ShardHolder
from zrun_runtime.hooks import ModelHooks
from zrun_runtime.layout import lay_out
from zrun_runtime.optim import ShardedOptimizer
from zrun_runtime.ownership import claim, home_of, refuse_to_train
from zrun_runtime.placement import place
from zrun_runtime.plan import StatePlan, TierKind
from zrun_runtime.positions import ranks_text
from zrun_runtime.reducer import GradReducer, GroupGrads
from zrun_runtime.regroup import carry_gradients
from zrun_runtime.sharded_parameter import ShardedParameter, name_as_whole, take_values
from zrun_runtime.shards import reserve
from zrun_runtime.tiers import DiskSettings, FileStore, NvmeTier, OffloadSettings, on_every_rank
from zrun_runtime.tree import plain_parts
from zrun_runtime.unfit import refuse_unfit
from zrun_runtime.window import Window

_FROZEN_ALIKE = "other parameters are frozen", "call requires_grad_() alike on every rank"
_OPTIONS_ALIKE = (
    "the optimizer groups have another learning rate, weight decay or momentum",
    "change them alike on every rank; a schedule that follows a measure needs the mean of all ranks "
    "(torch.distributed.all_reduce)",
)


@dataclass(frozen=True)
class ZeroSettings:
    """What the config and the model leave to decide, decided. Sizes in elements; dtypes None: the parameters' own."""

    plan: StatePlan
    grouping: GroupingPolicy
    prefetch_numel: int
    live_numel: int
    wire_dtype: torch.dtype | None
    window: Window
    clip: float  # L2 norm; 0: none
    leaves: Sequence[nn.Module] = ()  # modules that are units as a whole, whatever runs inside them
    offload: OffloadSettings | None = None  # where the plan keeps the optimizer's state off the device
    shard_disk: DiskSettings | None = None  # where the plan keeps shards on NVMe
    shard_buffers: int = 5
    shards_in_memory: int = 0  # elements of this rank's shards that stay in memory all the same


@dataclass(frozen=True)
class Verdict:
    """What the ranks agreed on before an update."""

    grad_norm: float  # global, before clipping, without the loss scale; not finite if the step must be skipped
    finite: bool
    loss_scale: float  # that the gradients still carry
    loss: float | None  # mean over ranks and micro-batches


class ZeroModel:
    """Lays a model out and keeps it so. Built on every rank in the same order; takes rank 0's values."""

    def __init__(
        self,
        model: nn.Module,
        optimizer_groups: dict[int, int],  # id of a parameter -> number of its optimizer group
        settings: ZeroSettings,
        collectives: Collectives,
    ) -> None:
        self.model, self.settings, self.collectives = model, settings, collectives
        self.optimizer_groups = optimizer_groups
        self.managed = self.to_manage()
        self.updater: ShardedOptimizer | None = None
        self.ticket = collectives.register("a step")
        collectives.watch.know(model)
        self.gradient_order: list[str] | None = None  # names of trained parameters; None until the first update
        self.removed = False
        self.edits = Edits(collectives.world.rank)
        for parameter in self.managed.values() if settings.plan.shards_params else ():
            name_as_whole(parameter)
        self.groups = self.build(self.specs(self.managed))
        self.where = self._index()
        self.share_the_rest()
        self.holder = _new_holder(self)
        trained = [GroupGrads(group) for group in self.groups if group.trains]
        self._attach(trained[::-1] if settings.plan.shards_params else trained)

    def to_manage(self) -> dict[str, nn.Parameter]:
        """By name: what has to be in groups. Where parameters stay full, that is what is trained.

        Raises:
            ParameterError: something that is to be trained cannot be sharded, or another engine has it.
        """
        named = manageable(self.model.named_parameters(), imagined=self.collectives.world.imagined)
        if not self.collectives.world.imagined:
            refuse_unfit(self.model, named, self.collectives.world.size)
        trained = {n: p for n, p in named.items() if p.requires_grad and id(p) in self.optimizer_groups}
        others = {n for n, p in named.items() if home_of(p) not in (None, self)}
        for name in others & set(trained):
            refuse_to_train(name, trained[name])
        if self.settings.plan.shards_params:
            return {n: p for n, p in named.items() if n not in others}  # their engine brings what it has sharded
        return trained

    def specs(self, named: dict[str, nn.Parameter]) -> list[GroupSpec]:
        """The groups that these parameters are to form."""
        if self.settings.plan.shards_params:
            units = find_units(self.model, named, self.settings.leaves)
            return specs_of_units(units, self.optimizer_groups, self.settings.grouping)
        return specs_in_order([*named.items()][::-1], self.model, self.optimizer_groups, self.settings.grouping)

    @cached_property
    def _disk(self) -> NvmeTier | None:
        """Where shards are between uses, if on a disk."""
        disk = self.settings.shard_disk if self.settings.plan.shards_params else None
        if disk is None:
            return None
        return on_every_rank(lambda: NvmeTier(disk, self.settings.shard_buffers), self.agree)

    def build(self, specs: Sequence[GroupSpec], plan: StatePlan | None = None) -> list[FlatGroup]:
        """Groups that have the values of their parameters, by this plan or the model's. A collective."""
        own, offload = self.settings.plan, self.settings.offload
        in_memory = self.settings.shards_in_memory * self.collectives.world.size
        plans = place(specs, own, own.shards_params, offload.share if offload is not None else 1.0, in_memory)
        plans = plans if plan is None else [plan] * len(specs)
        files = _reserve(specs, plans, self._disk, self)
        return [
            FlatGroup(spec, one, self.collectives, self, file)
            for spec, one, file in zip(specs, plans, files, strict=True)
        ]

    def relay(self, groups: Sequence[FlatGroup], order: Sequence[GroupGrads]) -> None:
        """Have these groups from now on, and these gradients in the order of their reductions; units are found anew."""
        self.hooks.remove()
        self.managed = self.to_manage()
        for group in self.groups:
            if group not in groups:
                group.home.discard()
        self.groups = list(groups)
        self.where = self._index()
        before, self.holder = self.holder, _new_holder(self)
        _carry_pins(before, self.holder)
        arrival, moving = self.reducer.arrival, self.reducer.moving
        self._attach(order)
        self.reducer.arrival, self.reducer.moving = arrival, moving
        if self.gradient_order is None:
            self.gradient_order = [name for grads in order for name in grads.group.spec.names]
        if self.updater is not None:
            _adopt(self.updater, self)

    def recall(self, parameter: nn.Parameter) -> bool:
        """See ShardHolder.recall; while the model is being laid out nothing can be recalled."""
        return hasattr(self, "holder") and self.holder.recall(parameter)

    def give_up(self, parameter: nn.Parameter) -> Tensor:
        """The full values, once this is a model no more.

        Raises:
            ParameterError: it still is.
        """
        group, index = self.where[id(parameter)]
        if not self.removed:
            raise ParameterError(
                f"{group.spec.names[index]}: another engine has it sharded", "call destroy() on that engine first"
            )
        group.unshard()
        return parameter.detach()

    def _trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self.managed.items() if self.where[id(p)][0].trains]

    def _index(self) -> dict[int, tuple[FlatGroup, int]]:
        claim((p for group in self.groups for p in group.spec.parameters), self)
        return {id(p): (group, i) for group in self.groups for i, p in enumerate(group.spec.parameters)}

    def share_the_rest(self) -> None:
        """Give every rank rank 0's buffers and the parameters that no group holds."""
        rest = [p for p in self.model.parameters() if home_of(p) is None]
        for parameter in rest:
            if type(parameter) is ShardedParameter:
                parameter.data = take_values(parameter)  # built in slices, and full from now on
        for tensor in (*rest, *self.model.buffers()):
            for part in plain_parts(tensor) if not tensor.is_meta else ():
                self.collectives.broadcast(part)

    def _attach(self, order: Sequence[GroupGrads]) -> None:
        settings = self.settings
        self.reducer = GradReducer(order, settings.plan, self.collectives, settings.wire_dtype, settings.window)
        self.hooks = ModelHooks(self.model, self.holder, self.reducer, lambda: self.edits.take_back(self.groups))

    def agree(self, fine: bool) -> bool:
        """Whether all ranks are fine. A collective."""
        return bool(self.collectives.exchange(self.ticket, (float(fine),)).wait()[:, 0].all())

    # ---- a step

    def vote(self, losses: Sequence[Tensor], loss_scale: float, frozen: float = 0.0, options: float = 0.0) -> Verdict:
        """Finish the reductions and agree on the norm, on whether to step, and on the loss to report.

        Args:
            losses: of this rank's micro-batches, scalars. The device is read once, for their sum and the norm together.
            frozen, options: numbers that have to be the same on every rank: which parameters are frozen now, and
                the options of the optimizer groups.

        Raises:
            EngineError: they are not; on every rank.
        """
        self.edits.take_back(self.groups)
        self.reducer.finish_step()
        square_sum = self.reducer.square_sum()
        loss_sum = sum((loss.reshape(()).to(square_sum) for loss in losses), torch.zeros_like(square_sum))
        flags = self.edits.flags(self.groups)
        far = [group for group, flag in flags.items() if flag.device == square_sum.device]  # to be read with the norm
        told = [square_sum, loss_sum, *(flags[group].to(square_sum) for group in far)]
        mine = self.collectives.read(torch.stack(told))
        said = dict(zip(far, mine[2:], strict=True))
        self.edits.take([group for group, flag in flags.items() if said.get(group, flag)])
        heard = self.collectives.exchange(self.ticket, (*mine[:2], len(losses), frozen, options)).wait()
        _require_same(heard[:, 3], self.collectives.world.rank, *_FROZEN_ALIKE)
        _require_same(heard[:, 4], self.collectives.world.rank, *_OPTIONS_ALIKE)
        total, loss, count = (float(v) for v in heard[:, :3].sum(0))
        finite = total < float("inf")  # false for NaN as well
        norm = total**0.5 / loss_scale if finite else float("inf")
        return Verdict(norm, finite, loss_scale, loss / count if count else None)

    def update(self, verdict: Verdict) -> None:
        """Apply the reduced gradients, clipped. Every parameter is readable on return."""
        if self.gradient_order is None:
            self.follow_order(self._agreed_order())
        if self.updater is None:
            return
        clip = self.settings.clip
        scale = (min(1.0, clip / (verdict.grad_norm + 1e-6)) if clip > 0 else 1.0) / verdict.loss_scale
        reduced = {grads.group: grads.reduced for grads in self.reducer.order}
        self.edits.tell(self.updater.step(lambda group: _present(reduced[group]), scale))

    def end_step(self) -> None:
        """Drop the gradients of the window that is over, also those of parameters that no group holds."""
        self.reducer.drop()
        for parameter in self.model.parameters():
            parameter.grad = None

    # ---- the order in which gradients arrive

    def follow_order(self, names: Sequence[str]) -> None:
        """From the first step on: reduce groups, and form those that stay, in this order of trained parameters.

        Those that are not named come last. Once optimizer state exists, groups stay as they are.
        """
        number = {name: index for index, name in enumerate(names)}
        named = sorted(self._trainable(), key=lambda item: number.get(item[0], len(number)))
        self.gradient_order = [name for name, _ in named]
        if self.settings.plan.shards_params:
            place = {id(p): index for index, (_, p) in enumerate(named)}
            self.reducer.order.sort(key=lambda grads: max(place[id(p)] for p in grads.group.spec.parameters))
            return
        specs = specs_in_order(named, self.model, self.optimizer_groups, self.settings.grouping)
        has_state = self.updater is not None and self.updater.homes.begun
        frozen = any(not p.requires_grad for _, p in named)  # since the backward; `specs_in_order` would leave it out
        if [s.names for s in specs] == [g.spec.names for g in self.groups] or has_state or frozen:
            return
        if self.agree(all(_can_be_made_again(group) for group in self.groups)):
            self._regroup(specs)

    def _agreed_order(self) -> list[str]:
        """Trainable parameters in the order of rank 0's first backward; unused ones come last."""
        names, trainable = zip(*self._trainable(), strict=True) if self._trainable() else ((), ())
        number = {id(p): i for i, p in enumerate(trainable)}
        seen = list(dict.fromkeys(number[id(p)] for p in self.reducer.arrival))
        rest = sorted(set(number.values()) - set(seen))
        return [names[index] for index in self.collectives.broadcast_order(seen + rest)]

    def _regroup(self, specs: Sequence[GroupSpec]) -> None:
        """Move values, and reduced gradients if there are any, into new groups. There is no optimizer state yet."""
        some = any(grads.reduced is not None for grads in self.reducer.order)
        reduced = carry_gradients(self.reducer.order, specs, self.collectives) if some else [None] * len(specs)
        self.hooks.remove()
        self.groups.clear()
        self.where.clear()
        self.reducer.order.clear()
        self.reducer.of.clear()
        if self.updater is not None:
            self.updater.adopt([])  # nothing but the parameters holds the old buffers now: they go as these move
        self.groups = self.build(specs)
        self.where = self._index()
        self._attach([GroupGrads(group) for group in self.groups])
        for grads, values in zip(self.reducer.order, reduced, strict=True):
            grads.reduced = values
        if self.updater is not None:
            _adopt(self.updater, self)

    def remove(self) -> None:
        """Take the hooks off; parameters stay as they are."""
        self.removed = True
        self.hooks.remove()
        if self.updater is not None:
            self.updater.homes.close()


def _reserve(
    specs: Sequence[GroupSpec], plans: Sequence[StatePlan], disk: NvmeTier | None, zero: ZeroModel
) -> list[FileStore | None]:
    """Files for the shards that live on a disk. A collective.

    Raises:
        OffloadError: some rank's disk is full; on every rank.
    """
    if disk is None:
        return [None] * len(specs)

    def file(spec: GroupSpec, plan: StatePlan) -> FileStore | None:
        if plan.params.tier is not TierKind.NVME or spec.keep_full:
            return None
        dtype = spec.parameters[0].dtype
        numels = [parameter.numel() for parameter in spec.parameters]
        return reserve(disk, lay_out(numels, dtype.itemsize, zero.collectives.world.size).shard_numel, dtype)

    return on_every_rank(lambda: [file(*pair) for pair in zip(specs, plans, strict=True)], zero.agree)


def _adopt(updater: ShardedOptimizer, zero: ZeroModel) -> None:
    """The optimizer has the model's groups from now on. A collective where its state is on a disk: that may be full."""
    if updater.homes.nvme is None:
        updater.adopt(zero.groups)
        return

    def adopt() -> bool:
        updater.adopt(zero.groups)
        return True

    on_every_rank(adopt, zero.agree)


def _new_holder(zero: ZeroModel) -> ShardHolder:
    settings = zero.settings
    units = find_units(zero.model, zero.managed, settings.leaves) if settings.plan.shards_params else []
    return ShardHolder(units, zero.groups, settings.prefetch_numel, settings.live_numel)


def _carry_pins(before: ShardHolder, after: ShardHolder) -> None:
    """What the user holds stays held."""
    after.pinned = before.pinned
    for group in after.pinned:
        if after.pinned[group] and group.comes_and_goes and group not in after.groups:
            raise EngineError(
                f"{group.spec.label}: what is trained of it changed while it was gathered",
                "leave GatheredParameters before the next forward or step",
            )


def _can_be_made_again(group: FlatGroup) -> bool:
    """The master weights are no finer than the parameters; they are where someone has set them."""
    return group.weights is None or group.weights.as_coarse_as_shown()


def _require_same(
    said: Tensor,  # (world,): have to be equal
    here: int,  # this rank
    what: str,
    hint: str,
) -> None:
    odd = [rank for rank, other in enumerate(said.tolist()) if other != said[here]]
    if odd:
        raise EngineError(f"step: {what} on {ranks_text(odd)} than on rank {here}", hint)


def _present(reduced: Tensor | None) -> Tensor:
    if reduced is None:
        raise EngineError("a group has no reduced gradient: vote() comes before update()")
    return reduced
