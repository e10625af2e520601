"""Gradients, from the moment autograd has one to the moment a group's reduced gradient is ready.

[Note: the life of a gradient]
A post-accumulate hook copies each gradient into its group's flat buffer, divided by the world size (so that sums over
ranks are means; not where sums are wanted), and drops `p.grad`. When the last one of a group is there the group is
ready. Ready groups are reduced strictly in one order, the same on all ranks, so ranks that use different parameters
still agree; a group that is not ready by the end of the backward is completed with zeros and reduced then.

Where parameters come and go, the backward itself gathers, and a rank that waits for a reduction must not be waited for
in a gather. So there a group is reduced when the backward of its unit ends, complete or not: at the same place among
the gathers on every rank. What more than one unit uses is reduced last.

A plan that keeps whole gradients reduces at the accumulation boundary only, and the buffer stays between micro-batches;
one that shards them reduces in every backward and adds slices up. A group may become dirty again after its reduction (a
parameter shared by two reentrantly checkpointed regions): what arrives later is reduced again, and added.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from zrun_runtime.collectives import Collectives, Pending
from zrun_runtime.departures import Departures, leave_device
from zrun_runtime.errors import EngineError, ParameterError
from zrun_runtime.flat_group import FlatGroup, view_like
from zrun_runtime.hook import after_accumulation, move_to_end
from zrun_runtime.layout import Layout
from zrun_runtime.memory import FLYING, FLYING_SHARDED
from zrun_runtime.plan import StatePlan
from zrun_runtime.window import Window

_NORM_BLOCK = 32768


class GroupGrads:
    """The gradient side of one group."""

    def __init__(self, group: FlatGroup) -> None:
        self.group = group
        self.buffer: Tensor | None = None  # (padded_numel,) accumulation dtype, PARTIAL: gradients not yet reduced
        self.written: set[int] = set()  # parameters whose place in `buffer` holds a gradient
        self.arrived: set[int] = set()  # parameters seen in this backward
        self.launched = False  # its reduction began in this backward
        self.reduced: Tensor | None = None  # mean over ranks, laid out as the group wants it
        self.square_sum: Tensor | None = None  # () float64: of this rank's slice of `reduced`; None: to be computed

    @property
    def unused(self) -> bool:
        """It has gradients that no update has used."""
        return self.buffer is not None or self.reduced is not None

    @property
    def ready(self) -> bool:
        """Every parameter of the group has been seen in this backward."""
        return len(self.arrived) == len(self.group.spec.parameters)

    def take_in(self, out: Tensor, final: bool) -> None:
        """A reduction has ended with `out`; final: nothing will be added before the update."""
        if self.reduced is None:
            self.reduced = out.to(_kept_dtype(self.group, out, final))
        elif self.reduced is not out:
            self.reduced.add_(out)


class UnderWay:
    """What moves: reductions, those of a backward that failed, and gradients that leave for the host."""

    def __init__(self, limit: int) -> None:
        """limit: of reductions, and of gradients that leave."""
        self.limit = limit
        self.flying: list[tuple[GroupGrads, Tensor, Pending]] = []
        self.abandoned: list[Pending] = []
        self.departures = Departures(limit)


class GradReducer:
    """See [Note: the life of a gradient]."""

    def __init__(
        self,
        order: Sequence[GroupGrads],  # of trained groups, in the order in which they are expected
        plan: StatePlan,
        collectives: Collectives,
        wire_dtype: torch.dtype | None,  # None: the parameters' own
        window: Window,
    ) -> None:
        self.order = list(order)
        self.of = {grads.group: grads for grads in self.order}
        self.plan = plan
        self.collectives = collectives
        self.wire_dtype, self.window = wire_dtype, window
        self.on_gradient: Callable[[], None] = lambda: None
        self.on_complete: Callable[[FlatGroup], None] = lambda group: None
        self.idle = False  # the backward under way gives no parameter a gradient
        self.arrival: list[nn.Parameter] = []  # the order of one backward, for those who regroup
        self._next = 0  # the first group of `order` that was not launched in this backward
        self.moving = UnderWay(FLYING_SHARDED if plan.shards_params else FLYING)
        self._agree = collectives.register("the end of a backward")
        self._hooks = [
            (parameter, after_accumulation(parameter, self._acceptor(grads, index)))
            for grads in self.order
            for index, parameter in enumerate(grads.group.spec.parameters)
        ]

    def _acceptor(self, grads: GroupGrads, index: int) -> Callable[[Tensor], None]:
        # Weak, as autograd holds its hooks where the garbage collector cannot see that they hold their parameter.
        reducer, group = weakref.ref(self), weakref.ref(grads)

        def accept(parameter: Tensor) -> None:
            here, its = reducer(), group()
            if here is not None and its is not None:
                here.accept(its, index, parameter)

        return accept

    def accept(self, grads: GroupGrads, index: int, parameter: Tensor) -> None:
        """Take `parameter.grad` over, and reduce what has become ready."""
        self.on_gradient()
        self.idle = False
        grad, parameter.grad = parameter.grad, None
        if grad is None:  # a custom Function gave none, or a hook of the user took it
            if len(parameter._post_accumulate_grad_hooks) > 1 and grads.group.touched():
                raise _stepped_in_backward(grads.group.spec.names[index])
            return
        self._write(grads, index, grad.detach(), self.window.weight)
        if index not in grads.arrived:
            grads.arrived.add(index)
            self.arrival.append(grads.group.spec.parameters[index])
            if grads.ready:
                if not self.plan.shards_params and self._reduces_now():
                    self._launch_ready()
                self.on_complete(grads.group)

    def _reduces_now(self) -> bool:
        if self.plan.reduces_each_backward:
            return not self.window.held
        return self.window.ends_with_this_backward

    def _write(self, grads: GroupGrads, index: int, grad: Tensor, weight: float) -> None:
        group, share = grads.group, weight if self.window.sums else weight / self.collectives.world.size
        if grad.layout is not torch.strided:
            raise ParameterError(
                f"{group.spec.names[index]}: its gradient is sparse, and a flat shard has no place for that",
                "build the embedding with sparse=False",
            )
        if grads.buffer is None:
            grads.buffer = self._new_buffer(group)
            grads.written.clear()
        place = view_like(grads.buffer, group.views[index], group.layout.offsets[index])
        if index in grads.written:
            place.add_(grad, alpha=share)
        else:
            torch.mul(grad, share, out=place) if place.dtype is grad.dtype else place.copy_(grad).mul_(share)
            grads.written.add(index)

    def _new_buffer(self, group: FlatGroup) -> Tensor:
        own = group.full.dtype
        dtype = own if own is torch.float64 else self.window.dtype or own
        buffer = torch.empty(group.layout.padded_numel, dtype=dtype, device=group.full.device)
        for start, stop in group.layout.gaps():
            buffer[start:stop].zero_()
        return buffer

    # ---- reductions

    def _launch_ready(self) -> None:
        while self._next < len(self.order) and self.order[self._next].ready:
            self._launch(self.order[self._next])
            self._next += 1

    def conclude(self, group: FlatGroup) -> None:
        """The backward of the one unit that uses this group is over: reduce what is there."""
        grads = self.of.get(group)
        if grads is not None and not grads.launched and not self.idle and self._reduces_now():
            self._launch(grads, checked=True)

    def _launch(self, grads: GroupGrads, checked: bool = False) -> None:
        """Start to reduce what the group has; what is missing counts as zero.

        checked: among gathers: a rank that is somewhere else must be found out, not waited for.
        """
        group = grads.group
        full = grads.buffer if grads.buffer is not None else self._new_buffer(group)
        for index, (offset, numel) in enumerate(zip(group.layout.offsets, group.layout.numels, strict=True)):
            if grads.buffer is None or index not in grads.written:
                full[offset : offset + numel].zero_()
        grads.buffer = None
        grads.written.clear()
        if self.wire_dtype is not None and full.dtype is not self.wire_dtype:
            full = full.to(self.wire_dtype)
        while len(self.moving.flying) >= self.moving.limit:
            self._land()
        accumulate = grads.reduced is not None
        if self.collectives.world.size == 1 or group.wanted_grads is Layout.REPLICATED:
            out = full
        elif leave_device(group):
            out, accumulate = full.new_empty(group.layout.shard_numel), False
        else:
            out = grads.reduced if grads.reduced is not None else _new_shard(group)
        grads.launched = True
        again = accumulate and out is not full
        pending = self.collectives.reduce(full, group.wanted_grads, out, again, group.reduction_ticket)
        if checked:
            pending = self.collectives.checked(pending, group.reduction_ticket)
        self.moving.flying.append((grads, out, pending))
        if self.collectives.world.size == 1:
            self._land()  # there is nothing to wait for

    def _land(self) -> None:
        """Finish the oldest reduction."""
        grads, out, pending = self.moving.flying.pop(0)
        pending.wait()
        while self.moving.abandoned:
            self.moving.abandoned.pop().wait()  # earlier ones, so every rank has come to them
        if not leave_device(grads.group):
            grads.take_in(out, self.window.ends_with_this_backward)
            # While it is in the cache:
            grads.square_sum = square_sum(self.own_slice(grads)) if self.window.at_boundary else None
            return
        final, first = self.window.ends_with_this_backward, grads.reduced is None and grads.square_sum is None
        grads.square_sum = square_sum(out) if final and first else None
        self.moving.departures.begin(out, lambda host: grads.take_in(host, final))

    def own_slice(self, grads: GroupGrads) -> Tensor:
        """The part of a reduced gradient that this rank counts into the norm."""
        reduced, layout = grads.reduced, grads.group.layout
        if reduced is None:
            raise EngineError(f"{grads.group.spec.label}: its gradients are not reduced yet")
        if reduced.numel() == layout.shard_numel:
            return reduced
        start, stop = layout.shard_bounds(self.collectives.world.rank)
        return reduced[start:stop]

    def square_sum(self) -> Tensor:  # () float64
        """The sum of squares of this rank's slices of all reduced gradients."""
        sums = [
            grads.square_sum if grads.square_sum is not None else square_sum(self.own_slice(grads))
            for grads in self.order
        ]
        total = torch.zeros((), dtype=torch.float64, device=self.collectives.world.device)
        for place in dict.fromkeys(one.device for one in sums):  # one copy to the device for all that are on the host
            total = total + torch.stack([one for one in sums if one.device == place]).sum().to(total.device)
        return total

    # ---- the end of a backward, and of a step

    def finish_backward(self) -> None:
        """Reduce what is left, if this backward reduces at all."""
        if self._reduces_now() and not self.idle:
            self._reduce_all()
        self._next = 0
        self.idle = False
        for grads in self.order:
            grads.arrived.clear()
            grads.launched = False

    def _reduce_all(self) -> None:
        """Reduce what was not yet, and again the groups that got more after their reduction, on any rank.

        Every rank asks every time: only some may have run the checkpointed regions that make groups dirty.
        """
        left = [grads for grads in self.order if not grads.launched]
        dirty = [index for index, grads in enumerate(self.order) if grads.launched and grads.buffer is not None]
        code = float(hash(tuple(dirty)) % (1 << 52))
        answers = self.collectives.exchange(self._agree, (len(dirty), code))
        if self.plan.shards_params:
            answers.wait()  # a rank that is still among gathers must be found out, not waited for
        for grads in left:
            self._launch(grads)
        self._land_all()  # meanwhile
        heard = answers.wait()
        same = bool((heard == heard[0]).all())
        for index in dirty if same else range(len(self.order)):
            self._launch(self.order[index])
        self._land_all()

    def finish_step(self) -> None:
        """Before an update: every group has a reduced gradient, those put into `p.grad` by hand included."""
        for grads in self.order:
            self._take_over_foreign(grads)
        if any(grads.reduced is None for grads in self.order):
            self._reduce_all()  # no backward of this rank did
            self._next = 0
        for grads in self.order:
            if grads.buffer is not None:
                self._launch(grads)
        self._land_all()

    def _take_over_foreign(self, grads: GroupGrads) -> None:
        for index, parameter in enumerate(grads.group.spec.parameters):
            grad = parameter.grad
            if grad is not None:
                if any(parameter is known for known in self.arrival):
                    raise _second_gradient(grads.group.spec.names[index])
                parameter.grad = None
                self._write(grads, index, grad.detach(), 1.0)
                self.arrival.append(parameter)

    def _land_all(self) -> None:
        while self.moving.flying:
            self._land()
        self.moving.departures.settle()
        self.collectives.release_scratch()

    def drop(self) -> None:
        """Forget every gradient: after a step, or after an exception in the middle of a backward."""
        # Other ranks may never come to these:
        self.moving.abandoned += [pending for _, _, pending in self.moving.flying]
        self.moving.flying.clear()
        self.moving.departures.forget()
        self._next = 0
        for grads in self.order:
            grads.buffer = grads.reduced = grads.square_sum = None
            grads.written.clear()
            grads.arrived.clear()
            grads.launched = False
        self.arrival.clear()

    def stay_last(self) -> None:
        """Let hooks that the user added to parameters run before ours."""
        for parameter, hook in self._hooks:
            hooks = parameter._post_accumulate_grad_hooks
            if hooks is not None and len(hooks) > 1:
                move_to_end(hooks, hook.id)

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for _, hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _second_gradient(name: str) -> EngineError:
    """A gradient was set by hand after a backward: plain torch would take it in place of the sum, which is not here."""
    return EngineError(
        f"{name}: p.grad was set after a backward, whose gradient is in the flat buffer: to be added, or in its place?",
        "set p.grad before the backward to add to it; zrun_runtime.zero.safe_set_full_grad replaces it",
    )


def _stepped_in_backward(name: str) -> EngineError:
    """Every rank would have stepped with the gradient of its own batch, and the weights would be a mixture."""
    return EngineError(
        f"{name}: a hook changed it in the backward and took its gradient, which no other rank has seen",
        "do not fuse an optimizer into the backward: the engine's takes no gradient memory beyond a group or two",
    )


def _new_shard(group: FlatGroup) -> Tensor:
    master = group.master if group.master is not None else group.owned
    return torch.empty(group.layout.shard_numel, dtype=master.dtype, device=master.device)


def _kept_dtype(group: FlatGroup, out: Tensor, final: bool) -> torch.dtype:
    """In which a reduced gradient waits: that of the master weights, unless it is final and the update casts it piece
    by piece anyway."""
    return out.dtype if group.master is None or (final and group.plan.offloads_optimizer) else group.master.dtype


def square_sum(values: Tensor) -> Tensor:
    """The sum of squares as a () float64 tensor. Blocks in float32 keep its error near 1e-7 at the speed of memory."""
    norms = torch._foreach_norm(values.split(_NORM_BLOCK), 2, torch.promote_types(values.dtype, torch.float32))
    return torch.stack(norms).double().square().sum()
