"""What an agent is told (JobSpec), what the console is told (JobView, FailureReport)."""

from __future__ import annotations

from dataclasses import dataclass

from zrun.wire import from_line, to_line

MAX_SPEC_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class JobSpec:
    """One host's share of a job: the first line on its agent's stdin."""

    job_id: str
    host: str
    node_rank: int
    node_count: int
    world_size: int
    first_rank: int  # the host's ranks are first_rank .. first_rank + local_world_size - 1
    local_world_size: int
    master_addr: str
    master_port: int
    device: str  # cpu or cuda
    backend: str  # gloo or nccl
    command: tuple[str, ...]  # argv of every worker
    cwd: str
    environment: dict[str, str]  # on top of the agent's own environment
    devices: tuple[str, ...] = ()  # entries for CUDA_VISIBLE_DEVICES, one a rank; empty on the CPU
    local_rank_arg: str = ""  # "--local_rank" or "--local-rank": added to `command` with the rank ...
    local_rank_at: int = 0  # ... at this place
    grace: float = 30.0  # seconds from TERM to KILL
    lease: float = 30.0  # seconds without a line from the launcher after which the job is ended
    log_dir: str = ""  # empty: a temporary directory, removed at success
    bind_cores: bool = False  # each rank to cores of its own
    as_deepspeed: bool = False  # `import deepspeed` means zrun

    def to_line(self) -> bytes:
        """The spec as one JSON line. Undecodable bytes in arguments survive (surrogate escapes)."""
        return to_line(self)

    @classmethod
    def from_line(cls, line: bytes) -> JobSpec:
        """The spec on a line.

        Raises:
            ProtocolError: not a job spec, a field missing or of the wrong type.
        """
        return from_line(cls, line, "the job")


@dataclass(frozen=True)
class JobView:
    """What the console may know of a job before anything has happened."""

    job_id: str
    world_size: int
    hosts: tuple[str, ...]  # names, in order of node rank
    device: str  # cpu or cuda
    backend: str  # gloo or nccl
    master: str  # addr:port
    command: str  # for people: what runs
    verbose: bool = False


@dataclass(frozen=True)
class FailureReport:
    """Why a job failed. Shown last and once."""

    message: str  # one sentence: "rank 3 on node-2 exited with code 3", "node-2 is lost: ..."
    host: str
    rank: int | None  # None: not a worker but the host itself failed
    returncode: int  # as in subprocess: negative = killed by that signal
    exit_code: int  # what zrun itself will exit with
    signal_name: str = ""  # "SIGKILL", if a signal killed the worker
    traceback: str = ""  # the rank's own last traceback, else its last lines of stderr
    same_count: int = 1  # ranks that failed alike, this one included
    others_stopped: int = 0  # ranks that were ended because of it
    hint: str = ""
    positions: tuple[str, ...] = ()  # where the ranks stood still: a line for each place, those behind first
    log_path: str = ""  # directory on `host` with the output of the failing rank (of the whole host if rank is None)
