"""Finds the hosts of a job: the hostfile, the default one, a Slurm allocation, or this machine; and limits them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from zrun.errors import UsageError
from zrun.filters import Limits, limit_hosts
from zrun.hostfile import Host, Hostfile, parse_hostfile
from zrun.machine import ThisMachine
from zrun.settings import LaunchConfig
from zrun.slurm import hosts_of_allocation

DEFAULT_HOSTFILE = "/job/hostfile"
_YAML_ENDINGS = (".yaml", ".yml")
_YAML_BEGIN = re.compile(r"(?:[ \t]*(?:#.*)?\r?\n)*(?:---|hosts[ \t]*:[ \t\r]*(?:[#{\[].*)?$)", re.MULTILINE)


@dataclass(frozen=True)
class FoundHosts:
    """Where a job runs."""

    hosts: tuple[Host, ...]  # in order; none: this machine, with a slot for each of its devices
    remarks: tuple[tuple[str, str], ...] = ()  # level and sentence


def find_hosts(config: LaunchConfig, environ: Mapping[str, str], cwd: str, machine: ThisMachine) -> FoundHosts:
    """The hosts that take part, with the slots that do.

    Raises:
        UsageError: a file is not there or says something wrong, or a filter names what is not there.
    """
    limits = Limits(config.include, config.exclude, config.num_nodes, config.num_gpus)
    if config.hostfile:
        found = _with_slots(read_hostfile(os.path.join(cwd, config.hostfile), config.hostfile), config.hostfile)
        return FoundHosts(limit_hosts(found.hosts, limits), found.notes)
    if os.path.isfile(DEFAULT_HOSTFILE):
        found = _with_slots(read_hostfile(DEFAULT_HOSTFILE, DEFAULT_HOSTFILE), DEFAULT_HOSTFILE)
        said = ("info", f"the hosts are those of {DEFAULT_HOSTFILE}, the default hostfile")
        return FoundHosts(limit_hosts(found.hosts, limits), (said, *found.notes))
    nodes = hosts_of_allocation(environ, config.may_use_gpus, config.num_gpus)
    if nodes and not (len(nodes) == 1 and machine.is_host(nodes[0])):
        said = ("info", f"the hosts are the {len(nodes)} nodes of the Slurm allocation ({nodes[0].where})")
        return FoundHosts(limit_hosts(nodes, limits), (said,))
    if config.num_nodes is not None and config.num_nodes > 1:
        raise UsageError(
            f"--num_nodes {config.num_nodes}, but only this machine is known",
            f"name the machines with --hostfile FILE (there is no {DEFAULT_HOSTFILE} either)",
        )
    return FoundHosts(())


def _with_slots(found: Hostfile, name: str) -> Hostfile:
    """The same, of which some host takes part: without one, this machine would be used, which nobody asked for."""
    if not any(host.slots > 0 for host in found.hosts):
        raise UsageError(f"{name}: every host has slots=0, so none takes part", "write slots=8, for example")
    return found


def read_hostfile(path: str, name: str) -> Hostfile:
    """The hostfile at `path`; `name` is what the user calls it.

    Raises:
        UsageError: it cannot be read, or what it says is wrong.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            text = file.read()
    except FileNotFoundError:
        raise UsageError(f"there is no hostfile {name}", "leave --hostfile out to run on this machine") from None
    except OSError as error:
        raise UsageError(f"the hostfile {name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"the hostfile {name} is not UTF-8 text (byte {error.start})") from None
    if name.endswith(_YAML_ENDINGS) or _YAML_BEGIN.match(text):
        # Here and not at the top: the library takes as long to load as all the rest.
        from zrun.yamlhosts import parse_yaml_hostfile

        return parse_yaml_hostfile(text, name)
    return parse_hostfile(text, name)
