"""The `zrun` command: parse -> prepare -> run -> exit. The only place where errors become text."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import click

import zrun
from zrun.cluster_options import cluster_options, not_empty
from zrun.console import make_console
from zrun.console.only import OnlyRanks, read_ranks
from zrun.console.record import Recorded
from zrun.errors import UsageError, ZrunError
from zrun.foreign import instead_of
from zrun.hostfile import MAX_SLOTS
from zrun.hosts import DEFAULT_HOSTFILE
from zrun.machine import current_directory
from zrun.prepare import prepare
from zrun.running import Run
from zrun.settings import LaunchConfig, read_defaults, settings_table
from zrun.topology import rank_table

ENTRY_POINTS = "zrun.commands"
OWN_COMMANDS = ("doctor", "ps", "kill")
_COMMAND_NAME = re.compile(r"[a-z][a-z0-9_-]*\Z")

_EXAMPLES = """\b
Examples:
  zrun train.py --config ds.json              one worker a GPU, or one on the CPU
  zrun --num_gpus 2 --backend gloo train.py   two workers on the CPU
  zrun --env WANDB_API_KEY --log_dir logs train.py
  zrun --hostfile hosts --num_nodes 2 train.py    the first two machines of a hostfile
  zrun --module my_package.train --epochs 3
  zrun --as_deepspeed --num_gpus 2 finetune.py    a script that says `import deepspeed`
  zrun --num_gpus 2 --backend gloo            the built-in smoke job
  zrun run -- plan                            the script `plan`, not the command

\b
Commands, each with a --help of its own:
  zrun doctor              look at the hosts, and start nothing
  zrun ps, zrun kill JOB   the jobs that were started here
  zrun config check FILE   what is wrong with a training config; also: explain, upgrade
  zrun plan                what a model takes in memory
  zrun checkpoint          look into checkpoints, and export them

\b
Exit code: that of the worker that failed first, 128+N for signal N,
  2 wrong usage, 3 a host is not fit, 4 a host was lost.
"""


class Workers(click.IntRange):
    """How many; other launchers have words for that as well."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in ("auto", "gpu", "cpu"):
            self.fail(f"{value!r} is not a number: leave it out for one a GPU, or one on the CPU", param, ctx)
        return super().convert(value, param, ctx)


