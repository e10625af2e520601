"""Modules that torch.compile compiles: our hooks run around the compiled region, never inside it.

[Note: compiled regions]
`module.compile()` compiles the call of a module with its hooks. Ours cannot be compiled (they communicate), and what
was compiled before they were added would not call them. So the compiled call of a module that has hooks of ours is
replaced by one that calls them before and after it; hooks of the user stay inside. `torch.compile(module)` makes a
module of its own, whose hooks are outside as they are.
A region that holds several units would need its weights to come and go inside it, which is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from zrun_runtime.errors import EngineError
from zrun_runtime.hook import Hook


class CompiledCall:
    """The compiled call of a module, with hooks of ours around it; see [Note: compiled regions]."""

    def __init__(self, module: nn.Module, compiled: Callable[..., Any]) -> None:
        self.module, self.compiled = module, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        before = [(key, hook) for key, hook in module._forward_pre_hooks.items() if isinstance(hook, Hook)]
        after = [hook for hook in module._forward_hooks.values() if isinstance(hook, Hook)]
        for key, hook in before:
            if key in module._forward_pre_hooks_with_kwargs:
                args, kwargs = hook.action(module, args, kwargs) or (args, kwargs)
            else:
                hook.action(module, args)
        output = None
        try:
            output = self._inside([hook for _, hook in before] + after, args, kwargs)
        finally:
            for hook in after:
                hook.action(module, args, output)
        return output

    def _inside(self, ours: Iterable[Hook], args: Any, kwargs: Any) -> Any:
        for hook in ours:
            hook.called_outside = True
        try:
            return self.compiled(*args, **kwargs)
        finally:
            for hook in ours:
                hook.called_outside = False


def keep_hooks_outside(modules: Iterable[nn.Module]) -> None:
    """Of modules that are compiled by now."""
    for module in modules:
        compiled = module._compiled_call_impl
        if compiled is not None and not isinstance(compiled, CompiledCall):
            module._compiled_call_impl = CompiledCall(module, compiled)


def refuse_wide_regions(model: nn.Module, units: Iterable[nn.Module]) -> None:
    """Modules whose parameters come and go must not be inside a larger region.

    Raises:
        EngineError: one is; it names the region.
    """
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None or "_orig_mod" in module._modules:  # torch.compile's own module
            refuse_region(name, module, units)


def refuse_region(name: str, region: nn.Module, units: Iterable[nn.Module]) -> None:
    """The same for one module that is, or is to be, compiled."""
    inside = set(region.modules()) - {region}
    if any(unit in inside for unit in units):
        raise EngineError(
            f"compile: {name or 'the model'} is one region, and sharded parameters come and go inside it, which "
            "compiled code does not see",
            "compile the blocks one by one, or use a plan that keeps parameters whole (ZeRO 2)",
        )
