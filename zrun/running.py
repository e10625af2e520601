"""Runs a prepared job: finds out whether its hosts are fit and where its ranks meet, supervises it, starts it again."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from zrun.attempt import Verdict
from zrun.console import Console
from zrun.environment import with_history
from zrun.errors import PreflightError, UsageError
from zrun.hostfile import Host
from zrun.job import FailureReport
from zrun.outputs import is_short
from zrun.ports import claim_port
from zrun.prepare import Job, prepare
from zrun.registry import directory, registered
from zrun.settings import LaunchConfig
from zrun.supervisor import Say, Supervisor
from zrun.transport.each import EachTransport
from zrun.transport.ssh_options import SshOptions

if TYPE_CHECKING:
    from zrun.doctor import Report

_PAUSE_SECONDS = 2.0  # between looks at hosts that are not fit yet
_CLEANUP_SECONDS = 15.0  # for a host to end what hangs, after lease and grace
_STOLEN = ("EADDRINUSE", "address already in use", "Address already in use")


class Run:
    """One launch of a job, with all its attempts.

    Args:
        environ: of the launcher.
        cwd: of the workers.
        say: is told, before there is a job, what is waited for.
    """

    def __init__(self, job: Job, config: LaunchConfig, environ: Mapping[str, str], cwd: str, say: Say) -> None:
        self._job = job  # the current attempt
        self._id = job.view.job_id
        self._first_world_size = job.view.world_size
        self._config = config
        self._cwd = cwd
        self._say = say
        self._environ = environ
        self._attempts = 0
        self._restarts = 0
        self._stolen = False  # the port was, once
        self._transport = make_transport(job, config, environ)
        self.console_stalled = False  # after the end: the console's stream did not take everything

    def run(self, console: Console) -> int:
        """Runs it to its end.

        Returns:
            the exit code.

        Raises:
            PreflightError: a host is not fit; nothing was started.
        """
        view = self._job.view
        place = directory(self._environ)
        try:
            job = self._ready(self._job, self._say)
            supervisor = Supervisor(job, self._transport, console, self._again, self._config.stall_timeout)
            with registered(place, self._id, view.world_size, view.hosts, self._config.script or view.command):
                code = supervisor.run()
            self.console_stalled = supervisor.console_stalled
            return code
        finally:
            self._job.port.release()
            self._transport.close()

    def _ready(self, job: Job, say: Say) -> Job:
        """The job with all that can only be known from its hosts.

        Raises:
            PreflightError: they are not fit.
        """
        if not all(job.here):
            job = self._settle(job, self._look(job, say, keep=True))
        self._attempts += 1
        history = (self._restarts, self._first_world_size, self._config.stall_timeout is not None)
        job_id = self._id if self._attempts == 1 else f"{self._id}-{self._attempts}"
        specs = [
            dataclasses.replace(spec, job_id=job_id, environment=with_history(spec.environment, *history))
            for spec in job.specs
        ]
        self._job = dataclasses.replace(job, specs=tuple(specs), view=dataclasses.replace(job.view, job_id=job_id))
        return self._job

    def _look(self, job: Job, say: Say, keep: bool = False) -> Report:
        # Here and not at the top: a job on this machine alone does not wait for it to load.
        from zrun.doctor import Survey

        job.port.release()  # an agent here will take it for a moment
        before = self._job.specs[0].job_id if self._attempts else ""
        survey = Survey(job, self._transport, self._config, self._cwd, say, before)
        return survey.run(self._transport.keep if keep else None)

    def _settle(self, job: Job, report: Report) -> Job:
        job = report.settle(job)
        return dataclasses.replace(job, port=claim_port(job.specs[0].master_port)) if job.here[0] else job

    # ---- again -----------------------------------------------------------------------------------------------------

    def _again(self, verdict: Verdict, say: Say) -> Job | None:
        """What to run after a failure.

        Raises:
            PreflightError: the hosts are not fit any more.
        """
        report = verdict.report
        if report is None:
            return None
        if self._port_was_stolen(report):
            self._stolen = True
            port = self._job.specs[0].master_port
            say("warning", f"another program has taken port {port} meanwhile: the job starts again with another")
            return self._ready(self._prepare(self._job.hosts), say)
        if self._restarts >= self._config.max_restarts:
            return None
        if report.exit_code == UsageError.exit_code and is_short(report.traceback):
            say("warning", "a mistake in the config stays one: the job is not started again")
            return None
        self._restarts += 1
        last = report.traceback.strip().splitlines()[-1:] if report.rank is not None else []
        say("warning", ": ".join([report.message, *last]))
        if report.log_path:
            say("info", f"its output: {report.log_path} on {report.host}")
        say("warning", f"the job starts again ({self._restarts} of {self._config.max_restarts})")
        return self._ready(self._prepare(self._wait_for_hosts(say)), say)

    def _port_was_stolen(self, report: FailureReport) -> bool:
        if self._stolen or self._config.master_port is not None or self._config.no_ssh or report.rank != 0:
            return False
        port = str(self._job.specs[0].master_port)
        return port in report.traceback and any(words in report.traceback for words in _STOLEN)

    def _prepare(self, hosts: Sequence[Host]) -> Job:
        self._job.port.release()
        # Files of variables are read once: they may be pipes, and may have changed.
        said = tuple(f"{name}={value}" for name, value in self._job.environment.items())
        config = dataclasses.replace(self._config, env=said, env_file=())
        return dataclasses.replace(prepare(config, self._environ, self._cwd, hosts), remarks=())

    def _wait_for_hosts(self, say: Say) -> tuple[Host, ...]:
        """The hosts of the next attempt: those of the last one, less those that cannot be used any more.

        A host that was lost ends its workers by itself, after lease and grace; until then they hold ports and devices.

        Raises:
            PreflightError: too few are left.
        """
        hosts, config = self._job.hosts, self._config
        if all(self._job.here):
            return hosts
        until = time.monotonic() + config.lease + config.grace + _CLEANUP_SECONDS
        told = False
        while True:
            report = self._look(self._job, _keep_quiet)  # it is said below, and once
            fit = tuple(host for host, found in zip(hosts, report.hosts, strict=True) if found.fit)
            if len(fit) == len(hosts):
                return hosts
            names = ", ".join(found.name for found in report.hosts if not found.fit)
            if time.monotonic() > until:
                break
            if not told:
                told = True
                what = next(problem.what for found in report.hosts for problem in found.problems if problem.fatal)
                say("warning", f"waiting for {names}: {what}")
            time.sleep(_PAUSE_SECONDS)
        if config.min_nodes is None or len(fit) < config.min_nodes:
            least = f", and --min_nodes is {config.min_nodes}" if config.min_nodes is not None else ""
            raise PreflightError(f"{names} cannot be used any more{least}", "--min_nodes lets the job go on without")
        say("warning", f"the job goes on without {names}: {len(fit)} of {len(hosts)} hosts are left")
        return fit


def _keep_quiet(level: str, text: str) -> None:
    """Says nothing."""


def make_transport(job: Job, config: LaunchConfig, environ: Mapping[str, str]) -> EachTransport:
    """A transport to all hosts of a job.

    Raises:
        UsageError: SSH cannot be used as asked.
    """
    options = SshOptions(
        config.ssh_port, config.ssh_config, config.host_key == "accept-new", config.connect_timeout, config.lease
    )
    return EachTransport(environ, job.hosts, job.here, options)
