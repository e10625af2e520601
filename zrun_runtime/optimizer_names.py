"""Names that DeepSpeed's wrapper of an optimizer has, on the torch optimizer itself: there is no wrapper here.

accelerate asks `overflow` whether to leave its own schedule where it is; TRL takes the hooks of stage 3 off through
`parameter_offload` while it generates, which is not needed here: what GatheredParameters holds stays.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class _NoParameters(nn.Module):
    """What TRL looks through for parameters that hooks are busy with."""

    def ds_external_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """None."""
        return []


class ParameterOffload:
    """Hooks that others may remove and register again: none."""

    def __init__(self) -> None:
        self.module = _NoParameters()
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Has no effect: nothing was removed."""


def name_optimizer(optimizer: torch.optim.Optimizer, clip: float, dynamic: bool, sharded: bool) -> None:
    """Give an optimizer the names whose answers stay.

    Args:
        clip: the largest L2 norm of the gradient; 0: any.
        dynamic: the loss scale adapts.
        sharded: parameters come and go.
    """
    facts: dict[str, Any] = {"clip_grad": clip, "dynamic_loss_scale": dynamic, "overflow": False}
    if sharded:
        facts["parameter_offload"] = ParameterOffload()
    vars(optimizer).update(facts)


def tell_optimizer(optimizer: torch.optim.Optimizer, *, overflow: bool, loss_scale: float, norm: float | None) -> None:
    """Give an optimizer the answers of the last step: skipped or not, the scale of the next, the norm."""
    vars(optimizer).update(overflow=overflow, loss_scale=loss_scale, cur_scale=loss_scale, _global_grad_norm=norm)
