"""The hooks on the model as a whole: when a forward or backward of it begins and ends, and what an exception leaves.

[Note: the ends of a backward]
A reentrant checkpoint runs a backward inside the backward, and autograd's final callbacks run at the end of the inner
one too. So the outermost is known by its first event: the gradient of the model's output, which no inner one brings.
`Engine.backward` does not need the callback at all: it knows when its own call returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from zrun_runtime.compiled import keep_hooks_outside, refuse_wide_regions
from zrun_runtime.holder import ShardHolder
from zrun_runtime.hook import Hook, gives_gradients, hook_first, in_backward
from zrun_runtime.reducer import GradReducer
from zrun_runtime.telemetry import notice
from zrun_runtime.tree import tensors_in


class ModelHooks:
    """The hooks on the model as a whole: when a backward begins and ends, and the last word after an exception."""

    def __init__(
        self, model: nn.Module, holder: ShardHolder, reducer: GradReducer, on_forward: Callable[[], None]
    ) -> None:
        self.holder, self.reducer, self.on_forward = holder, reducer, on_forward
        self._outer = -1  # autograd's number of the outermost backward under way; -1: none
        holder.on_backward = reducer.on_gradient = self._note_backward
        reducer.on_complete, holder.expected.on_concluded = holder.complete, reducer.conclude
        self._handles = [
            model.register_forward_pre_hook(Hook(self._before), prepend=True),
            model.register_forward_hook(Hook(self._after), always_call=True),
        ]
        keep_hooks_outside([model])
        refuse_wide_regions(model, [unit.module for unit in holder.calls])

    def _before(self, model: nn.Module, args: Any) -> None:
        if self._outer != -1 and not in_backward():
            self.abandon_backward()
        if not self.holder.root_depth and not in_backward():
            self.on_forward()
        self.reducer.stay_last()
        self.holder.begin_forward()

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        wanted = self.holder.end_forward()

        def begin(grad: Tensor) -> None:
            self._note_backward()
            self.holder.hold(wanted)

        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    hook_first(tensor, begin)

    def _note_backward(self) -> None:
        if self._outer == -1:
            window = self.reducer.window
            leaves = (p for grads in self.reducer.order for p in grads.group.spec.parameters)
            self.reducer.idle = not window.driven and not gives_gradients(leaves)
            if not window.driven and not self.reducer.idle:
                window.on_plain_backward()
            self._outer = torch._C._current_graph_task_id()
            if not window.driven:
                Variable._execution_engine.queue_callback(self.end_backward)

    def end_backward(self) -> None:
        """The outermost backward is over."""
        self._outer = -1
        self.reducer.finish_backward()
        self.holder.expected.calls.clear()
        self.holder.reset()

    def abandon_backward(self) -> None:
        """A backward ended with an exception: drop its gradients, which are one sum with earlier ones, and reshard."""
        self._outer = -1
        done = self.reducer.window.done
        if done:
            rank = self.reducer.collectives.world.rank
            notice("warning", f"a backward failed: the gradients of {done} micro-batches before it are lost too", rank)
        self.reducer.drop()
        self.holder.expected.calls.clear()
        self.holder.reset()

    @property
    def gone(self) -> bool:
        """Somebody else took them off the model."""
        return any(
            held is None or handle.id not in held for handle in self._handles for held in [handle.hooks_dict_ref()]
        )

    def remove(self) -> None:
        """Take every hook off the model."""
        for handle in self._handles:
            handle.remove()
        self.holder.remove()
        self.reducer.remove()
