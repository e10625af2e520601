"""From what the user asked for to a job: looks at this machine and decides everything that can be decided."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zrun.devices import Choice, Gpus, choose, find_gpus
from zrun.environment import looks_secret, parse_env_file, read_assignment
from zrun.errors import UsageError
from zrun.hostfile import Host
from zrun.job import JobSpec, JobView
from zrun.ports import ClaimedPort, claim_free_port, claim_port
from zrun.settings import LOCAL_RANK_STYLES, LaunchConfig
from zrun.topology import RankAssignment, assign_ranks, used_hosts

SMOKE_MODULE = "zrun_runtime.commands.smoke"
_HOSTFILE_LINE = re.compile(rb"^[^\s#]\S*\s+slots\s*=\s*\d+", re.MULTILINE)
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


@dataclass(frozen=True)
class _Command:
    argv: tuple[str, ...]
    script_at: int  # where in argv the script's own arguments begin
    shown: str


def prepare(config: LaunchConfig, environ: Mapping[str, str], cwd: str, hosts: Sequence[Host] = ()) -> Job:
    """The job that `config` means.

    Args:
        environ: the launcher's own environment.
        hosts: where to run; none for this machine, with a slot for each device.

    Raises:
        UsageError: a file, device or port is not there, or cannot be used.
    """
    remarks: list[tuple[str, str]] = []
    environment = _read_environment(config, environ, remarks)
    merged = {**environ, **environment}
    command = _command(config, merged, cwd)
    choice = _choose(config, merged)
    if choice.remark:
        remarks.append(("info", choice.remark))
    hosts = used_hosts(hosts or [Host("localhost", choice.slots, choice.devices)])
    ranks = assign_ranks(hosts)
    port = claim_port(config.master_port) if config.master_port is not None else claim_free_port()
    first = JobSpec(
        job_id=_new_id(),
        host=hosts[0].name,
        node_rank=0,
        node_count=len(hosts),
        world_size=len(ranks),
        first_rank=0,
        local_world_size=hosts[0].slots,
        master_addr=config.master_addr or "127.0.0.1",
        master_port=port.number,
        device=choice.device,
        backend=choice.backend,
        command=command.argv,
        cwd=cwd,
        environment=environment,
        devices=hosts[0].devices,
        local_rank_arg=LOCAL_RANK_STYLES[config.local_rank_arg],
        local_rank_at=command.script_at,
        grace=config.grace,
        lease=config.lease,
        log_dir=os.path.join(cwd, config.log_dir) if config.log_dir else "",
    )
    return Job(_view(first, hosts, command, config), hosts, _share(first, hosts), ranks, tuple(remarks), port)


def _share(first: JobSpec, hosts: Sequence[Host]) -> tuple[JobSpec, ...]:
    """The spec of each host, from that of the first."""
    specs, rank = [], 0
    for node_rank, host in enumerate(hosts):
        spec = dataclasses.replace(
            first,
            host=host.name,
            node_rank=node_rank,
            first_rank=rank,
            local_world_size=host.slots,
            devices=host.devices,
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


def _choose(config: LaunchConfig, environ: Mapping[str, str]) -> Choice:
    on_gpu = config.device == "cuda" or (config.device == "auto" and config.backend != "gloo")
    gpus = find_gpus(environ) if on_gpu else Gpus((), "not looked for")
    return choose(config.device, config.backend, config.num_gpus, gpus)


# ---- the environment -----------------------------------------------------------------------------------------------


def _read_environment(
    config: LaunchConfig, environ: Mapping[str, str], remarks: list[tuple[str, str]]
) -> dict[str, str]:
    """What --env_file and --env say; the latter wins."""
    found: dict[str, str] = {}
    for name in config.env_file:
        try:
            with open(name, encoding="utf-8-sig") as file:
                found.update(parse_env_file(file.read(), name))
        except OSError as error:
            raise UsageError(f"--env_file {name}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise UsageError(f"--env_file {name}: not UTF-8 text (byte {error.start})") from None
    for text in config.env:
        name, value = read_assignment(text, environ)
        found[name] = value
        if "=" in text and looks_secret(name):
            remarks.append(
                (
                    "warning",
                    f"--env {name}=... shows the value to everyone who can list processes here; "
                    f"export it and write --env {name}",
                )
            )
    return found


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
        raise UsageError(f"{name} looks like a hostfile and not like a script", "name the script after the options")


def _missing_hint(path: str, name: str) -> str:
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
