"""The commands of zrun beside the launch itself: doctor, ps, kill."""

from __future__ import annotations

import copy
import functools
import json
import os
import signal
import time
from typing import Any

import click

from zrun.doctor import Say, Survey, report_table
from zrun.errors import PreflightError, UsageError
from zrun.machine import current_directory
from zrun.prepare import prepare
from zrun.processes import send_signal
from zrun.registry import Entry, directory, running
from zrun.running import make_transport
from zrun.settings import LaunchConfig

_STARTS_NOTHING = frozenset(("show_settings", "dry_run", "version"))  # options of a launch that make no sense here
# These may be said, as they are in a profile, but mean nothing to a look.
_OF_A_RUN = (
    *("local_rank_arg", "log_dir", "show_ranks", "bind_cores_to_rank", "grace", "lease", "no_preflight"),
    *("as_deepspeed", "max_restarts", "min_nodes", "stall_timeout", "plain", "verbose"),
)
_DOCTOR_EXAMPLES = """\b
Examples:
  zrun doctor                                this machine
  zrun doctor --hostfile hosts               all machines of a hostfile
  zrun doctor --hostfile hosts --json train.py    for a program; also whether train.py is the same everywhere

\b
Exit code: 0 all hosts are fit, 3 one is not, 2 wrong usage.
"""
_PS_EXAMPLES = """\b
Examples:
  zrun ps
  zrun ps --json    one JSON object a line
"""
_KILL_EXAMPLES = """\b
Examples:
  zrun kill 3rkuhxbfe5
  zrun kill --no_wait 3rk    return at once; the beginning of an id is enough
"""
_HELP: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda word: word.replace("-", "_"),
}


def doctor(launch: click.Command, say: Say) -> click.Command:
    """The command `zrun doctor`: it takes the words of a launch and only looks."""
    options = []
    for option in launch.params:
        if option.name not in _STARTS_NOTHING:
            option = copy.copy(option)
            if isinstance(option, click.Option):
                option.hidden = option.name in _OF_A_RUN
                option.help = "One JSON object." if option.name == "json" else option.help
            options.append(option)
    return click.Command(
        "doctor",
        params=options,
        callback=functools.partial(_examine, say),
        help="""Look at all hosts as a launch with the same words does before it starts anything, and say whether they
        are fit. With SCRIPT also whether it is there, and the same everywhere. Profile and ZRUN_ variables count too.
        """,
        epilog=_DOCTOR_EXAMPLES,
        context_settings=launch.context_settings,
    )


def _examine(say: Say, command: tuple[str, ...], **options: Any) -> int:
    config = LaunchConfig(script=command[0] if command else "", script_args=command[1:], **options)
    cwd = current_directory()
    job = prepare(config, os.environ, cwd)
    job.port.release()
    transport = make_transport(job, config, os.environ)
    try:
        report = Survey(job, transport, config, cwd, say).run()
    finally:
        transport.close()
    if config.json:
        click.echo(json.dumps(report.as_data()))
    else:
        click.echo(report_table(report))
        interfaces = sorted({name for name in report.meeting.interfaces if name} if report.meeting else ())
        if report.meeting is not None and interfaces:
            click.echo(f"ranks meet at {report.meeting.address}, through {', '.join(interfaces)}")
    return 0 if report.fit else PreflightError.exit_code


@click.command(epilog=_PS_EXAMPLES, context_settings=_HELP)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def ps(as_json: bool) -> int:
    """List this user's jobs that were started on this machine."""
    entries = running(directory(os.environ))
    if as_json:
        for entry in entries:
            fields = {"job_id": entry.job_id, "pid": entry.pid, "world_size": entry.world_size}
            click.echo(json.dumps({**fields, "hosts": entry.hosts, "command": entry.command, "since": entry.since}))
        return 0
    rows = [("job", "pid", "ranks", "since", "hosts", "command"), *map(_row, entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _row(entry: Entry) -> tuple[str, ...]:
    hosts = ",".join(entry.hosts[:4]) + (f",... ({len(entry.hosts)})" if len(entry.hosts) > 4 else "")
    since = time.strftime("%m-%d %H:%M:%S", time.localtime(entry.since))
    return (entry.job_id, str(entry.pid), str(entry.world_size), since, hosts, entry.command)


@click.command(epilog=_KILL_EXAMPLES, context_settings=_HELP)
@click.option("--no_wait", is_flag=True, help="Return at once, before the job has ended.")
@click.argument("job")
def kill(job: str, no_wait: bool) -> int:
    """End a job, as SIGTERM to its `zrun` does: all its workers on all hosts, within their grace.

    JOB is an id that `zrun ps` shows, or the beginning of one.
    """
    if not job:
        raise UsageError("the id of the job is empty", "is it a variable that is not set? zrun ps lists the jobs")
    found = [entry for entry in running(directory(os.environ)) if entry.job_id.startswith(job)]
    if len(found) != 1:
        what = f"there is no job {job}" if not found else f"{job} begins the ids of {len(found)} jobs"
        raise UsageError(what, "zrun ps lists them")
    (entry,) = found
    process = entry.process
    if process is None or not send_signal(process, signal.SIGTERM):
        raise UsageError(f"the job {entry.job_id} has just ended")
    while not no_wait and entry.process is not None:
        time.sleep(0.1)
    return 0
