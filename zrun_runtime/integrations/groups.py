"""`deepspeed.utils.groups`: every rank is a data-parallel rank, and alone in every other kind of group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def _get_data_parallel_group() -> Any:
    """All ranks."""
    return dist.group.WORLD


def _get_data_parallel_world_size() -> int:
    """How many there are."""
    return dist.get_world_size()


def _get_data_parallel_rank() -> int:
    """The number of this one among them."""
    return dist.get_rank()


def _alone() -> int:
    """Ranks in a group of any other kind."""
    return 1


def _first() -> int:
    """The number of this rank in it."""
    return 0


def _no_group() -> None:
    """There is no such group."""


_get_world_group = _clone_world_group = _get_data_parallel_group
_get_sequence_data_parallel_group = _get_data_parallel_group
_get_sequence_data_parallel_world_size = _get_data_parallel_world_size
_get_sequence_data_parallel_rank = _get_data_parallel_rank
_get_model_parallel_world_size = _get_sequence_parallel_world_size = _get_tensor_model_parallel_world_size = _alone
get_tensor_model_parallel_world_size = get_model_parallel_world_size = _alone
_get_sequence_parallel_rank = get_tensor_model_parallel_rank = get_model_parallel_rank = _first
_get_sequence_parallel_group = get_tensor_model_parallel_group = get_model_parallel_group = _no_group
