"""Hooks of ours on modules and tensors: what a copy of a module does with them, and which of several runs first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


def in_backward() -> bool:
    """This thread is inside autograd's engine."""
    return torch._C._current_graph_task_id() != -1


def gives_gradients(leaves: Iterable[Tensor]) -> bool:
    """The backward under way will accumulate into one of these leaves; `torch.autograd.grad` and torch.func do not.

    What a reentrant checkpoint hides in a backward of its own is not seen.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False  # inside torch.func.grad, where leaves have no node to ask
    for leaf in leaves:
        if not leaf.requires_grad:
            continue
        with torch._C.DisableTorchFunctionSubclass():
            node = get_gradient_edge(leaf).node
        try:
            if torch._C._will_engine_execute_node(node):
                return True
        except RuntimeError:  # it is an input of autograd.grad
            return False
    return False


class Hook:
    """A hook on a module. A copy of the module, or a pickle of it, has one that does nothing."""

    def __init__(self, action: Callable[..., Any]) -> None:
        self.action = action
        self.called_outside = False  # by a CompiledCall, so that the compiled region does not contain it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if self.called_outside else self.action(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook(_do_nothing)

    def __reduce__(self) -> Any:
        return Hook, (_do_nothing,)


def _do_nothing(*args: Any) -> None:
    pass


def move_to_end(hooks: dict[int, Any], key: int) -> None:
    """Make one hook of an ordered dict of hooks the last to run."""
    hooks[key] = hooks.pop(key)


def hook_first(tensor: Tensor, action: Callable[[Tensor], None]) -> None:
    """Call `action` with the gradient of a tensor before any other hook of the tensor."""
    handle = tensor.register_hook(action)
    hooks: Any = tensor._backward_hooks
    for key in [key for key in hooks if key != handle.id]:
        move_to_end(hooks, key)  # autograd takes them as they were put in, whatever OrderedDict.move_to_end says


def after_accumulation(parameter: Tensor, action: Callable[[Tensor], None]) -> Any:
    """Call `action` when a gradient is in `parameter.grad`; on one that is frozen for now, too. Returns the handle."""
    flag = parameter.requires_grad
    parameter.requires_grad_(True)
    handle = parameter.register_post_accumulate_grad_hook(action)
    parameter.requires_grad_(flag)
    return handle
