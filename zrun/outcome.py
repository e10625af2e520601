"""How a job ended: which failure came first, what it is called, and the exit code it leads to. Pure."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from zrun.advice import advice_for
from zrun.errors import HostLostError, ZrunError
from zrun.events import AgentDone, AgentFailed, Event, RankPosition, WorkerExited, WorkerStarted
from zrun.job import FailureReport, JobSpec
from zrun.outputs import likeness
from zrun.stall import first_ranks, position_lines, stall_report
from zrun.transport.base import AgentEnd

_SLOW_END_SECONDS = 10.0  # from a traceback to the end of its process


@dataclass
class HostState:
    """What is known of one host's share."""

    spec: JobSpec
    skew: float = 0.0  # seconds that its clock is ahead of ours
    log_dirs: dict[int, str] = field(default_factory=dict)  # by rank
    pids: dict[int, int] = field(default_factory=dict)  # by rank
    exits: dict[int, WorkerExited] = field(default_factory=dict)  # by rank
    positions: dict[int, RankPosition] = field(default_factory=dict)  # by rank, of those that stand still
    failed: AgentFailed | None = None
    done: AgentDone | None = None
    lost: ZrunError | None = None  # the link ended before the agent was done
    end: AgentEnd | None = None  # how its agent came to an end, where `lost` asks for that

    @property
    def complete(self) -> bool:
        """Every worker ended with 0, unasked, and the agent has cleaned up."""
        well = [e for e in self.exits.values() if e.returncode == 0 and not e.stopped]
        return self.done is not None and len(well) == self.spec.local_world_size

    @property
    def log_dir(self) -> str:
        """Where the files of all its ranks are, as far as is known; empty if they were removed."""
        if self.done is not None:
            return self.done.log_dir
        return next((os.path.dirname(path) for path in self.log_dirs.values() if path), "")

    def log_dir_of(self, rank: int) -> str:
        """Where the files of one rank are; empty if they were removed, as there was nothing in them."""
        removed = self.done is not None and not self.done.log_dir
        return "" if removed else self.log_dirs.get(rank, "")

    @property
    def failures(self) -> list[WorkerExited]:
        """The workers that failed by themselves."""
        return [e for e in self.exits.values() if e.returncode != 0 and not e.stopped]