@click.command(
    epilog=_EXAMPLES,
    options_metavar="[OPTIONS]",
    context_settings={
        "allow_interspersed_args": False,
        "token_normalize_func": lambda word: word.replace("-", "_"),
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
    },
)
@click.option(
    "--hostfile",
    "-H",
    default="",
    callback=not_empty,
    metavar="FILE",
    help=f"The machines, `NAME slots=N` a line. Default: {DEFAULT_HOSTFILE}, a Slurm allocation, or this machine.",
)
@click.option(
    "--include", "-i", default="", metavar="SPEC", help="Only these hosts and slots: host-[1-4]@host-7:0,2-3."
)
@click.option("--exclude", "-e", default="", metavar="SPEC", help="Not these hosts and slots.")
@click.option("--num_nodes", type=click.IntRange(min=1), metavar="N", help="Only the first N hosts.")
@click.option(
    "--num_gpus",
    "--num_accelerators",
    "--nproc_per_node",
    type=Workers(1, MAX_SLOTS),
    metavar="N",
    help="Workers on each host. Default: its slots; here one a visible GPU, without a GPU one.",
)
@click.option(
    "--backend",
    type=click.Choice(["auto", "nccl", "gloo"]),
    default="auto",
    help="How ranks exchange data. gloo without --device means the CPU.",
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="What to train on.")
@click.option(
    "--master_addr", default="", callback=not_empty, metavar="ADDR", help="Where rank 0 listens. Default: chosen."
)
@click.option("--master_port", type=click.IntRange(1, 65535), metavar="PORT", help="Default: a free one.")
@click.option("--module", "-m", is_flag=True, help="SCRIPT is a module, run with python -m.")
@click.option("--no_python", is_flag=True, help="SCRIPT is a program, run without Python.")
@click.option("--as_deepspeed", is_flag=True, help="`import deepspeed` means zrun: scripts for it run as they are.")
@click.option(
    "--local_rank_arg",
    default="auto",
    metavar="auto|off|_|-",
    help="Put --local_rank=N (_) or --local-rank=N (-) before the script's arguments. auto: _ with --as_deepspeed.",
)
@click.option(
    "--env",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="A variable for the workers; without a value, the one it has here; BEGIN*: all that begin so. Repeatable.",
)
@click.option("--env_file", multiple=True, metavar="FILE", help="NAME=VALUE lines for the workers. Repeatable.")
@click.option(
    "--log_dir",
    default="",
    callback=not_empty,
    metavar="DIR",
    help="Keep the output in DIR/rank-R/stdout and stderr, and here all in merged.log, and events.jsonl. "
    "Default: a temporary directory, kept on failure.",
)
@click.option("--show_ranks", default="", metavar="RANKS", help="Show only the output of these ranks: 0,3-5.")
@click.option(
    "--bind_cores_to_rank", is_flag=True, help="Give each worker cores of its own, and as many OpenMP threads."
)
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="From the polite signal to SIGKILL, for all workers together.",
)
@click.option(
    "--lease",
    type=click.FloatRange(min=1),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Without a sign of life from zrun for this long, a host ends its workers.",
)
@cluster_options
@click.option(
    "--profile",
    metavar="FILE",
    is_eager=True,
    expose_value=False,
    callback=lambda context, _, path: _take_defaults(context, path),
    help="Options as `name: value` lines of YAML. The command line and ZRUN_<OPTION> variables win over it.",
)
@click.option("--show_settings", is_flag=True, help="Print each option and where it was said, and start nothing.")
@click.option("--dry_run", is_flag=True, help="Print what would run where, and start nothing.")
@click.option("--plain", is_flag=True, help="Plain lines, also on a terminal.")
@click.option("--json", is_flag=True, help="Events on stdout, one JSON object a line.")
@click.option("--verbose", "-v", is_flag=True, help="Also tell the life of each worker.")
@click.version_option(zrun.__version__, prog_name="zrun", message="%(prog)s %(version)s")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT [ARGS]...]")
@click.pass_context
def launch(context: click.Context, command: tuple[str, ...], show_settings: bool, **options: Any) -> int:
    """Start SCRIPT on every worker of a training job and see it through.

    Everything after SCRIPT belongs to SCRIPT. Without one, a built-in smoke job trains a tiny model.
    """
    if command and not command[0]:
        raise UsageError("the name of the script is empty", "is it a variable that is not set?")
    config = LaunchConfig(script=command[0] if command else "", script_args=command[1:], **options)
    if show_settings:
        click.echo(settings_table(config, {name: _source(context, name) for name in options}))
        return 0
    return run_job(config)


def _take_defaults(context: click.Context, profile: str | None) -> None:
    """Reads what the options are unless the command line says them: [Note: precedence of settings]."""
    names = {
        spelling.lstrip("-"): option.name or ""
        for option in context.command.params
        if option.expose_value and option.name != "show_settings"
        for spelling in option.opts
        if spelling.startswith("--")
    }
    found = read_defaults(profile or os.environ.get("ZRUN_PROFILE", ""), os.environ, names)
    context.default_map = {name: setting.value for name, setting in found.items()}
    context.obj = {name: setting.where for name, setting in found.items()}


def _source(context: click.Context, name: str) -> str:
    """Where an option was said, for people; empty if nowhere."""
    source = context.get_parameter_source(name)
    if source is click.core.ParameterSource.DEFAULT_MAP:
        return str(context.obj[name])
    return "command line" if source is click.core.ParameterSource.COMMANDLINE else ""


