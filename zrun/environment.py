"""What each worker's environment holds: what zrun says, --env, --env_file, what travels to other hosts. Pure."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Mapping

from zrun.errors import UsageError
from zrun.job import JobSpec

# Said by zrun itself for every rank, so nobody else may say them.
RESERVED = frozenset(
    (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "LOCAL_SIZE",
        "CROSS_RANK",
        "CROSS_SIZE",
        "ZRUN_JOB_ID",
        "ZRUN_NODE_RANK",
        "ZRUN_DEVICE",
        "ZRUN_BACKEND",
        "ZRUN_EVENT_FD",
        "ZRUN_RESTART_COUNT",
        "ZRUN_FIRST_WORLD_SIZE",
    )
)
# What begins so goes from the launcher's environment to the workers of other hosts.
TRAVELLING_PREFIXES = (
    "ACCELERATE_",
    "COMET_",
    "CUBLAS",
    "CUDA",
    "CUDNN",
    "DATASETS_",
    "DEEPSPEED_",
    "DS_",
    "FI_",
    "GLOO",
    "HF_",
    "HUGGINGFACE_",
    "KMP_",
    "MKL_",
    "MLFLOW",
    "MV2",
    "NCCL",
    "NVIDIA_TF32_OVERRIDE",
    "OMP",
    "PYTHON",
    "PYTORCH_",
    "TENSORBOARD",
    "TOKENIZERS_",
    "TORCH",
    "TRANSFORMERS",
    "TRITON",
    "UCX",
    "WANDB",
    "ZRUN_TRACEBACK",
)
# Though they begin so: they speak of this machine, or of a job that this one runs inside of.
STAYING = ("CUDA_VISIBLE_DEVICES", "TORCHELASTIC_")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW(OR)?D|CREDENTIAL", re.IGNORECASE)
_LINE = re.compile(r"\s*(?:export\s+)?(?P<name>[^=\s]+)\s*=[ \t]*(?P<rest>.*)", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


def worker_environment(spec: JobSpec, local_rank: int, base: Mapping[str, str], cores: int) -> dict[str, str]:
    """The environment of one worker: docs/protocol.md, section 4, without ZRUN_EVENT_FD.

    Args:
        base: the agent's own environment.
        cores: CPU cores that the workers of this host share.
    """
    # What torchrun told a worker of its own inside of which we may run would mislead ours (who serves the store).
    own = {name: value for name, value in base.items() if not name.startswith("TORCHELASTIC_")}
    environment = {**own, **spec.environment}
    local = str(spec.local_world_size)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // spec.local_world_size)))
    environment.setdefault("PYTHONUNBUFFERED", "1")
    environment.pop("ZRUN_EVENT_FD", None)
    environment.update(
        RANK=str(spec.first_rank + local_rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(spec.world_size),
        LOCAL_WORLD_SIZE=local,
        LOCAL_SIZE=local,
        GROUP_RANK=str(spec.node_rank),
        CROSS_RANK=str(spec.node_rank),
        GROUP_WORLD_SIZE=str(spec.node_count),
        CROSS_SIZE=str(spec.node_count),
        MASTER_ADDR=spec.master_addr,
        MASTER_PORT=str(spec.master_port),
        ZRUN_JOB_ID=spec.job_id,
        ZRUN_NODE_RANK=str(spec.node_rank),
        ZRUN_DEVICE=spec.device,
        ZRUN_BACKEND=spec.backend,
    )
    if spec.as_deepspeed:
        own_path = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([facade_folder(), *([own_path] if own_path else [])])
        if spec.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""  # trainers take a GPU where they see one, whatever the backend
    if spec.devices:
        # CUDA shows a process one MIG slice at most, so with slices each rank sees its own.
        sliced = any(device.startswith("MIG-") for device in spec.devices)
        environment["CUDA_VISIBLE_DEVICES"] = spec.devices[local_rank] if sliced else ",".join(spec.devices)
    return environment


def installed_deepspeed() -> str:
    """The version of the DeepSpeed that is installed here; empty if there is none but zrun's."""
    from importlib import metadata  # here, for start-up time: few jobs need it

    try:
        version = metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return ""
    return "" if "zrun" in version else version


def facade_folder() -> str:
    """The folder on whose account `import deepspeed` means zrun.

    Raises:
        UsageError: the runtime is not installed here.
    """
    found = importlib.util.find_spec("zrun_runtime")  # finds and does not load it
    if found is None or not found.submodule_search_locations:
        raise UsageError("--as_deepspeed: the package zrun_runtime is not there", "install zrun whole")
    return os.path.join(found.submodule_search_locations[0], "integrations", "site")


