"""From what the user asked for to a job: looks at this machine and decides everything that can be decided."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zrun.devices import Gpus, choose, choose_kind, find_gpus
from zrun.environment import (
    RESERVED,
    check_spelling,
    installed_deepspeed,
    looks_secret,
    parse_env_file,
    read_assignment,
    travelling,
)
from zrun.errors import UsageError
from zrun.filters import Limits, limit_hosts
from zrun.hostfile import Host
from zrun.hosts import find_hosts
from zrun.interfaces import IFNAMES, interface_to, list_addresses
from zrun.job import JobSpec, JobView
from zrun.machine import ThisMachine, refuse_master_elsewhere
from zrun.ports import ClaimedPort, claim_free_port, claim_port
from zrun.settings import LaunchConfig
from zrun.topology import RankAssignment, assign_ranks, give_devices, used_hosts

SMOKE_MODULE = "zrun_runtime.commands.smoke"
_HOSTFILE_LINE = re.compile(rb"^[^\s#]\S*\s+slots\s*=\s*\d+", re.MULTILINE)
# Python would take most of them for a program that does nothing.
_NO_SCRIPTS = dict.fromkeys((".json", ".yaml", ".yml", ".toml"), "a config") | {".ipynb": "a notebook"}
_PORT_WITHOUT_SSH = 29_500  # where nobody can tell the hosts which one is free
_ID_LETTERS = "abcdefghijklmnopqrstuvwxyz234567"


@dataclass(frozen=True)
class Job:
    """Everything the supervisor needs."""

    view: JobView
    hosts: tuple[Host, ...]
    specs: tuple[JobSpec, ...]  # one a host
    ranks: tuple[RankAssignment, ...]
    remarks: tuple[tuple[str, str], ...]  # level and sentence
    port: ClaimedPort
    here: tuple[bool, ...] = ()  # one a host: whether it is this machine, and needs no SSH
    skews: tuple[float, ...] = ()  # one a host: seconds that its clock is ahead; empty: not measured
    environment: Mapping[str, str] = field(default_factory=dict)  # what the user says for all workers


@dataclass(frozen=True)
class _Command:
    argv: tuple[str, ...]
    script_at: int  # where in argv the script's own arguments begin
    shown: str


def prepare(config: LaunchConfig, environ: Mapping[str, str], cwd: str, hosts: Sequence[Host] = ()) -> Job:
    """The job that `config` means.

    Args:
        environ: the launcher's own environment.
        hosts: where to run; none for those that `config` leads to.

    Raises:
        UsageError: a file, device or port is not there, or cannot be used.
    """
    remarks: list[tuple[str, str]] = []
    environment = _read_environment(config, environ, cwd, remarks)
    merged = {**environ, **environment}
    command = _command(config, merged, cwd)
    places = _place(config, merged, cwd, hosts, remarks)
    if not hosts and config.min_nodes is not None and config.min_nodes > len(places.hosts):
        raise UsageError(f"--min_nodes {config.min_nodes}: there are {len(places.hosts)} hosts", "say fewer")
    if config.master_addr and all(places.here) and not config.no_ssh and not config.no_preflight:
        refuse_master_elsewhere(config.master_addr)
    environment = {**_network_interfaces(config, merged, any(places.here)), **environment}
    if config.as_deepspeed and (version := installed_deepspeed()):
        remarks.append(("info", f"`deepspeed` is zrun's in this job; the installed DeepSpeed {version} is not used"))
    ranks = assign_ranks(places.hosts)
    # Of another machine the port is looked at there; the one claimed here then only has a number.
    number = config.master_port or (_PORT_WITHOUT_SSH if config.no_ssh else None)
    port = claim_port(number) if number is not None and places.here[0] else claim_free_port()
    first = JobSpec(
        job_id=_new_id(),
        host=places.hosts[0].name,
        node_rank=0,
        node_count=len(places.hosts),
        world_size=len(ranks),
        first_rank=0,
        local_world_size=places.hosts[0].slots,
        master_addr=config.master_addr or places.master_addr,
        master_port=number or port.number,
        device=places.device,
        backend=places.backend,
        command=command.argv,
        cwd=cwd,
        environment=environment,
        devices=places.hosts[0].devices,
        local_rank_arg=config.local_rank_option,
        local_rank_at=command.script_at,
        grace=config.grace,
        lease=config.lease,
        log_dir=os.path.join(cwd, config.log_dir) if config.log_dir else "",
        bind_cores=config.bind_cores_to_rank,
        as_deepspeed=config.as_deepspeed,
    )
    specs = _share(first, places, {**travelling(environ), **environment})
    view = _view(first, places.hosts, command, config)
    job = Job(view, places.hosts, specs, ranks, tuple(remarks), port, places.here, environment=environment)
    return _own_share(job, config) if config.no_ssh else job


def _own_share(job: Job, config: LaunchConfig) -> Job:
    """What this host has to do of a job that has a zrun on each of its hosts.

    Raises:
        UsageError: there is no such host, or its way to rank 0 is not known.
    """
    at = config.node_rank or 0
    if at >= len(job.hosts):
        raise UsageError(f"--node_rank {at}: the hosts are {len(job.hosts)}, counted from 0", "see --dry_run")
    spec = job.specs[at]
    interface = interface_to(spec.master_addr) if len(job.hosts) > 1 else ""
    told = dict.fromkeys(IFNAMES, interface) if interface else {}
    spec = dataclasses.replace(spec, environment={**told, **spec.environment})
    last = spec.first_rank + spec.local_world_size - 1
    which = f"this is host {at} of {len(job.hosts)}, {spec.host}, with ranks {spec.first_rank}-{last}"
    remarks = (*job.remarks, ("info", f"{which}; the others are started by somebody else"))
    return dataclasses.replace(job, hosts=(job.hosts[at],), specs=(spec,), here=(True,), remarks=remarks)


def _share(first: JobSpec, places: _Places, elsewhere: dict[str, str]) -> tuple[JobSpec, ...]:
    """The spec of each host, from that of the first. `elsewhere`: the environment of those that are not here."""
    specs, rank = [], 0
    for node_rank, (host, here) in enumerate(zip(places.hosts, places.here, strict=True)):
        of_python = first.command[0] == sys.executable
        spec = dataclasses.replace(
            first,
            host=host.name,
            node_rank=node_rank,
            first_rank=rank,
            local_world_size=host.slots,
            devices=host.devices,
            command=(host.python, *first.command[1:]) if host.python and of_python else first.command,
            environment=first.environment if here else elsewhere,
        )
        specs.append(spec)
        rank += host.slots
    return tuple(specs)


def _view(spec: JobSpec, hosts: Sequence[Host], command: _Command, config: LaunchConfig) -> JobView:
    return JobView(
        job_id=spec.job_id,
        world_size=spec.world_size,
        hosts=tuple(host.name for host in hosts),
        device=spec.device,
        backend=spec.backend,
        master=f"[{spec.master_addr}]:{spec.master_port}"
        if ":" in spec.master_addr
        else f"{spec.master_addr}:{spec.master_port}",
        command=command.shown,
        verbose=config.verbose,
    )


# ---- hosts and devices ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Places:
    """Where the workers run, and on what."""

    hosts: tuple[Host, ...]  # all have slots, and devices if the job runs on GPUs
    here: tuple[bool, ...]  # of each host, whether it is this machine
    device: str
    backend: str

    @property
    def master_addr(self) -> str:
        """By which the workers reach rank 0, as far as that can be known before its host was reached."""
        first = self.hosts[0]
        return first.addr or ("127.0.0.1" if len(self.hosts) == 1 or all(self.here) else first.name)


def _place(
    config: LaunchConfig,
    environ: Mapping[str, str],
    cwd: str,
    hosts: Sequence[Host],
    remarks: list[tuple[str, str]],
) -> _Places:
    """Finds the hosts, unless some are given, and decides what they train on."""
    machine = ThisMachine.look()
    gpus = find_gpus(environ) if config.may_use_gpus else Gpus((), "not looked for")
    if not hosts:
        found = find_hosts(config, environ, cwd, machine)
        hosts = found.hosts
        remarks += found.remarks
    if hosts:
        device, backend = choose_kind(config.device, config.backend, bool(gpus.visible))
    else:
        choice = choose(config.device, config.backend, config.num_gpus, gpus)
        device, backend = choice.device, choice.backend
        if choice.remark:
            remarks.append(("info", choice.remark))
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        where = f"CUDA_VISIBLE_DEVICES={visible}" if visible is not None and device == "cuda" else ""
        pool = [Host("localhost", choice.slots, where=where)]
        hosts = limit_hosts(pool, Limits(config.include, config.exclude))
    hosts = used_hosts(hosts)
    here = tuple(
        machine.is_host(host) if config.node_rank is None else at == config.node_rank for at, host in enumerate(hosts)
    )
    if device == "cuda":
        hosts = give_devices(hosts, here, gpus.visible)
        _remark_visible(environ.get("CUDA_VISIBLE_DEVICES"), config, here, remarks)
        if sum(here) > 1:
            names = ", ".join(host.name for host, is_here in zip(hosts, here, strict=True) if is_here)
            remarks.append(("warning", f"{names} are all this machine: their workers share its GPUs"))
    return _Places(hosts, here, device, backend)


def _remark_visible(
    named: str | None, config: LaunchConfig, here: Sequence[bool], remarks: list[tuple[str, str]]
) -> None:
    """Says what CUDA_VISIBLE_DEVICES means where somebody may expect something else."""
    if named is None:
        return
    if any(here) and (config.include or config.exclude or config.num_gpus or config.hostfile):
        remarks.append(("warning", f"CUDA_VISIBLE_DEVICES={named} holds: slot 0 of this machine is its first device"))
    if not all(here):
        remarks.append(("warning", f"CUDA_VISIBLE_DEVICES={named} holds on this machine only; see --include"))


# ---- the environment -----------------------------------------------------------------------------------------------


def _read_environment(
    config: LaunchConfig, environ: Mapping[str, str], cwd: str, remarks: list[tuple[str, str]]
) -> dict[str, str]:
    """What .deepspeed_env, --env_file and --env say; the latter win."""
    found = _read_deepspeed_env(environ, cwd, remarks)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if environ.get(name) and not getattr(config, name.lower()) and "ZRUN_JOB_ID" not in environ:
            text = f"{name}={environ[name]} of the environment has no effect: --{name.lower()} says it"
            remarks.append(("warning", text))
    for name in config.env_file:
        found.update(parse_env_file(_read_text(os.path.join(cwd, name), f"--env_file {name}"), name))
    for text in config.env:
        found.update(read_assignment(text, environ))
        name, equals, _ = text.partition("=")
        if equals and looks_secret(name):
            remarks.append(
                (
                    "warning",
                    f"--env {name}=... shows the value to everyone who can list processes here; "
                    f"export it and write --env {name}",
                )
            )
    return found


def _network_interfaces(config: LaunchConfig, environ: Mapping[str, str], is_here: bool) -> dict[str, str]:
    """What the user says of the interfaces of all ranks, as variables; these win over --iface."""
    said = {name: environ[name] for name in IFNAMES if environ.get(name)}
    if not config.iface:
        return said
    there = sorted({name for name, _ in list_addresses()})
    if is_here and config.iface not in there:
        raise UsageError(f"--iface {config.iface}: this machine has none with an address", f"it has {', '.join(there)}")
    return {**dict.fromkeys(IFNAMES, config.iface), **said}


def _read_deepspeed_env(environ: Mapping[str, str], cwd: str, remarks: list[tuple[str, str]]) -> dict[str, str]:
    """What the file says that is read without being named: first that in the home directory, then the one here."""
    name = os.path.expanduser(environ.get("DS_ENV_FILE") or ".deepspeed_env")
    paths = [os.path.join(directory, name) for directory in (os.path.expanduser("~"), cwd)]
    files = [path for path in dict.fromkeys(paths) if os.path.isfile(path)]
    if environ.get("DS_ENV_FILE") and not files:
        remarks.append(("warning", f"DS_ENV_FILE={environ['DS_ENV_FILE']}: there is no such file"))
    found: dict[str, str] = {}
    for path in files:
        values = parse_env_file(_read_text(path, path), path, check_spelling)
        remarks.append(("info", f"{path} sets {', '.join(values) or 'nothing'}"))
        for reserved in RESERVED.intersection(values):
            del values[reserved]
            remarks.append(("warning", f"{path}: {reserved} is left out, zrun sets it itself for each rank"))
        found.update(values)
    return found


def _read_text(path: str, name: str) -> str:
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read()
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: not UTF-8 text (byte {error.start})") from None


# ---- the command ---------------------------------------------------------------------------------------------------


def _command(config: LaunchConfig, environ: Mapping[str, str], cwd: str) -> _Command:
    """What each worker runs."""
    if not config.script:
        return _Command((_python(), "-m", SMOKE_MODULE), 3, "the built-in smoke job")
    if config.no_python:
        _check_program(config.script, environ, cwd)
        begin: tuple[str, ...] = (config.script,)
    elif config.module:
        begin = (_python(), "-m", config.script)
    else:
        check_script(os.path.join(cwd, config.script), config.script)
        begin = (_python(), config.script)
    shown = " ".join((config.script, *config.script_args))
    return _Command((*begin, *config.script_args), len(begin), shown)


def _python() -> str:
    if not sys.executable:
        raise UsageError("the Python that runs zrun does not know its own path", "start zrun with a full path to it")
    return sys.executable


def check_script(path: str, name: str) -> None:
    """Raises UsageError unless `path` is something that Python can run. `name` is what the user called it."""
    if os.path.isdir(path):
        if not os.path.exists(os.path.join(path, "__main__.py")):
            raise UsageError(f"{name} is a directory without a __main__.py, not a script")
        return
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe, a device
        raise UsageError(f"{name} is not a file that every worker could read", "save it, and name that file")
    kind = _NO_SCRIPTS.get(os.path.splitext(name)[1].lower())
    if kind and os.path.exists(path):
        raise UsageError(f"{name} is {kind} and not a script", "name the script first, its own arguments after it")
    try:
        with open(path, "rb") as file:
            begin = file.read(4096)
    except FileNotFoundError:
        raise UsageError(f"there is no script {name}", _missing_hint(path, name)) from None
    except OSError as error:
        raise UsageError(f"the script {name} cannot be read: {error.strerror}") from None
    first = begin.partition(b"\n")[0]
    if begin.startswith(b"\x7fELF") or (first.startswith(b"#!") and b"python" not in first):
        raise UsageError(f"{name} is a program and not a Python script", f"zrun --no_python {name} runs it as it is")
    if _HOSTFILE_LINE.search(begin):
        raise UsageError(f"{name} looks like a hostfile and not like a script", f"zrun --hostfile {name} SCRIPT")


def _missing_hint(path: str, name: str) -> str:
    if name == "-":
        return "it has to be a file: workers read nothing from here"
    if name.startswith("-"):
        return "options of zrun come before the script"
    if "/" not in name and "." in name and not name.endswith(".py"):
        return f"for a module write: zrun --module {name}"
    directory = os.path.dirname(path)
    if not os.path.isdir(directory):
        return f"there is no directory {directory}"
    scripts = [entry for entry in os.listdir(directory) if entry.endswith(".py")]
    near = difflib.get_close_matches(os.path.basename(name), scripts, n=1)
    if near:
        return f"did you mean {os.path.join(os.path.dirname(name), near[0])}?"
    return "" if "." in name or "/" in name else "no command of zrun is called so either"


def _check_program(name: str, environ: Mapping[str, str], cwd: str) -> None:
    """Raises UsageError unless `name` is an executable file: a path, or found on PATH."""
    if "/" in name:
        places = [os.path.join(cwd, name)]
    else:
        path = environ.get("PATH", os.defpath)
        places = [os.path.join(cwd, directory, name) for directory in path.split(os.pathsep)]
    files = [place for place in places if os.path.isfile(place)]
    if not files:
        where = "" if "/" in name else " on PATH"
        raise UsageError(
            f"there is no program {name}{where}", f"for a file in this directory write ./{name}" if where else ""
        )
    if not any(os.access(file, os.X_OK) for file in files):
        raise UsageError(
            f"{files[0]} is not executable", f"chmod +x {files[0]}, or let Python run it without --no_python"
        )


def _new_id() -> str:
    """Ten letters that no other job has."""
    return "".join(_ID_LETTERS[byte % len(_ID_LETTERS)] for byte in os.urandom(10))