class Outcome:
    """Collects what happens on all hosts. The first thing that goes wrong decides.

    Args:
        skews: by how many seconds the clock of each host is ahead of ours.
    """

    def __init__(self, specs: Sequence[JobSpec], skews: Sequence[float] = ()) -> None:
        self.hosts = [HostState(spec, skew) for spec, skew in zip(specs, skews or (0.0,) * len(specs), strict=True)]
        self.interrupted_by: int | None = None  # the signal that ended the launcher
        self._first: HostState | None = None  # the host on which something went wrong first
        self._silent_seconds: float | None = None  # all ranks were, and were ended for it

    @property
    def failed(self) -> bool:
        """Something went wrong, or somebody wants the end."""
        return self._first is not None or self.interrupted_by is not None

    def take(self, place: int, event: Event) -> None:
        """An event of a host."""
        host = self.hosts[place]
        if isinstance(event, WorkerStarted):
            host.log_dirs[event.rank] = event.log_dir
            host.pids[event.rank] = event.pid
        elif isinstance(event, WorkerExited):
            host.exits[event.rank] = event
        elif isinstance(event, RankPosition):
            self._note_position(host, event)
        elif isinstance(event, AgentFailed):
            host.failed = host.failed or event
        elif isinstance(event, AgentDone):
            host.done = event
        if host.failures or host.failed is not None:
            self._blame(host)

    def _note_position(self, host: HostState, event: RankPosition) -> None:
        if event.text:
            host.positions[event.rank] = event
        else:
            host.positions.pop(event.rank, None)

    def close(self, place: int, error: ZrunError | None) -> None:
        """The link to a host has ended."""
        host = self.hosts[place]
        if host.done is None or error is not None:
            host.lost = error or HostLostError("its agent ended before the job did")
            self._blame(host)
        elif not host.complete and not self.failed:
            host.lost = HostLostError("its agent left before all workers had ended by themselves")
            self._blame(host)

    def interrupt(self, number: int) -> None:
        """A signal tells the launcher to end."""
        if not self.failed:
            self.interrupted_by = number

    def stall(self, seconds: float) -> None:
        """All ranks were silent; what they are ended with shows their stacks."""
        if not self.failed:
            self._silent_seconds = seconds
            self._first = self.hosts[0]

    def _blame(self, host: HostState) -> None:
        if not self.failed:
            self._first = host

    # ---- the verdict -----------------------------------------------------------------------------------------------

    @property
    def exit_code(self) -> int:
        """What the launcher exits with: never 0 unless every worker did."""
        if self.interrupted_by is not None:
            return 128 + self.interrupted_by
        report = self.report()
        return report.exit_code if report is not None else 0

    def report(self) -> FailureReport | None:
        """The failure; None for success and for an interrupted job."""
        host = self._first
        if host is None:
            return None
        if self._silent_seconds is not None:
            exits = [(h.spec.host, e, h.log_dir_of(e.rank)) for h in self.hosts for e in h.exits.values()]
            return stall_report(self._silent_seconds, exits, self._positions())
        if host.failures:
            return self._worker_report(*self._earliest())
        report = _agent_report(host, host.failed) if host.failed is not None else _lost_report(host)
        return dataclasses.replace(report, others_stopped=self._others_stopped(set()))

    def _positions(self) -> dict[int, RankPosition]:
        return {rank: one for host in self.hosts for rank, one in host.positions.items()}

    def _earliest(self) -> tuple[HostState, WorkerExited]:
        """Of all failures the first, by one clock: a crash takes others along sooner than it is heard of.

        One that was at its traceback already when those failed, and so slow to end that it was stopped, counts too.
        """
        exits = [(self._when(host, event), host, event) for host in self.hosts for event in host.exits.values()]
        first = min((entry for entry in exits if entry[2] in entry[1].failures), key=lambda entry: entry[0])
        slow = [
            entry
            for entry in exits
            if entry[2].stopped and entry[2].returncode > 0 and entry[2].traceback
            if first[0] - _SLOW_END_SECONDS < entry[0] < first[0]
        ]
        _, host, event = min([first, *slow], key=lambda entry: entry[0])
        return host, event

    def _when(self, host: HostState, event: WorkerExited) -> float:
        return event.at - host.skew

    def _worker_report(self, host: HostState, event: WorkerExited) -> FailureReport:
        code = event.returncode
        name = _signal_name(-code) if code < 0 else ""
        how = f"(pid {host.pids.get(event.rank, '?')}) was killed by {name}" if name else f"exited with code {code}"
        alike = self._alike(event)
        return FailureReport(
            message=f"rank {event.rank} on {host.spec.host} {how}",
            host=host.spec.host,
            rank=event.rank,
            returncode=code,
            exit_code=128 - code if code < 0 else code,
            signal_name=name,
            traceback=event.traceback,
            same_count=len(alike),
            others_stopped=self._others_stopped(alike),
            hint=event.hint or advice_for(host.spec, event) or self._ended_before(self._when(host, event)),
            positions=position_lines(self._positions()) if code == -signal.SIGABRT else (),
            log_path=host.log_dir_of(event.rank),
        )

    def _ended_before(self, failed_at: float) -> str:
        """Which ranks ended with 0 before a failure, or were ending: others fail because they miss them.

        Empty if none did, or most.
        """
        latest = failed_at + _SLOW_END_SECONDS
        exits = [(self._when(host, event), event) for host in self.hosts for event in host.exits.values()]
        ranks = sorted(e.rank for at, e in exits if e.returncode == 0 and not e.stopped and at < latest)
        if not ranks or 2 * len(ranks) > self.hosts[0].spec.world_size:
            return ""
        return f"rank {first_ranks(ranks)} had ended by itself, with exit code 0"

    def _alike(self, event: WorkerExited) -> set[int]:
        """Ranks that failed like this one; those that were ended while they said the same are among them."""
        key = likeness(event.traceback)
        ranks = {event.rank}
        for host in self.hosts:
            for other in host.exits.values():
                same = bool(key) and other.returncode != 0 if other.stopped else other.returncode == event.returncode
                if same and likeness(other.traceback) == key:
                    ranks.add(other.rank)
        return ranks

    def _others_stopped(self, alike: set[int]) -> int:
        return sum(e.stopped and e.rank not in alike for host in self.hosts for e in host.exits.values())


def _agent_report(host: HostState, failed: AgentFailed) -> FailureReport:
    code = failed.exit_code or 1
    return FailureReport(failed.message, host.spec.host, None, code, code, hint=failed.hint, log_path=host.log_dir)


def _lost_report(host: HostState) -> FailureReport:
    lost = host.lost or HostLostError("for an unknown reason")
    end = host.end or AgentEnd(None, "")
    code = end.returncode or 0
    number = -code if code < 0 else code - 128  # the keeper says it as a shell does
    how = f" ({_signal_name(number)})" if number > 0 else ""
    return FailureReport(
        message=f"{host.spec.host} is lost: {lost.message}{how}",
        host=host.spec.host,
        rank=None,
        returncode=lost.exit_code,
        exit_code=lost.exit_code,
        signal_name=_signal_name(number) if number > 0 else "",
        traceback=end.last_words,
        hint=lost.hint,
        log_path=host.log_dir,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