def with_history(
    environment: Mapping[str, str], restarts: int, first_world_size: int, shows_stacks: bool
) -> dict[str, str]:
    """The environment of an attempt's workers: the user's, and what they are told of the history of their job.

    Args:
        first_world_size: ranks of the first attempt; a restart may have fewer.
        shows_stacks: a worker that is ended by SIGABRT shows where it stood.
    """
    told = {"ZRUN_RESTART_COUNT": str(restarts), "ZRUN_FIRST_WORLD_SIZE": str(first_world_size)}
    if shows_stacks:
        told["PYTHONFAULTHANDLER"] = "1"
    return {**environment, **told}


def travelling(environ: Mapping[str, str]) -> dict[str, str]:
    """What of the launcher's environment goes to other hosts."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(TRAVELLING_PREFIXES) and not name.startswith(STAYING)
    }


def read_assignment(text: str, environ: Mapping[str, str]) -> dict[str, str]:
    """`NAME=VALUE`, `NAME` with the value it has in `environ`, or `BEGIN*` for all there whose names begin so.

    Raises:
        UsageError: no valid name, a name that zrun sets itself, or no value to take.
    """
    name, equals, value = text.partition("=")
    if name.endswith("*") and not equals:
        begin = name[:-1]
        check_spelling(begin, f"--env {text}")
        found = {n: v for n, v in environ.items() if n.startswith(begin) and n not in RESERVED}
        if not found:
            raise UsageError(f"--env {text}: no variable in the environment begins with {begin}", "export it first")
        return found
    check_name(name, f"--env {name}")
    if equals:
        return {name: value}
    if name not in environ:
        raise UsageError(f"--env {name}: there is no {name} in the environment", f"give a value: --env {name}=VALUE")
    return {name: environ[name]}


def check_spelling(name: str, where: str) -> None:
    """Raises UsageError unless `name` can be that of a variable."""
    if not _NAME.match(name):
        raise UsageError(f"{where}: {name!r} is not a name of an environment variable", "write NAME=VALUE")


def check_name(name: str, where: str) -> None:
    """Raises UsageError unless `name` is a variable that the user may set."""
    check_spelling(name, where)
    if name in RESERVED:
        hint = {"MASTER_ADDR": "use --master_addr", "MASTER_PORT": "use --master_port"}.get(name, "leave it out")
        raise UsageError(f"{where}: zrun sets {name} itself, for each rank", hint)


def looks_secret(name: str) -> bool:
    """Whether a variable of that name probably holds a secret."""
    return bool(_SECRET.search(name))


def parse_env_file(text: str, name: str, check: Callable[[str, str], None] = check_name) -> dict[str, str]:
    """The variables of an environment file.

    One `NAME=VALUE` a line, `export` before it allowed; blank lines and lines that begin with `#` mean nothing. A value
    in single quotes is taken as it is, in double quotes `\\n \\r \\t \\\\ \\" \\$` are escapes; both may span lines. A
    bare value ends at ` #` or the end of the line. A name given twice has its last value.

    Args:
        name: of the file, for errors.
        check: raises UsageError for a name that may not be set; gets the name and file:line.

    Raises:
        UsageError: naming file and line.
    """
    if "\0" in text:
        raise UsageError(f"{name}: it holds a NUL byte", "variables are text; is it the right file?")
    found: dict[str, str] = {}
    lines = text.replace("\r\n", "\n").split("\n")
    at = 0
    while at < len(lines):
        line, start = lines[at], at
        at += 1
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        where = f"{name}:{start + 1}"
        match = _LINE.match(line)
        if match is None:
            raise UsageError(f"{where}: {line.strip()!r} is not NAME=VALUE")
        check(match["name"], where)
        value = match["rest"]
        if value[:1] in ("'", '"'):
            while (quoted := _unquote(value)) is None and at < len(lines):
                value += "\n" + lines[at]
                at += 1
            if quoted is None:
                raise UsageError(f"{where}: the quote {value[0]} is never closed")
            value, rest = quoted
            if rest.strip() and not rest.lstrip().startswith("#"):
                raise UsageError(f"{where}: {rest.strip()!r} follows the closing quote")
        else:
            value = re.split(r"(?:^|\s)#", value, maxsplit=1)[0].strip()
        found[match["name"]] = value
    return found


def _unquote(text: str) -> tuple[str, str] | None:
    """The value of the quotes that `text` begins with, and what follows them; None if they are not closed."""
    quote, out, at = text[0], "", 1
    while at < len(text):
        char = text[at]
        at += 1
        if char == quote:
            return out, text[at:]
        if char == "\\" and quote == '"' and at < len(text):
            following = text[at]
            at += 1
            if following in '\\"$':
                char = following
            else:
                char = _ESCAPES.get(following, "\\" + following)
        out += char
    return None
