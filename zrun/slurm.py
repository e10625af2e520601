"""The hosts of a Slurm allocation, from the variables that it sets. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from zrun.errors import UsageError
from zrun.hostfile import Host
from zrun.hostlist import PatternError, expand, split_names

_NODES = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
_GPUS = ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")
_COUNT = re.compile(r"(?:.*:)?(\d{1,6})(?:\(.*\))?\Z")  # 4, a100:4, gpu:a100:4(S:0-1)
_TASKS = re.compile(r"(\d{1,6})(?:\(x(\d{1,6})\))?\Z")  # of SLURM_TASKS_PER_NODE, one node or x nodes: 2(x3)


def hosts_of_allocation(environ: Mapping[str, str], on_gpu: bool, num_gpus: int | None) -> tuple[Host, ...]:
    """The nodes of the allocation that this process is in; none outside of one.

    The slots of a node are its GPUs: SLURM_GPUS_ON_NODE, else SLURM_GPUS_PER_NODE. Without those, or on the CPU, they
    are the tasks: SLURM_NTASKS_PER_NODE, else SLURM_TASKS_PER_NODE, else 1. Tasks are only a wish, so `num_gpus`
    replaces them.

    Args:
        on_gpu: whether the job may run on GPUs.

    Raises:
        UsageError: a variable that cannot be read, or zrun is started once for each task.
    """
    variable = next((name for name in _NODES if environ.get(name)), None)
    if variable is None:
        return ()
    if _number(environ, "SLURM_STEP_NUM_TASKS", 1) > 1:
        raise UsageError(
            f"srun started zrun {environ['SLURM_STEP_NUM_TASKS']} times, and each would start the whole job",
            "start zrun once, without srun or with srun --ntasks=1; or name the machines with --hostfile",
        )
    try:
        names = [name for part in split_names(environ[variable]) for name in expand(part)]
    except PatternError as error:
        raise UsageError(f"{variable}={environ[variable]}: {error.message}", "name the hosts with --hostfile") from None
    slots = _slots(environ, len(names), on_gpu, num_gpus)
    return tuple(Host(name, count, where=variable) for name, count in zip(names, slots, strict=True))


def _slots(environ: Mapping[str, str], nodes: int, on_gpu: bool, num_gpus: int | None) -> list[int]:
    gpus = next((name for name in _GPUS if environ.get(name)), None)
    if on_gpu and gpus is not None:
        return [_number(environ, gpus, 0)] * nodes
    if num_gpus is not None:
        return [num_gpus] * nodes
    if environ.get("SLURM_NTASKS_PER_NODE"):
        return [_number(environ, "SLURM_NTASKS_PER_NODE", 1)] * nodes
    counts: list[int] = []
    for part in filter(None, environ.get("SLURM_TASKS_PER_NODE", "").split(",")):
        match = _TASKS.match(part)
        if match is None:
            raise UsageError(f"SLURM_TASKS_PER_NODE={environ['SLURM_TASKS_PER_NODE']} cannot be read", "use --hostfile")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts if len(counts) == nodes else [1] * nodes


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    match = _COUNT.match(text)
    if text and match is None:
        raise UsageError(f"{name}={text} is not a number", "name the hosts and their slots with --hostfile")
    return int(match[1]) if match else default
