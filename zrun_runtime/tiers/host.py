"""Host memory as seen from the training device: the same, or apart from it."""

from __future__ import annotations

import torch
from torch import Tensor


def is_host(device: torch.device) -> bool:
    """What is on this device is in host memory already, so that nothing has to be copied. Tests replace it, to see the
    other case where there is no other device."""
    return device.type == "cpu"


def host_empty(numel: int, dtype: torch.dtype, pin: bool) -> Tensor:
    """(numel,) in host memory; pin: page-locked, where there is a device that copies from it."""
    return torch.empty(numel, dtype=dtype, pin_memory=pin and torch.cuda.is_available())
