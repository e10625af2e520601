"""What the user asked for, and where: checked as far as that is possible without looking at the machine.

[Note: precedence of settings]
Of each option counts what was said first in this list: the command line; the variable ZRUN_<OPTION>, such as
ZRUN_NUM_GPUS; the profile (--profile FILE, or ZRUN_PROFILE); zrun's own default. Options that may be repeated are not
added up across these. An empty variable says nothing.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zrun.environment import RESERVED, looks_secret
from zrun.errors import UsageError

if TYPE_CHECKING:
    from zrun.yamltext import Item

PREFIX = "ZRUN_"
LOCAL_RANK_STYLES = {"off": "", "_": "--local_rank", "-": "--local-rank"}  # and auto: off, _ with as_deepspeed


@dataclass(frozen=True)
class LaunchConfig:
    """One launch."""

    script: str = ""  # empty: the built-in smoke job
    script_args: tuple[str, ...] = ()
    hostfile: str = ""  # empty: the default one, a Slurm allocation, or this machine
    include: str = ""  # hosts and slots, zrun.filters
    exclude: str = ""
    num_nodes: int | None = None  # None: all
    num_gpus: int | None = None  # a host. None: all slots; of this machine: one a GPU, or one on the CPU
    backend: str = "auto"  # auto, nccl or gloo
    device: str = "auto"  # auto, cpu or cuda
    master_addr: str = ""  # empty: chosen
    master_port: int | None = None  # None: a free one
    module: bool = False
    no_python: bool = False
    as_deepspeed: bool = False  # `import deepspeed` means zrun
    local_rank_arg: str = "auto"  # or a key of LOCAL_RANK_STYLES
    env: tuple[str, ...] = ()  # NAME=VALUE or NAME
    env_file: tuple[str, ...] = ()
    log_dir: str = ""
    show_ranks: str = ""  # whose output the console shows, such as 0,3-5; empty: all
    bind_cores_to_rank: bool = False
    grace: float = 30.0  # seconds
    lease: float = 30.0  # seconds
    ssh_port: int | None = None
    ssh_config: str = ""  # empty: those that ssh reads
    host_key: str = "strict"  # or accept-new
    connect_timeout: float = 20.0  # seconds
    no_preflight: bool = False
    iface: str = ""  # empty: found out
    no_ssh: bool = False  # only the workers of `node_rank` are started, and by us
    node_rank: int | None = None
    max_restarts: int = 0
    min_nodes: int | None = None  # None: all
    stall_timeout: float | None = None  # seconds; None: no limit
    dry_run: bool = False
    plain: bool = False
    json: bool = False
    verbose: bool = False

    def __post_init__(self) -> None:
        """Raises UsageError for options that cannot be right, alone or together."""
        for name, value in vars(self).items():
            if "\0" in "".join(value if isinstance(value, tuple) else [str(value)]):
                raise UsageError(f"--{name} holds a NUL character", "no file, host or variable can be called so")
        if self.module and self.no_python:
            raise UsageError("--module and --no_python do not go together: a module is run by Python", "drop one")
        if self.plain and self.json:
            raise UsageError("--plain and --json do not go together", "drop one")
        if (self.module or self.no_python) and not self.script:
            raise UsageError("--module and --no_python need something to run", "name it after the options")
        if self.no_ssh != (self.node_rank is not None):
            raise UsageError(
                "--no_ssh and --node_rank go together: which of the hosts is this one?",
                "on the first host of the hostfile it is --node_rank 0; with SSH, start zrun once and without both",
            )
        if self.min_nodes is not None and not self.max_restarts:
            raise UsageError(
                "--min_nodes says when a restart may go on: there are none", "give --max_restarts N as well"
            )
        if self.no_ssh and self.max_restarts:
            raise UsageError(
                "--no_ssh does not go with --max_restarts: no zrun sees all hosts", "leave one of them out"
            )
        if math.isnan(self.grace) or math.isnan(self.lease):
            raise UsageError("--grace and --lease are numbers of seconds")
        if self.local_rank_arg not in ("auto", *LOCAL_RANK_STYLES):
            styles = ", ".join(("auto", *LOCAL_RANK_STYLES))
            raise UsageError(f"--local_rank_arg {self.local_rank_arg}: not one of {styles}", "`_` is the usual one")

    @property
    def may_use_gpus(self) -> bool:
        """Whether GPUs are asked for, or taken if they are there."""
        return self.device == "cuda" or (self.device == "auto" and self.backend != "gloo")

    @property
    def local_rank_option(self) -> str:
        """The option that tells the script its local rank; empty for none."""
        if self.local_rank_arg == "auto":
            return LOCAL_RANK_STYLES["_" if self.as_deepspeed else "off"]
        return LOCAL_RANK_STYLES[self.local_rank_arg]


@dataclass(frozen=True)
class Setting:
    """What one option is unless the command line says it."""

    value: str | list[str]  # as it would be written there; a list for options that may be repeated
    where: str  # file:line:column, or a variable


REPEATABLE = frozenset(field.name for field in dataclasses.fields(LaunchConfig) if field.default == ()) - {
    "script_args"
}


def read_defaults(profile: str, environ: Mapping[str, str], names: Mapping[str, str]) -> dict[str, Setting]:
    """What environment and profile say, by field of LaunchConfig.

    Args:
        profile: path of a YAML file with options as keys; empty: none.
        names: every spelling of an option, without dashes in front and with `_` inside -> its field.

    Raises:
        UsageError: the profile cannot be read, is no such file, or has a key that is no option.
    """
    found = _read_profile(profile, names) if profile else {}
    # Inside a worker some of these variables speak of its job and are not meant for one that it starts.
    taken = RESERVED if "ZRUN_JOB_ID" in environ else frozenset()
    for spelling, field in names.items():
        variable = PREFIX + spelling.upper()
        text = environ.get(variable)
        if text and variable not in taken:
            found[field] = Setting(_split(text, variable) if field in REPEATABLE else text, variable)
    return found


def _split(text: str, variable: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{variable}: {error}", "words are separated by blanks, and quoted as in a shell") from None


def _read_profile(path: str, names: Mapping[str, str]) -> dict[str, Setting]:
    # Here and not at the top: the library takes as long to load as all the rest.
    from zrun.yamltext import parse_yaml

    try:
        with open(path, encoding="utf-8-sig") as file:
            document = parse_yaml(file.read(), path)
    except OSError as error:
        raise UsageError(f"--profile {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"--profile {path}: not UTF-8 text (byte {error.start})") from None
    if document.value is None:
        return {}
    if not isinstance(document.value, dict):
        raise UsageError(f"{document.where}: a profile is a list of options", "write one a line: num_gpus: 4")
    found: dict[str, Setting] = {}
    for key, item in document.value.items():
        field = names.get(key.replace("-", "_"))
        if field is None:
            near = difflib.get_close_matches(key, names, n=1)
            hint = f"did you mean {near[0]}?" if near else "zrun --help lists all options"
            raise UsageError(f"{item.where}: {key} is not an option", hint)
        if field in found:
            raise UsageError(f"{item.where}: {key} is said already, at {found[field].where}", "leave one of them out")
        if item.value is not None:
            found[field] = Setting(_plain(key, field, item), item.where)
    return found


def _plain(key: str, field: str, item: Item) -> str | list[str]:
    """The value as it would be written on a command line."""
    if field not in REPEATABLE:
        if isinstance(item.value, (list, dict)):
            raise UsageError(f"{item.where}: {key} takes one plain value")
        return item.text
    if isinstance(item.value, dict) and field == "env":
        entries = [(f"{name}=", value) for name, value in item.value.items()]
    else:
        entries = [("", value) for value in (item.value if isinstance(item.value, list) else [item])]
    odd = next((value for _, value in entries if isinstance(value.value, (list, dict))), None)
    if odd is not None:
        raise UsageError(f"{odd.where}: {key} takes plain values")
    return [name + value.text for name, value in entries]


def settings_table(config: LaunchConfig, sources: Mapping[str, str]) -> str:
    """Every option with its value and where it was said, as lines of plain text. Values of secrets are not shown.

    Args:
        sources: by field; empty for zrun's own default.
    """
    rows = [("option", "value", "said by")]
    for name in (field.name for field in dataclasses.fields(LaunchConfig) if field.name in sources):
        value = getattr(config, name)
        if name == "env":
            value = tuple(_hide(text) for text in value)
        shown = " ".join(map(shlex.quote, value)) if isinstance(value, tuple) else str(value)
        rows.append((name, "-" if value in (None, "", ()) else shown, sources[name] or "default"))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}" for name, value, source in rows)


def _hide(text: str) -> str:
    name, equals, _ = text.partition("=")
    return f"{name}=..." if equals and looks_secret(name) else text
