"""Who holds which group, and until when: the forwards and backwards of units.

[Note: holding]
A group is unsharded while someone holds it. A unit's forward holds its groups; so does its backward, from the gradient
of its output to the gradient of its input. The end of the backward is found like this: the inputs of the call are
replaced by views of themselves, whose gradients are computed after everything inside the unit, because autograd runs
the nodes that are ready in the reverse order of their making. A unit whose inputs need no gradient is done when its
last parameter has one. What is still unsharded at the end of the outermost backward is resharded then.

A tensor in a list or a dict among the inputs is not replaced: the gradient of the tensor itself tells the end then.

An activation-checkpointed unit runs its forward again inside the backward: its groups are held by the backward already
(or, under the reentrant kind, are about to be), so a forward inside a backward never reshards and nothing moves twice.

[Note: units that differ]
Some ranks may use nothing that is trained of a leaf (`set_z3_leaf_modules`). If its inputs need no gradient either, no
backward goes through it there, nor through what comes after it, and the others would wait for them in a gather. So
inputs of leaves always need gradients. Where there is none that could (token numbers), the groups stay until the end of
the backward, which then gathers nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zrun_runtime.compiled import keep_hooks_outside
from zrun_runtime.errors import ParameterError
from zrun_runtime.flat_group import FlatGroup
from zrun_runtime.grouping import Unit
from zrun_runtime.hook import Hook, hook_first, in_backward, move_to_end
from zrun_runtime.order import Order
from zrun_runtime.residence import Residence
from zrun_runtime.tree import tensors_in


class _Call:
    """One forward of a unit that backwards may follow."""

    __slots__ = ("awaited", "backward", "brings", "marked", "open", "unfinished", "unit")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.brings = False  # its groups, or some, were not there before it
        self.awaited = False  # its backward was announced by its forward
        self.marked = False  # an input's gradient will tell the end of its backward
        self.backward = -1  # autograd's number of the backward that last reached it
        self.open = False  # that backward holds the groups
        self.unfinished: set[FlatGroup] = set()  # trained ones that wait for gradients in that backward


class Expected:
    """The backwards that are still to come: with the last of them a group's gradients are over, all there or not."""

    def __init__(self) -> None:
        self.calls: Counter[FlatGroup] = Counter()  # of units that bring the group, announced by their forward
        self.users: Counter[FlatGroup] = Counter()  # units that bring the group
        self.on_concluded: Callable[[FlatGroup], None] = lambda group: None

    def take(self, call: _Call) -> None:
        """A call's backward is over. A group that no other unit uses is concluded with its last call."""
        if call.awaited:
            self.calls.subtract(call.unit.groups)
        for group in call.unit.groups if call.marked else ():
            if self.calls[group] <= 0 and self.users[group] == 1:
                self.on_concluded(group)


