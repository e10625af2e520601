"""The right transport for each host: this machine without SSH, all others with it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from zrun.errors import HostLostError
from zrun.hostfile import Host
from zrun.transport.base import Link
from zrun.transport.local import LocalTransport
from zrun.transport.ssh_options import SshOptions


class EachTransport:
    """Starts agents here and elsewhere.

    Args:
        environ: of the agents here.
        hosts: all that will be asked for.
        here: of each, whether it is this machine.

    Raises:
        UsageError: SSH cannot be used as asked.
    """

    def __init__(
        self, environ: Mapping[str, str], hosts: Sequence[Host], here: Sequence[bool], options: SshOptions
    ) -> None:
        self._environ = environ
        self._kept: dict[Host, list[Link]] = {}
        self._here = {host for host, is_here in zip(hosts, here, strict=True) if is_here}
        others = [host for host in hosts if host not in self._here]
        self._ssh = None
        if others:
            # Here and not at the top: paramiko takes as long to load as a local job to start.
            from zrun.transport.ssh import SshTransport

            self._ssh = SshTransport(others, options)

    def keep(self, host: Host, link: Link) -> None:
        """Takes an agent that waits for a job; `start` gives it out."""
        self._kept.setdefault(host, []).append(link)

    def start(self, host: Host) -> Link:
        if self._kept.get(host):
            return self._kept[host].pop()
        if host in self._here:
            python = os.path.expanduser(host.python) or sys.executable
            return LocalTransport(self._environ, python).start(host)
        if self._ssh is None:
            raise HostLostError(f"{host.name} is none of the hosts of this job")
        return self._ssh.start(host)

    def close(self) -> None:
        """Ends all connections."""
        if self._ssh is not None:
            self._ssh.close()
