"""From a launcher's environment to a process group, a rank and a device.

zrun and torchrun set RANK, WORLD_SIZE, LOCAL_RANK and MASTER_*; srun and Open MPI set their own names. Without any of
them the process is a world of one and needs no process group.

[Note: the imagined world]
Over torch's backend "fake" one process is one rank of a world of any size: nothing is sent, and the device is meta,
where tensors have shapes and no values. The engine lays a model out, trains and counts bytes as it would there. What
only values could tell is assumed: other ranks say what this one says, and gradients are finite.
"""

from __future__ import annotations

import atexit
import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from zrun_runtime.errors import DistributedError
from zrun_runtime.telemetry import notice
from zrun_runtime.uncaught import show_short

DEFAULT_TIMEOUT = timedelta(minutes=30)
_SOONER = 0.9  # the control group's time-out, of the training group's
_HOW_TO_START = "start the script with zrun or torchrun"
# The names under which each launcher tells the same four facts, in the order in which they are looked for.
_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
# Of Slurm that of the step: SLURM_NTASKS is set wherever an allocation is, in a shell too, whose tasks are not ranks.
_WORLD_SIZE = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


@dataclass(frozen=True)
class World:
    """The ranks that train together, and this process's place among them.

    data: moves tensors of the training device; control: moves a few numbers of host memory (always gloo, and the same
    group as `data` on CPU). Both are None in a world of one that never built a process group.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    backend: str
    data: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None

    @property
    def imagined(self) -> bool:
        """See [Note: the imagined world]."""
        return "fake" in self.backend


_control_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta = DEFAULT_TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Build the default process group from the environment, unless there is one.

    The parameters are those of `deepspeed.init_distributed`; `auto_mpi_discovery`, `verbose` and `config` have no
    effect here. A world of one gets a process group too when an address for it is known, so that scripts may call
    `torch.distributed` themselves. A group made here is destroyed when the process ends.

    Raises:
        DistributedError: the environment is contradictory, or the group cannot be built.
    """
    if not dist.is_initialized() and dist_init_required is not False:
        _init_process_group(dist_backend, distributed_port, timeout, init_method, rank, world_size)
    show_short()


def _init_process_group(
    dist_backend: str | None, port: int, timeout: timedelta, init_method: str | None, rank: int, world_size: int
) -> None:
    numbered = rank >= 0 or any(name in os.environ for name in _RANK)
    rank = rank if rank >= 0 else _number(_RANK, 0)
    world_size = world_size if world_size > 0 else _number(_WORLD_SIZE, 1)
    if world_size > 1 and not numbered:
        raise DistributedError(f"WORLD_SIZE={world_size}, but RANK is not set", _HOW_TO_START)
    if not 0 <= rank < world_size:
        raise DistributedError(f"RANK={rank} does not fit WORLD_SIZE={world_size}", _HOW_TO_START)
    backend = _backend(dist_backend, rank)
    atexit.register(_destroy)  # torch may abort a process that ends with its group alive
    if world_size == 1 and init_method is None and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(port))
    try:
        dist.init_process_group(
            backend, init_method=init_method or "env://", rank=rank, world_size=world_size, timeout=timeout
        )
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise DistributedError(
            f"rank {rank} of {world_size} on {socket.gethostname()} could not join the {backend} group at {where}: "
            f"{error}",
            "is rank 0 alive, is the port free there, and does a firewall let it through?",
        ) from error


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def current_world() -> World:
    """The world as it is now; builds the process group when the environment speaks of several ranks."""
    if not dist.is_initialized():
        init_distributed()
    group = dist.group.WORLD
    if group is None:
        raise DistributedError("the default process group is gone", "call zrun_runtime.init_distributed() first")
    backend = dist.get_backend(group)
    local = local_rank()
    device = training_device(local, backend)
    control = group if "gloo" in backend or "fake" in backend else _control_groups.get(group)
    if control is None:
        # Its error names ranks and modules; NCCL's own time-out, which ends the process, must not come first.
        timeout = _SOONER * group_timeout(group, device)
        control = _control_groups[group] = dist.new_group(backend="gloo", timeout=timeout)
    return World(
        dist.get_rank(group),
        dist.get_world_size(group),
        local,
        device,
        backend,
        group,
        control,
    )


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long a process group waits for a rank. torch tells it only where its options are kept in Python."""
    options = getattr(group._get_backend(device), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return DEFAULT_TIMEOUT if timeout is None else timeout


def _backend(asked: str | None, rank: int) -> str:
    """The backend to use. Scripts that name NCCL run without a GPU too, over gloo, which is told.

    Raises:
        DistributedError: there is no such backend.
    """
    if asked is None:
        return os.environ.get("ZRUN_BACKEND") or ("nccl" if wants_cuda() else "gloo")
    names = [part.rpartition(":")[2] for part in asked.split(",")]
    if "nccl" in names and not wants_cuda():
        if rank == 0:
            notice("info", f"init_distributed: {asked} needs a GPU, and none is used: the backend is gloo")
        return "gloo"
    for name in names:
        if not dist.is_backend_available(name):
            raise DistributedError(f"init_distributed: there is no backend {name} here", "use gloo, or nccl with a GPU")
    return asked


def first_world_size() -> int | None:
    """Ranks that the job had before zrun started it again; None if it is the first start, or nobody says.

    Raises:
        DistributedError: what is said is not a number.
    """
    # Without a restart a smaller world is no loss: a worker may start something of its own with fewer ranks.
    restarted = _number(("ZRUN_RESTART_COUNT",), 0) > 0
    return _number(("ZRUN_FIRST_WORLD_SIZE",), 0) or None if restarted else None


def training_device(local_rank: int, backend: str) -> torch.device:
    """The device this rank trains on: ZRUN_DEVICE if the launcher said so, else a GPU if the backend can reach it."""
    if "fake" in backend:
        return torch.device("meta")
    if not wants_cuda() or "nccl" not in backend:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise DistributedError(
            f"local rank {local_rank} has no GPU: {count} visible", "start fewer ranks, or check CUDA_VISIBLE_DEVICES"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def local_rank() -> int:
    """The number of this process among those of its host."""
    return _number(_LOCAL_RANK, 0)


def wants_cuda() -> bool:
    """There is a GPU, and the launcher did not choose the CPU."""
    return os.environ.get("ZRUN_DEVICE", "cuda") == "cuda" and torch.cuda.is_available()


def _number(names: tuple[str, ...], default: int) -> int:
    """The first of these environment variables that is set, as a number.

    Raises:
        DistributedError: it is set but is not a number.
    """
    for name in names:
        text = os.environ.get(name)
        if text is None:
            continue
        if not text.isdecimal():
            raise DistributedError(f"{name}={text!r} is not a number", _HOW_TO_START)
        return int(text)
    return default