class ShardHolder:
    """Unshards and reshards the groups of units around their use; see [Note: holding]."""

    def __init__(
        self, units: Sequence[Unit], groups: Sequence[FlatGroup], prefetch_numel: int, live_numel: int
    ) -> None:
        self.groups = [group for group in groups if group.comes_and_goes]
        self.by_parameter = {id(p): g for g in self.groups for p in g.spec.parameters}
        self.root_depth = 0  # forwards of the whole model under way
        self.on_backward: Callable[[], None] = lambda: None  # a backward reached one of our units
        self._holders: Counter[FlatGroup] = Counter()
        self.pinned: Counter[FlatGroup] = Counter()  # held by the user, through forwards and backwards
        self._keep: set[FlatGroup] = set()  # not resharded before the next backward ends
        self._strays: list[FlatGroup] = []  # held until the end of the model's forward
        self._forward_order = Order(self.groups, prefetch_numel, live_numel)
        self._backward_order = Order(self.groups, prefetch_numel, live_numel)
        self._open: list[_Call] = []
        self.calls: dict[Unit, list[_Call]] = {}  # of every unit whose parameters come and go: its forwards under way
        self._last_unit: Unit | None = None  # whose forward is the last to end, as far as is known
        self.expected = Expected()
        self._handles: list[Any] = []
        for unit in units:
            unit.groups = list(dict.fromkeys(
                self.by_parameter[id(p)] for p in unit.parameters.values() if id(p) in self.by_parameter
            ))  # fmt: skip
            self.expected.users.update(unit.groups)
            if unit.groups:
                self._hook(unit)

    def _hook(self, unit: Unit) -> None:
        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            move_to_end(module._forward_hooks, handle.id)  # hooks added since then still see the values
            return self._before_forward(unit, args, kwargs)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._after_forward(unit, output)

        handle = unit.module.register_forward_hook(Hook(after), always_call=True)
        self._handles += [unit.module.register_forward_pre_hook(Hook(before), prepend=True, with_kwargs=True), handle]
        self.calls[unit] = []
        keep_hooks_outside([unit.module])

    # ---- holding

    def hold(self, groups: Sequence[FlatGroup]) -> bool:
        """Unshard groups and keep them so until `release`. Says whether there was anything to do."""
        self._holders.update(groups)
        return _bring(groups)

    def release(self, groups: Sequence[FlatGroup], reshard: bool = True) -> None:
        """Let go of groups that were held, and reshard those that nobody holds."""
        for group in groups:
            if self._holders[group]:  # 0 if everything was put away in between
                self._holders[group] -= 1
        if reshard:
            self._put_away(groups)

    def _put_away(self, groups: Sequence[FlatGroup]) -> None:
        """Reshard those that nobody holds."""
        lost = None
        for group in groups:
            if not self._holders[group] and not self.pinned[group] and group not in self._keep:
                lost = lost or group.disturbed()
                group.reshard()
        if lost is not None:
            raise ParameterError(
                f"{lost}: it was changed while the model used it, and sharded weights come and go with their use: "
                "the change would be lost",
                "change it between steps, inside `with zrun_runtime.zero.GatheredParameters([parameter]):`",
            )

    def pin(self, groups: Sequence[FlatGroup]) -> None:
        """Unshard groups until `unpin`, whatever forwards and backwards do in between."""
        self.pinned.update(groups)
        _bring(groups)

    def unpin(self, groups: Sequence[FlatGroup]) -> None:
        """The user is done with them."""
        self.pinned.subtract(groups)
        for group in groups:
            if not self._holders[group] and not self.pinned[group]:
                group.reshard(leave_aliases=True)

    def recall(self, parameter: nn.Parameter) -> bool:
        """A parameter is read by a module that did not bring it: right inside a forward or backward of the model."""
        if not self.root_depth and not in_backward():
            return False
        group = self.by_parameter[id(parameter)]
        self.hold([group])
        self._strays.append(group)
        if torch.is_grad_enabled() or in_backward():
            self._keep.add(group)
        return True

    # ---- forward

    def _before_forward(self, unit: Unit, args: Any, kwargs: Any) -> Any:
        call = _Call(unit)
        self.calls[unit].append(call)
        call.brings = self.hold(unit.groups)
        if call.brings and not in_backward():
            if self._last_unit is not None and self._forward_order.ended is self._last_unit:
                self._put_away(self._last_unit.groups)  # kept for the backward as the last one, and it was not
                self._last_unit = None
            self._forward_order.fetch_after(unit)
        if not torch.is_grad_enabled() or not _needs_weights_in_backward(unit.module):
            return None
        return self._mark_inputs(call, args, kwargs)

    def _mark_inputs(self, call: _Call, args: Any, kwargs: Any) -> Any:
        """Replace inputs that need gradients by views; the gradient of one tells the end of the call's backward."""
        args, kwargs, marked = _replaced(args, kwargs, _viewed)
        if not marked:
            marked = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if not marked and call.unit.diverges and any(group.master is not None for group in call.unit.groups):
            args, kwargs, marked = _replaced(args, kwargs, _with_gradient)
            if not marked:
                self._keep.update(call.unit.groups)
        call.marked = bool(marked)
        for tensor in marked:
            if not tensor.is_leaf:  # a leaf would keep the hook; the call then ends with the backward
                tensor.register_hook(lambda grad: self._close(call))
        return args, kwargs

    def _after_forward(self, unit: Unit, output: Any) -> None:
        if not self.calls[unit]:
            return  # a hook before ours raised
        call = self.calls[unit].pop()
        awaits_backward = self._hook_outputs(call, output) if torch.is_grad_enabled() else False
        if in_backward() or not self.root_depth:
            keep = awaits_backward and in_backward()
        else:
            # Without gradients although the model's forward has them: a checkpoint, which will come back to it.
            keep = unit is self._last_unit and (awaits_backward or not torch.is_grad_enabled())
            if call.brings:  # ranks may differ in the others
                self._forward_order.ended = unit
        self.release(unit.groups, reshard=not keep)

    def _hook_outputs(self, call: _Call, output: Any) -> bool:
        """Ask to be told when the backward reaches this call; says whether it will."""
        if not _needs_weights_in_backward(call.unit.module):
            return False
        found = False
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                hook_first(tensor, lambda grad: self._open_call(call))  # outer units before inner ones
                found = True
        if found and not in_backward():
            call.awaited = True
            self.expected.calls.update(call.unit.groups)
        if not found and output is not None and not isinstance(output, Tensor) and not list(tensors_in(output)):
            self._keep.update(call.unit.groups)  # an output that cannot be looked into: stay until the backward ended
        return found

    # ---- backward

    def _open_call(self, call: _Call) -> None:
        self.on_backward()
        now = torch._C._current_graph_task_id()
        if call.backward == now:
            return
        call.backward, call.open = now, True
        call.unfinished = {group for group in call.unit.groups if group.trains}
        self._open.append(call)
        if self.hold(call.unit.groups):
            self._backward_order.fetch_after(call.unit)

    def _close(self, call: _Call) -> None:
        if call.open:
            call.open = False
            self._open.remove(call)
            self.release(call.unit.groups)
            self.expected.take(call)

    def complete(self, group: FlatGroup) -> None:
        """The group's last gradient is there. Calls that nothing else would close end with the last of their groups."""
        for call in [c for c in self._open if group in c.unfinished]:
            call.unfinished.remove(group)
            if not call.marked and not call.unfinished:
                self._close(call)

    # ---- the model's forward and backward as a whole

    def begin_forward(self) -> None:
        """The model's forward begins; what an earlier one left is put away."""
        self.root_depth += 1
        if self.root_depth == 1 and not in_backward():
            keep_hooks_outside(unit.module for unit in self.calls)
            self.reset()
            self._forward_order.restart()

    def end_forward(self) -> list[FlatGroup]:
        """The model's forward is over, well or not. Returns the groups to `hold` when its backward begins."""
        self.root_depth = max(0, self.root_depth - 1)  # a hook before ours may have raised, so that nothing began
        wanted = sorted(self._keep, key=lambda group: group.ticket)  # they may be gone by then; every rank alike
        if self.root_depth == 0:
            strays, self._strays = self._strays, []
            self.release(strays)
            if not in_backward():
                self._last_unit = self._last_unit or self._forward_order.ended
                if not torch.is_grad_enabled():
                    self.reset()  # no backward will come and put away what was fetched ahead
        return wanted

    def abandon_forward(self) -> None:
        """The model's forward was left in a way after which torch runs no hooks."""
        self.root_depth = 0
        for calls in self.calls.values():
            calls.clear()
        self.reset()

    def reset(self) -> None:
        """Reshard everything that no forward holds: at the end of a backward, and after an exception."""
        self._keep.clear()
        for call in self._open:
            call.open = False
        self._open.clear()
        self._strays.clear()
        self._holders.clear()
        self._backward_order.restart()
        for group in self.groups:
            if not self.pinned[group]:
                group.reshard()

    def remove(self) -> None:
        """Take the hooks off the modules."""
        for handle in self._handles:
            handle.remove()


