"""Are the hosts fit for the job, and where can its ranks meet? Asked of all of them at once, before anything starts."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import zrun
from zrun.errors import PreflightError, ZrunError
from zrun.fitness import Problem, Wanted, Witness, judge, uses_gpus
from zrun.hostfile import Host
from zrun.interview import Answer, Interview
from zrun.meeting import Meeting, addresses_of, candidates, with_meeting
from zrun.prepare import Job
from zrun.probe import Facts, LetGo, Listen, Listening, Look, Reach, Reached
from zrun.settings import LaunchConfig
from zrun.transport.base import Link, Transport

Say = Callable[[str, str], None]  # level and sentence

_START_SECONDS = 2.0  # for an agent, once its host is reached
_LOOK_SECONDS = 20.0  # file systems may be slow
_REACH_SECONDS = 4.0
_SPARE_SECONDS = 1.0


@dataclass(frozen=True)
class HostReport:
    """What is known of one host."""

    name: str
    slots: int
    facts: Facts | None
    problems: tuple[Problem, ...]

    @property
    def fit(self) -> bool:
        return not any(problem.fatal for problem in self.problems)


@dataclass(frozen=True)
class Report:
    """What is known of all hosts."""

    hosts: tuple[HostReport, ...]
    witnesses: tuple[Witness, ...] = ()  # of all hosts, or none
    meeting: Meeting | None = None
    kind: tuple[str, str] = ("cpu", "gloo")  # device and backend

    @property
    def fit(self) -> bool:
        """All hosts are fit, and can meet."""
        return self.meeting is not None and all(host.fit for host in self.hosts)

    def as_data(self) -> dict[str, object]:
        """For JSON."""
        hosts = [
            {
                "host": host.name,
                "slots": host.slots,
                "fit": host.fit,
                "problems": [dataclasses.asdict(problem) for problem in host.problems],
                "facts": dataclasses.asdict(host.facts) if host.facts is not None else None,
            }
            for host in self.hosts
        ]
        meeting = dataclasses.asdict(self.meeting) if self.meeting is not None else None
        return {"fit": self.fit, "zrun": zrun.__version__, "hosts": hosts, "meeting": meeting}

    def settle(self, job: Job) -> Job:
        """The job, on these hosts as they are.

        Raises:
            PreflightError: they are not fit.
        """
        if self.meeting is None or not self.fit:
            unfit = sum(not host.fit for host in self.hosts)
            count = f"{unfit} of {len(self.hosts)} hosts" if len(self.hosts) > 1 else "the host"
            what = f"{count} {'are' if unfit > 1 else 'is'} not fit for the job; nothing was started"
            raise PreflightError(f"{what}\n{report_table(self)}", "zrun doctor looks again")
        warnings = [("warning", f"{host.name}: {problem.what}") for host in self.hosts for problem in host.problems]
        job = dataclasses.replace(job, remarks=(*job.remarks, *warnings))
        return with_meeting(job, self.meeting, self.kind, self.witnesses)


class Survey:
    """Looks at the hosts of a job. May be repeated: a restarted job meets at another port.

    Args:
        transport: reaches the hosts of `job`.
        cwd: of the workers.
        say: is told, should it take long, what is waited for: level and sentence.
        before: id of the job's last attempt, of which nothing may be left.
    """

    def __init__(
        self, job: Job, transport: Transport, config: LaunchConfig, cwd: str, say: Say, before: str = ""
    ) -> None:
        self._job = job
        self._transport = transport
        self._config = config
        self._cwd = cwd
        self._say = say
        self._before = before
        self._here = job.here or (True,) * len(job.hosts)
        self._problems: list[list[Problem]] = [[] for _ in job.hosts]
        self._facts: dict[int, Facts] = {}

    def run(self, keep: Callable[[Host, Link], None] | None = None) -> Report:
        """One look. Bounded by the time for connecting, and some seconds.

        Args:
            keep: takes the agents of hosts that are all fit, for the job; without it they are ended.
        """
        self._problems = [[] for _ in self._job.hosts]
        self._facts = {}
        pythons = [host.python or sys.executable for host in self._job.hosts]
        interview = Interview(self._job.hosts, pythons, self._transport)
        try:
            witnesses = self._look(interview)
            if witnesses is None:
                return self._report()
            wanted = self._wanted()
            for problems, found in zip(self._problems, judge(witnesses, wanted), strict=True):
                problems += [dataclasses.replace(p, fatal=p.fatal and not self._config.no_preflight) for p in found]
            kind = ("cpu", "gloo")
            if uses_gpus(witnesses, wanted):
                kind = ("cuda", "gloo" if wanted.backend == "gloo" else "nccl")
            report = self._report(witnesses, self._meet(interview, witnesses) if self._all_fit else None, kind)
            if keep is not None and report.fit:
                for host, link in zip(self._job.hosts, interview.hand_over(), strict=True):
                    keep(host, link)
            return report
        finally:
            interview.close()

    @property
    def _all_fit(self) -> bool:
        return not any(problem.fatal for problems in self._problems for problem in problems)

    def _report(
        self,
        witnesses: Sequence[Witness] = (),
        meeting: Meeting | None = None,
        kind: tuple[str, str] = ("cpu", "gloo"),
    ) -> Report:
        hosts = [
            HostReport(host.name, host.slots, self._facts.get(i), tuple(self._problems[i]))
            for i, host in enumerate(self._job.hosts)
        ]
        return Report(tuple(hosts), tuple(witnesses), meeting, kind)

    # ---- what is there ---------------------------------------------------------------------------------------------

    def _look(self, interview: Interview) -> list[Witness] | None:
        """None if some host cannot say anything."""
        refused = interview.open(self._config.connect_timeout + _START_SECONDS, self._tell_delay)
        self._note(refused)
        answers = interview.ask(
            {i: self._question(i) for i in range(len(self._job.hosts)) if i not in refused}, Facts, _LOOK_SECONDS
        )
        self._note({i: answer.error for i, answer in answers.items() if answer.error is not None})
        self._facts = {i: answer.value for i, answer in answers.items() if answer.value is not None}
        if len(self._facts) < len(self._job.hosts):
            return None
        return [self._witness(i, answers[i]) for i in range(len(self._job.hosts))]

    def _tell_delay(self, waiting: list[int]) -> None:
        names = [self._job.hosts[i].name for i in waiting]
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        self._say("info", f"waiting for an answer of {', '.join(names[:8])}{more}")

    def _question(self, i: int) -> Look:
        config = self._config
        runs_file = bool(config.script) and not config.module
        return Look(
            cwd=self._cwd,
            script=config.script if runs_file and not config.no_python else "",
            program=config.script if runs_file and config.no_python else "",
            on_gpu=config.may_use_gpus,
            before=self._before,
        )

    def _witness(self, i: int, answer: Answer[Facts]) -> Witness:
        middle, half = (answer.heard_at + answer.asked_at) / 2, (answer.heard_at - answer.asked_at) / 2
        facts = self._facts[i]
        return Witness(self._job.hosts[i], facts, facts.clock - middle, half)

    def _wanted(self) -> Wanted:
        config = self._config
        path = os.path.join(self._cwd, config.script)
        is_file = bool(config.script) and not config.module and not config.no_python and os.path.isfile(path)
        return Wanted(config.script, _hash(path) if is_file else "", config.device, config.backend)

    def _note(self, errors: Mapping[int, ZrunError]) -> None:
        for i, error in errors.items():
            self._problems[i].append(Problem(error.message, error.hint))

    # ---- where to meet ---------------------------------------------------------------------------------------------

    def _meet(self, interview: Interview, witnesses: Sequence[Witness]) -> Meeting | None:
        if not self._have_the_interface(witnesses):
            return None
        places = self._candidates(interview, witnesses)
        listening = interview.ask({0: Listen(port=self._config.master_port or 0)}, Listening, _REACH_SECONDS)[0]
        if listening.value is None or listening.value.problem:
            what = listening.value.problem if listening.value is not None else str(listening.error)
            self._problems[0].append(Problem(what, "leave --master_port out to get a free one"))
            return None
        port = listening.value.port
        failed: dict[int, str] = {0: "it has no address that other hosts could reach"}
        for address in places:
            question = Reach(address=address, port=port, seconds=_REACH_SECONDS)
            answers = interview.ask(
                dict.fromkeys(range(len(witnesses)), question), Reached, _REACH_SECONDS + _SPARE_SECONDS
            )
            problems = {i: _why_not(answer) for i, answer in answers.items()}
            failed = {i: f"{address} port {port}, where rank 0 will be: {why}" for i, why in problems.items() if why}
            if not failed:
                found = [answers[i].value for i in range(len(witnesses))]
                interview.ask({0: LetGo()}, Listening, _REACH_SECONDS)
                return Meeting(address, port, self._interfaces([r.interface if r else "" for r in found]))
        hint = "choose with --master_addr, --iface, or addr= in the hostfile; or open the port"
        for i, why in failed.items():
            self._problems[i].append(Problem(why, hint))
        return None

    def _have_the_interface(self, witnesses: Sequence[Witness]) -> bool:
        """Whether all have that of --iface."""
        wanted, all_have = self._config.iface, True
        for i, witness in enumerate(witnesses):
            there = sorted({name for name, _ in addresses_of(witness)})
            if wanted and wanted not in there:
                all_have = False
                what = f"it has no interface {wanted} with an address, which --iface asks for"
                self._problems[i].append(Problem(what, f"it has {', '.join(there)}"))
        return all_have

    def _candidates(self, interview: Interview, witnesses: Sequence[Witness]) -> list[str]:
        given = self._config.master_addr or self._job.hosts[0].addr
        if given:
            return [given]
        if self._config.iface:
            return [address for name, address in addresses_of(witnesses[0]) if name == self._config.iface]
        return candidates(witnesses, interview.peer(0), self._here)

    def _interfaces(self, found: Sequence[str]) -> tuple[str, ...]:
        return ("",) * len(found) if all(self._here) else tuple(found)


def _why_not(answer: Answer[Reached]) -> str:
    if answer.value is None:
        return str(answer.error)
    return answer.value.problem


def _hash(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


# ---- for people ----------------------------------------------------------------------------------------------------


def report_table(report: Report) -> str:
    """All hosts as a table of plain text, and below it what is wrong."""
    head = ("host", "", "python", "zrun", "torch", "slots", "devices", "/dev/shm", "temp", "address")
    rows = [head, *(_row(host, report.meeting, i) for i, host in enumerate(report.hosts))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for host in report.hosts:
        for problem in host.problems:
            lines.append(f"{host.name}: {'' if problem.fatal else 'warning: '}{problem.what}")
            if problem.hint:
                lines.append(f"  -> {problem.hint}")
    return "\n".join(lines)


def _row(host: HostReport, meeting: Meeting | None, i: int) -> tuple[str, ...]:
    facts, state = host.facts, "ok" if host.fit else "NOT FIT"
    if facts is None:
        return (host.name, state, "-", "-", "-", str(host.slots), "-", "-", "-", "-")
    devices = f"{len(facts.gpus)} GPUs" if facts.gpus else f"{facts.cores} cores"
    address = f"{meeting.address}:{meeting.port}" if meeting is not None and i == 0 else facts.reached_at or "here"
    sizes = (_gib(facts.shm_free), _gib(facts.temp_free))
    return (host.name, state, facts.python, facts.zrun, facts.torch or "-", str(host.slots), devices, *sizes, address)


def _gib(size: int) -> str:
    return "-" if size < 0 else f"{size / 2**30:.1f} GiB"
