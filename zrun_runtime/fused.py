"""torch's fused Adam on one strip of a group, without the optimizer's own Python around the kernel.

That Python takes 50 microseconds, and up to 280 where a strip has just gone through the cache: half of what the kernel
takes for a strip of a million. The arithmetic is the same to the bit.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

_MOMENTS = ("exp_avg", "exp_avg_sq")


def steps_like_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Its steps are those of torch's Adam or AdamW."""
    return inspect.unwrap(type(optimizer).step) is inspect.unwrap(torch.optim.Adam.step)


class StripAdam:
    """A step of Adam or AdamW on strips whose state exists.

    Attributes:
        scalars: the group's, after the step.
    """

    def __init__(self, options: Mapping[str, Any], step: Tensor, scale: float) -> None:
        """options: of the optimizer group. scale: of the gradient."""
        self.scalars = {"step": step + 1}
        self._kernel = torch._fused_adamw_ if options["decoupled_weight_decay"] else torch._fused_adam_
        self._divisor = torch.full((), 1.0 / scale, device=step.device)
        names = ("amsgrad", "lr", "weight_decay", "eps", "maximize")
        beta1, beta2 = map(float, options["betas"])
        self._options = {"beta1": beta1, "beta2": beta2, **{name: options[name] for name in names}}

    @staticmethod
    def fits(options: Mapping[str, Any], scalars: Mapping[str, Any], moments: Collection[str]) -> bool:
        """The optimizer's step is the kernel's: it is the fused one, and the state is there."""
        if not options["fused"] or set(scalars) != {"step"}:
            return False
        wanted = {*_MOMENTS, "max_exp_avg_sq"} if options["amsgrad"] else set(_MOMENTS)
        elsewhere = isinstance(options["lr"], Tensor) and options["lr"].device != scalars["step"].device
        return set(moments) == wanted and not elsewhere

    def __call__(self, parameter: Tensor, state: Mapping[str, Tensor], grad: Tensor, scale: float) -> None:
        """Update all (numel,) tensors of a strip in place. scale: what of the gradient's is not yet applied, or 1."""
        largest = [state["max_exp_avg_sq"]] if self._options["amsgrad"] else []
        averages, squares = ([state[name]] for name in _MOMENTS)
        self._kernel(
            [parameter], [grad], averages, squares, largest, [self.scalars["step"]],
            grad_scale=self._divisor if scale != 1.0 else None, found_inf=None, **self._options,
        )  # fmt: skip
