"""`deepspeed.comm`: torch.distributed, with DeepSpeed's way of starting it.

[Note: accelerate on the CPU]
Where accelerate finds no GPU and was not told to use the CPU, it picks no backend, asks `is_initialized()`, maybe calls
`init_distributed(None)`, and then believes to be alone, on every rank: each rank trains on all the data. Its state is
under construction at that moment, and it reads the world from torch.distributed if it has a backend; so we tell it the
one that is in use.
`initialize` checks the outcome, and refuses to train if accelerate still counts other ranks than there are.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import zrun_runtime
from zrun_runtime.distributed import DEFAULT_TIMEOUT, local_rank
from zrun_runtime.errors import DistributedError
from zrun_runtime.telemetry import notice

TORCH_DISTRIBUTED_DEFAULT_PORT, default_pg_timeout = 29500, DEFAULT_TIMEOUT


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta = DEFAULT_TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """As zrun_runtime.init_distributed; also tells accelerate of the backend ([Note: accelerate on the CPU])."""
    zrun_runtime.init_distributed(
        dist_backend,
        auto_mpi_discovery,
        distributed_port,
        verbose,
        timeout,
        init_method,
        dist_init_required,
        config,
        rank,
        world_size,
    )
    _tell_accelerate()


def is_initialized() -> bool:
    """There is a process group; also tells accelerate of its backend ([Note: accelerate on the CPU])."""
    _tell_accelerate()
    return dist.is_initialized()


def get_world_group() -> Any:
    """All ranks."""
    return dist.group.WORLD


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The ranks of a group, in its order."""
    return dist.get_process_group_ranks(group)


def has_all_gather_into_tensor() -> bool:
    """There is such a function."""
    return True


has_reduce_scatter_tensor = has_all_gather_into_tensor


def get_local_rank() -> int:
    """The number of this process among those of its host."""
    return local_rank()


def _accelerate_state() -> dict[str, Any]:
    """What accelerate knows of the process; empty where it is not in use."""
    module = sys.modules.get("accelerate.state")
    return getattr(getattr(module, "PartialState", None), "_shared_state", {})


def _tell_accelerate() -> None:
    state = _accelerate_state()
    constructing = "backend" in state and "num_processes" not in state
    if constructing and state["backend"] is None and dist.is_initialized() and dist.get_world_size() > 1:
        state["backend"] = dist.get_backend()
        if dist.get_rank() == 0:
            notice("info", f"accelerate finds no GPU and uses {state['backend']}, so that it sees every rank")


def check_accelerate() -> None:
    """See [Note: accelerate on the CPU].

    Raises:
        DistributedError: accelerate counts other ranks than there are.
    """
    believed = _accelerate_state().get("num_processes")
    if believed is not None and dist.is_initialized() and believed != dist.get_world_size():
        raise DistributedError(
            f"accelerate believes in {believed} process(es), but there are {dist.get_world_size()}: "
            "each rank would train on the same data",
            "pass TrainingArguments(use_cpu=True), or Accelerator(kwargs_handlers="
            '[InitProcessGroupKwargs(backend="gloo")])',
        )
