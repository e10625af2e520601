"""What the user asked for, checked as far as that is possible without looking at the machine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zrun.errors import UsageError

LOCAL_RANK_STYLES = {"off": "", "_": "--local_rank", "-": "--local-rank"}


@dataclass(frozen=True)
class LaunchConfig:
    """One launch."""

    script: str = ""  # empty: the built-in smoke job
    script_args: tuple[str, ...] = ()
    hostfile: str = ""  # empty: the default one, a Slurm allocation, or this machine
    include: str = ""  # hosts and slots, zrun.filters
    exclude: str = ""
    num_nodes: int | None = None  # None: all
    num_gpus: int | None = None  # a host. None: all slots; of this machine: one a GPU, or one on the CPU
    backend: str = "auto"  # auto, nccl or gloo
    device: str = "auto"  # auto, cpu or cuda
    master_addr: str = ""  # empty: chosen
    master_port: int | None = None  # None: a free one
    module: bool = False
    no_python: bool = False
    local_rank_arg: str = "off"  # a key of LOCAL_RANK_STYLES
    env: tuple[str, ...] = ()  # NAME=VALUE or NAME
    env_file: tuple[str, ...] = ()
    log_dir: str = ""
    grace: float = 30.0  # seconds
    lease: float = 30.0  # seconds
    dry_run: bool = False
    plain: bool = False
    json: bool = False
    verbose: bool = False

    def __post_init__(self) -> None:
        """Raises UsageError for options that cannot be right together."""
        if self.module and self.no_python:
            raise UsageError("--module and --no_python do not go together: a module is run by Python", "drop one")
        if self.plain and self.json:
            raise UsageError("--plain and --json do not go together", "drop one")
        if (self.module or self.no_python) and not self.script:
            raise UsageError("--module and --no_python need something to run", "name it after the options")
        if math.isnan(self.grace) or math.isnan(self.lease):
            raise UsageError("--grace and --lease are numbers of seconds")
        if self.local_rank_arg not in LOCAL_RANK_STYLES:
            styles = ", ".join(LOCAL_RANK_STYLES)
            raise UsageError(f"--local_rank_arg {self.local_rank_arg}: not one of {styles}", "`_` is the usual one")

    @property
    def may_use_gpus(self) -> bool:
        """Whether GPUs are asked for, or taken if they are there."""
        return self.device == "cuda" or (self.device == "auto" and self.backend != "gloo")