def run_job(config: LaunchConfig) -> int:
    """Runs one job.

    Returns:
        the exit code.

    Raises:
        ZrunError: before anything was started.
    """
    cwd = current_directory()
    job = prepare(config, os.environ, cwd)
    if config.dry_run:
        head = f"{job.view.command}: master {job.view.master}, backend {job.view.backend}"
        click.echo(head.encode("utf-8", "replace").decode())
        click.echo(rank_table(job.ranks))
        for level, text in job.remarks:
            click.echo(f"zrun: {level}: {text}", err=True)
        return 0
    stream = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - None if it was closed; open until the end
    mode = "json" if config.json else "rich" if not config.plain and _is_terminal(stream) else "plain"
    console = make_console(mode, stream)
    if config.show_ranks:
        console = OnlyRanks(console, read_ranks(config.show_ranks, job.view.world_size))
    if config.log_dir:
        console = Recorded(console, os.path.join(cwd, config.log_dir))
    run = Run(job, config, os.environ, cwd, _say)
    code = run.run(console)
    if run.console_stalled:
        os._exit(code)  # a normal exit would wait for the stream that nobody reads
    return code


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry of the `zrun` command."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, no child can be waited for
    _fill_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be no text, or none of this locale
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _dispatch(words)
    except ZrunError as error:
        code = _complain(error.message, error.hint, error.exit_code)
    except click.ClickException as error:
        code = _explain(error)
    except KeyboardInterrupt:
        code = 130
    except OSError as error:  # such as a full disk behind our own stdout
        if error.errno is None or os.environ.get("ZRUN_TRACEBACK", "0") not in ("", "0"):
            raise
        place = f": {os.fsdecode(error.filename)}" if error.filename else ""
        code = _complain(f"{error.strerror}{place}", "ZRUN_TRACEBACK=1 shows where it happened", 1)
    sys.exit(code)


def _fill_closed_streams() -> None:
    """Keep what is opened from now on away from the numbers 0 to 2, which a shell may have closed (`2>&-`)."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _explain(error: click.ClickException) -> int:
    """Says what click found wrong, and which --help tells more.

    Returns:
        the exit code.
    """
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # older ones of click show it themselves
        click.echo(error.format_message(), err=True)
        return 2
    context = error.ctx if isinstance(error, click.UsageError) else None
    command = context.command_path if context is not None else "zrun"
    if isinstance(error, click.NoSuchOption):
        near = f"did you mean {' or '.join(sorted(error.possibilities))}?" if error.possibilities else ""
        hint = instead_of(error.option_name) or near or f"{command} --help lists all options"
        return _complain(error.message, hint, 2)
    return _complain(error.format_message(), _origin_of(error) or f"{command} --help explains the options", 2)


def _origin_of(error: click.ClickException) -> str:
    """Where a value that cannot be right was said, if not on the command line."""
    if not isinstance(error, click.BadParameter) or error.ctx is None or error.param is None:
        return ""
    where = _source(error.ctx, error.param.name or "")
    return f"it comes from {where}" if where not in ("", "command line") else ""


def _dispatch(words: list[str]) -> int:
    first = words[0] if words else ""
    if first == "run" and (words[1:2] == ["--"] or not os.path.exists(first)):
        return _call(launch, "zrun", words[1:])
    if _COMMAND_NAME.match(first) and not os.path.exists(first):
        command = _own_command(first) or _find_command(first)
        if command is not None:
            return _call(command, f"zrun {first}", words[1:])
    return _call(launch, "zrun", words)


def _call(command: click.Command, name: str, words: list[str]) -> int:
    result = command.main(args=words, prog_name=name, standalone_mode=False)
    return result if isinstance(result, int) else 0


def _own_command(name: str) -> click.Command | None:
    if name not in OWN_COMMANDS:
        return None
    # Here and not at the top: no launch has to wait for them.
    from zrun import tools

    return {"doctor": tools.doctor(launch, _say), "ps": tools.ps, "kill": tools.kill}[name]


def _find_command(name: str) -> click.Command | None:
    """The command of that name that another package offers."""
    # Here and not at the top: it costs as much as half a launch, and only a word that is no file asks for it.
    from importlib.metadata import entry_points

    for entry in entry_points(group=ENTRY_POINTS, name=name):
        current_directory()  # torch cannot be loaded without one
        try:
            command = entry.load()
        except ImportError as error:
            raise UsageError(f"zrun {name} cannot be loaded: {error}", f"it comes from {entry.value}") from None
        if isinstance(command, click.Command):
            return command
    return None


def _say(level: str, text: str) -> None:
    """Tells the person at the terminal something before there is a console."""
    click.echo(f"zrun: {text}", err=True)


def _complain(message: str, hint: str, code: int) -> int:
    print(f"zrun: error: {message}", file=sys.stderr)
    if hint:
        print(f"  -> {hint}", file=sys.stderr)
    return code
