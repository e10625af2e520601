"""A model whose state is laid out as a plan says: its groups, its hooks, its gradients and its update, in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
from zrun_runtime.optim import ShardedOptimizer
from zrun_runtime.ownership import claim, home_of, refuse_to_train
from zrun_runtime.placement import place
from zrun_runtime.plan import StatePlan
from zrun_runtime.reducer import GradReducer
from zrun_runtime.regroup import carry_gradients
from zrun_runtime.tiers import DiskSettings, NvmeTier, OffloadSettings
from zrun_runtime.window import Window


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
        self.managed = self._to_manage()
        self.updater: ShardedOptimizer | None = None
        self._ticket = collectives.register("a step")
        self.gradient_order: list[str] | None = None  # names of trained parameters; None until the first update
        self.removed = False
        self.edits = Edits(collectives.world.rank)
        units = find_units(model, self.managed, settings.leaves) if settings.plan.shards_params else []
        if settings.plan.shards_params:
            specs = specs_of_units(units, optimizer_groups, settings.grouping)
        else:
            specs = specs_in_order(self._trainable()[::-1], model, optimizer_groups, settings.grouping)
        disk = settings.shard_disk if settings.plan.shards_params else None
        self.groups = self._build(specs, NvmeTier(disk, settings.shard_buffers) if disk is not None else None)
        self.where = self._index()
        claim((p for group in self.groups for p in group.spec.parameters), self)
        self.share_the_rest()
        self.holder = ShardHolder(units, self.groups, settings.prefetch_numel, settings.live_numel)
        self._attach(_trained(self.groups, reverse=settings.plan.shards_params))

    def _to_manage(self) -> dict[str, nn.Parameter]:
        """Where parameters stay full, only those that are trained need groups."""
        named = manageable(self.model.named_parameters(), imagined=self.collectives.world.imagined)
        trained = {n: p for n, p in named.items() if p.requires_grad and id(p) in self.optimizer_groups}
        others = {n for n, p in named.items() if home_of(p) not in (None, self)}
        for name in others & set(trained):
            refuse_to_train(name, trained[name])
        if self.settings.plan.shards_params:
            return {n: p for n, p in named.items() if n not in others}  # their engine brings what it has sharded
        return trained

    def _build(self, specs: Sequence[GroupSpec], disk: NvmeTier | None = None) -> list[FlatGroup]:
        plan, offload = self.settings.plan, self.settings.offload
        share = offload.share if offload is not None else 1.0
        in_memory = self.settings.shards_in_memory * self.collectives.world.size
        plans = place(specs, plan, plan.shards_params, share, in_memory)
        return [FlatGroup(spec, own, self.collectives, self, disk) for spec, own in zip(specs, plans, strict=True)]

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
        return [(n, p) for n, p in self.managed.items() if p.requires_grad and id(p) in self.optimizer_groups]

    def _index(self) -> dict[int, tuple[FlatGroup, int]]:
        return {id(p): (group, i) for group in self.groups for i, p in enumerate(group.spec.parameters)}

    def share_the_rest(self) -> None:
        """Give every rank rank 0's buffers and the parameters that no group holds."""
        for parameter in self.model.parameters():
            if home_of(parameter) is None and not parameter.is_meta:
                self.collectives.broadcast(parameter)
        for buffer in self.model.buffers():
            if not buffer.is_meta:
                self.collectives.broadcast(buffer)

    def _attach(self, order: Sequence[FlatGroup]) -> None:
        settings = self.settings
        self.reducer = GradReducer(order, settings.plan, self.collectives, settings.wire_dtype, settings.window)
        self.hooks = ModelHooks(self.model, self.holder, self.reducer, lambda: self.edits.take_back(self.groups))

    def agree(self, fine: bool) -> bool:
        """Whether all ranks are fine. A collective."""
        return bool(self.collectives.exchange(self._ticket, (float(fine),)).wait()[:, 0].all())

    # ---- a step

    def vote(self, losses: Sequence[Tensor], loss_scale: float) -> Verdict:
        """Finish the reductions and agree on the norm, on whether to step, and on the loss to report.

        losses: of this rank's micro-batches, scalars. The device is read once, for their sum and the norm together.
        """
        self.edits.take_back(self.groups)
        self.reducer.finish_step()
        square_sum = self.reducer.square_sum()
        loss_sum = sum((loss.reshape(()).to(square_sum) for loss in losses), torch.zeros_like(square_sum))
        flags = self.edits.flags(self.groups)
        told = [square_sum, loss_sum, *(flag.to(square_sum) for flag in flags.values())]
        mine = self.collectives.read(torch.stack(told))
        self.edits.take([group for group, edited in zip(flags, mine[2:], strict=True) if edited])
        heard = self.collectives.exchange(self._ticket, (*mine[:2], len(losses))).wait()
        total, loss, count = (float(v) for v in heard[:, :3].sum(0))
        finite = total < float("inf")  # false for NaN as well
        norm = total**0.5 / loss_scale if finite else float("inf")
        return Verdict(norm, finite, loss_scale, loss / count if count else None)

    def first_nonfinite(self) -> str | None:
        """The first parameter, in the model's order, with a non-finite reduced gradient on some rank. A collective."""
        names = list(self.managed)
        number = {name: index for index, name in enumerate(names)}
        bad = [len(names)]
        for grads in self.reducer.order:
            mine, layout = self.reducer.own_slice(grads), grads.group.layout
            for part in layout.fragments(self.collectives.world.rank):
                if not mine[part.shard_offset : part.shard_offset + part.numel].isfinite().all():
                    bad.append(number[grads.group.spec.names[part.index]])
        first = int(self.collectives.exchange(self._ticket, (min(bad),)).wait()[:, 0].min())
        return names[first] if first < len(names) else None

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
        if [s.names for s in specs] == [g.spec.names for g in self.groups] or has_state:
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
        self.groups = self._build(specs)
        self.where = self._index()
        self._attach(_trained(self.groups, reverse=False))
        for grads, values in zip(self.reducer.order, reduced, strict=True):
            grads.reduced = values
        if self.updater is not None:
            self.updater.adopt(self.groups)

    # ---- accounts

    def nbytes(self) -> dict[str, int]:
        """Bytes of model state that this rank holds now, by kind."""
        held = {"params": 0, "master": 0, "grads": 0, "optimizer": 0}
        for group in self.groups:
            for kind, count in group.nbytes().items():
                held[kind] += count
        for grads in self.reducer.order:
            held["grads"] += sum(t.nbytes for t in (grads.buffer, grads.reduced) if t is not None)
        if self.updater is not None:
            for state in self.updater.optimizer.state.values():
                held["optimizer"] += sum(v.nbytes for v in state.values() if isinstance(v, Tensor))
        return held

    def remove(self) -> None:
        """Take the hooks off; parameters stay as they are."""
        self.removed = True
        self.hooks.remove()
        if self.updater is not None:
            self.updater.homes.close()


def _trained(groups: Sequence[FlatGroup], reverse: bool) -> list[FlatGroup]:
    trained = [group for group in groups if group.master is not None]
    return trained[::-1] if reverse else trained


def _can_be_made_again(group: FlatGroup) -> bool:
    """The master weights are no finer than the parameters; they are where someone has set them."""
    return group.weights is None or group.weights.as_coarse_as_shown()


def _present(reduced: Tensor | None) -> Tensor:
    if reduced is None:
        raise EngineError("a group has no reduced gradient: vote() comes before update()")
    return reduced
