"""Small helpers under DeepSpeed's names."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger("DeepSpeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks only; on all if none are named or one is -1."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, f"[Rank {rank}] {message}")


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """The same nest of dicts, lists and tuples with its tensors cloned onto `device`, so a view saves itself alone."""
    if isinstance(item, Tensor):
        return item.detach().clone().to(device)
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    if isinstance(item, dict):
        return type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())
    return item