def _bring(groups: Sequence[FlatGroup]) -> bool:
    """Unshard groups; all are on their way before the first is waited for. Says whether one was not there."""
    missing = [group for group in groups if group.residence is not Residence.UNSHARDED]
    for group in missing:
        group.start_unshard()
    for group in missing:
        group.unshard()
    return bool(missing)


def _needs_weights_in_backward(module: nn.Module) -> bool:
    """The backward of a lookup needs the indices alone."""
    return type(module) is not nn.Embedding


def _replaced(args: Any, kwargs: Any, replace: Callable[[Tensor], Tensor]) -> tuple[Any, Any, list[Tensor]]:
    """The inputs with tensors replaced, each once, and what has come in their place."""
    new: dict[int, Tensor] = {}

    def put(value: Any) -> Any:
        if isinstance(value, Tensor) and id(value) not in new:
            replacement = replace(value)
            if replacement is value:
                return value
            new[id(value)] = replacement
        return new.get(id(value), value)

    return tuple(map(put, args)), {key: put(value) for key, value in kwargs.items()}, list(new.values())


def _viewed(value: Tensor) -> Tensor:
    return value.view_as(value) if value.requires_grad else value


def _with_gradient(value: Tensor) -> Tensor:
    """The same values where a gradient is asked for, if they can have one. Not a view: modules may write into it."""
    return value.detach().requires_grad_().clone() if value.is_floating_point() else value
