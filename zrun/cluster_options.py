"""The options of `zrun` that concern other machines, apart from the command only because they are many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from zrun.errors import UsageError

F = TypeVar("F", bound=Callable[..., object])

_OPTIONS = (
    click.option("--ssh_port", type=click.IntRange(1, 65535), metavar="PORT", help="Of the SSH servers."),
    click.option("--ssh_config", default="", metavar="FILE", help="In place of ~/.ssh/config and the system's."),
    click.option(
        "--host_key",
        type=click.Choice(["strict", "accept-new"]),
        default="strict",
        show_default=True,
        metavar="strict|accept-new",
        help="What to do with hosts that known_hosts does not know: refuse them, or add them to it.",
    ),
    click.option(
        "--connect_timeout",
        type=click.FloatRange(min=0.1),
        default=20.0,
        show_default=True,
        metavar="SECONDS",
        help="To reach a host and log in.",
    ),
    click.option("--iface", default="", metavar="NAME", help="The network interface of all ranks. Default: found out."),
    click.option(
        "--no_ssh", is_flag=True, help="Start only the workers of --node_rank; every host has a zrun of its own."
    ),
    click.option(
        "--node_rank", type=click.IntRange(min=0), metavar="N", help="With --no_ssh: which host this is, from 0."
    ),
    click.option("--no_preflight", is_flag=True, help="Start also on hosts that differ or lack something."),
    click.option(
        "--max_restarts",
        type=click.IntRange(min=0),
        default=0,
        metavar="N",
        help="After a failure start the whole job again, at most N times. Workers see ZRUN_RESTART_COUNT.",
    ),
    click.option(
        "--min_nodes",
        type=click.IntRange(min=1),
        metavar="M",
        help="A restart goes on without hosts that stay unreachable, with M at least.",
    ),
    click.option(
        "--stall_timeout",
        type=click.FloatRange(min=1),
        metavar="SECONDS",
        help="When all ranks are silent for so long, show where each of them is and fail.",
    ),
)


def not_empty(context: click.Context, option: click.Parameter, value: Any) -> Any:
    """The value, unless the command line says nothing where something has to stand.

    Raises:
        UsageError: most often a variable that is not set: without its hostfile a job would run here alone.
    """
    said = context.get_parameter_source(option.name or "") is click.core.ParameterSource.COMMANDLINE
    if said and value == "":
        raise UsageError(f"--{option.name} is empty", "is it a variable that is not set?")
    return value


def cluster_options(command: F) -> F:
    """Adds the options to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
