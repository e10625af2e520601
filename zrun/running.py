"""Runs a prepared job: finds out whether its hosts are fit and where its ranks meet, then supervises it."""

from __future__ import annotations

from collections.abc import Mapping

from zrun.console import Console
from zrun.doctor import Survey
from zrun.prepare import Job
from zrun.settings import LaunchConfig
from zrun.supervisor import Supervisor
from zrun.transport.each import EachTransport
from zrun.transport.ssh_options import SshOptions


class Run:
    """One launch of a job.

    Args:
        environ: of the launcher.
        cwd: of the workers.
    """

    def __init__(self, job: Job, config: LaunchConfig, environ: Mapping[str, str], cwd: str) -> None:
        self._job = job
        self._config = config
        self._cwd = cwd
        self._environ = environ
        self.console_stalled = False  # after the end: the console's stream did not take everything

    def run(self, console: Console) -> int:
        """Runs it to its end.

        Returns:
            the exit code.

        Raises:
            UsageError: SSH cannot be used as asked.
            PreflightError: a host is not fit; nothing was started.
        """
        transport = make_transport(self._job, self._config, self._environ)
        try:
            job = self._job
            if not all(job.here):
                job = Survey(job, transport, self._config, self._cwd).run().settle(job)
            supervisor = Supervisor(job, transport, console)
            code = supervisor.run()
            self.console_stalled = supervisor.console_stalled
            return code
        finally:
            transport.close()


def make_transport(job: Job, config: LaunchConfig, environ: Mapping[str, str]) -> EachTransport:
    """A transport to all hosts of a job.

    Raises:
        UsageError: SSH cannot be used as asked.
    """
    options = SshOptions(
        config.ssh_port, config.ssh_config, config.host_key == "accept-new", config.connect_timeout, config.lease
    )
    return EachTransport(environ, job.hosts, job.here, options)
