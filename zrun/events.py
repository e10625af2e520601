"""What agents and workers tell the launcher: frozen dataclasses, one JSON line each.

A line is `{"event": <kind>, <field>: <value>, ...}`, UTF-8, ended by a newline, at most MAX_LINE_BYTES long.
docs/protocol.md lists every kind; tests/test_contract.py holds the runtime's side to it. Unknown *fields* are
ignored, so that a newer runtime can talk to an older launcher; unknown kinds and wrong types are refused.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from zrun.errors import ProtocolError

PROTOCOL = 1
MAX_LINE_BYTES = 256 * 1024
MAX_TEXT_CHARS = 64 * 1024


@dataclass(frozen=True)
class Event:
    """Base: every event knows its kind (the word on the wire)."""

    kind: ClassVar[str] = ""


# ---- said by workers, through ZRUN_EVENT_FD -------------------------------------------------------------------


@dataclass(frozen=True)
class RunStarted(Event):
    """An engine was built on this rank. `details` are label/value pairs in words, in the order to show them."""

    kind: ClassVar[str] = "run_started"
    rank: int
    steps_per_print: int | None  # None: never print a line
    total_steps: int | None = None  # None: not known
    details: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class StepDone(Event):
    """One optimizer step (applied or skipped) is done. Said by rank 0 only, for all ranks."""

    kind: ClassVar[str] = "step"
    rank: int
    step: int  # optimizer steps so far, this one included
    seconds: float  # wall time since the step before
    samples: int  # samples of all ranks in this step
    skipped_steps: int  # so far
    loss: float | None = None  # mean over micro-batches and ranks; None if the engine never saw a loss
    learning_rate: float | None = None
    loss_scale: float | None = None  # None: no loss scaling
    grad_norm: float | None = None  # global L2 norm before clipping; None if not finite
    total_steps: int | None = None
    due: bool = False  # True every steps_per_print steps: a line is owed where lines are printed


@dataclass(frozen=True)
class MemoryUsed(Event):
    """What this rank holds, said about once a second. Bytes."""

    kind: ClassVar[str] = "memory"
    rank: int
    used: int  # device memory in use; without a device, resident memory of the process
    peak: int


@dataclass(frozen=True)
class Notice(Event):
    """A sentence for the person at the console. level: info, warning or error."""

    kind: ClassVar[str] = "notice"
    rank: int
    level: str
    text: str
    from_watch: bool = False  # it tells of silence, so it does not end one


@dataclass(frozen=True)
class RankPosition(Event):
    """Where this rank stands still, said when it has done so for a second, and about once a second if that changes."""

    kind: ClassVar[str] = "position"
    rank: int
    operation: int  # how many operations it has begun that all ranks run in one order
    step: int  # optimizer steps done
    text: str  # what it does there; empty: it goes on
    since: float  # seconds since the epoch, its own clock


# ---- said by agents ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AgentAlive(Event):
    """The answer to a heartbeat."""

    kind: ClassVar[str] = "alive"
    silent: float | None = None  # seconds since a byte came from any rank; None: none ever did


@dataclass(frozen=True)
class WorkerStarted(Event):
    kind: ClassVar[str] = "worker_started"
    rank: int
    local_rank: int
    pid: int
    log_dir: str = ""  # directory on its host with the files `stdout` and `stderr`


@dataclass(frozen=True)
class WorkerOutput(Event):
    """One line of a worker, without its newline.

    `partial` marks a line cut at the length limit, `transient` a state of a progress bar that a later line replaces.
    """

    kind: ClassVar[str] = "output"
    rank: int
    stream: str  # stdout or stderr
    text: str
    partial: bool = False
    transient: bool = False


@dataclass(frozen=True)
class OutputDropped(Event):
    """The console could not keep up: these lines are only in the file, or nowhere if `path` is empty."""

    kind: ClassVar[str] = "output_dropped"
    rank: int
    stream: str
    lines: int
    path: str


@dataclass(frozen=True)
class WorkerExited(Event):
    """A worker is gone. `stopped` is True when the agent ended it, so it is not the cause of a failure."""

    kind: ClassVar[str] = "worker_exited"
    rank: int
    returncode: int  # as in subprocess: negative = killed by that signal
    stopped: bool
    at: float  # when it failed, else ended: seconds since the epoch, the agent's clock
    traceback: str = ""  # the last traceback on its stderr, else its last lines; empty if it exited with 0
    hint: str = ""  # what the agent can say about the reason (out of memory, full /dev/shm)


@dataclass(frozen=True)
class AgentFailed(Event):
    """The agent cannot run the job (script missing, fork refused). It ends after this."""

    kind: ClassVar[str] = "agent_failed"
    message: str
    hint: str = ""
    exit_code: int = 1


@dataclass(frozen=True)
class AgentDone(Event):
    """Every worker of this host is gone and nothing of the job is left. The last line of an agent."""

    kind: ClassVar[str] = "agent_done"
    log_dir: str = ""  # where the spool files lie; empty if they were removed


KINDS: dict[str, type[Event]] = {
    c.kind: c
    for c in (
        RunStarted,
        StepDone,
        MemoryUsed,
        Notice,
        RankPosition,
        AgentAlive,
        WorkerStarted,
        WorkerOutput,
        OutputDropped,
        WorkerExited,
        AgentFailed,
        AgentDone,
    )
}
WORKER_KINDS = frozenset({RunStarted.kind, StepDone.kind, MemoryUsed.kind, Notice.kind, RankPosition.kind})


def encode(event: Event) -> bytes:
    """One event as one line, newline included."""
    fields = dataclasses.asdict(event)
    line = json.dumps({"event": event.kind, **fields}, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return line.encode("utf-8", "replace") + b"\n"


def decode(line: bytes | str) -> Event:
    """The event on one line.

    Raises:
        ProtocolError: not JSON, too long, of unknown kind, a field missing, of the wrong type or out of bounds.
    """
    if len(line) > MAX_LINE_BYTES:
        raise ProtocolError(f"an event line of {len(line)} bytes is longer than {MAX_LINE_BYTES}")
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not an event line: {str(line[:80])!s} ({error})") from None
    kind = data.get("event") if isinstance(data, dict) else None
    cls = KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ProtocolError(f"not an event of protocol {PROTOCOL}: {str(line[:80])!s}")
    values = {}
    for field in dataclasses.fields(cls):
        if field.name not in data:
            if field.default is dataclasses.MISSING:
                raise ProtocolError(f"event {kind!r} lacks the field {field.name!r}")
            continue
        values[field.name] = _checked(kind, field, data[field.name])
    return cls(**values)


def _checked(kind: Any, field: dataclasses.Field[Any], value: Any) -> Any:
    """`value` as the field's type, or ProtocolError. The annotations are strings (PEP 563)."""
    declared = str(field.type)
    if value is None and declared.endswith("| None"):
        return None
    base = declared.removesuffix(" | None")
    if base.startswith("tuple["):
        pairs = isinstance(value, list) and len(value) <= 100
        if pairs and all(isinstance(p, list) and len(p) == 2 and all(isinstance(x, str) for x in p) for p in value):
            return tuple((p[0][:MAX_TEXT_CHARS], p[1][:MAX_TEXT_CHARS]) for p in value)
    elif base == "bool":
        if isinstance(value, bool):
            return value
    elif base == "int":
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
            return value
    elif base == "float":
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    elif isinstance(value, str) and len(value) <= MAX_TEXT_CHARS:
        return value
    raise ProtocolError(f"event {kind!r}: the field {field.name!r} is not a valid {declared}")
