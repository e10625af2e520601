"""What to do next about a worker that ended in a way that people often meet with a launcher. Pure."""

from __future__ import annotations

import dataclasses

from zrun.events import WorkerExited
from zrun.job import JobSpec
from zrun.settings import LaunchConfig

_ASKED_FOR_INPUT = ("bdb.BdbQuit", "EOFError: EOF when reading a line")
_OPTIONS = frozenset(field.name for field in dataclasses.fields(LaunchConfig))


def advice_for(spec: JobSpec, event: WorkerExited) -> str:
    """A sentence about a worker that failed; empty if there is nothing to say."""
    lines = event.traceback.splitlines()
    if lines and lines[-1] in _ASKED_FOR_INPUT:
        return "workers read no keyboard: for a debugger run the script with python alone, as a world of one"
    arguments = spec.command[spec.local_rank_at :]
    ours = next((word for word in arguments if word.startswith("--") and _name(word) in _OPTIONS), None)
    if ours is not None and "unrecognized arguments" in event.traceback and ours in event.traceback:
        return f"{ours} stands after the script, so it is the script's: options of zrun come before it"
    return ""


def _name(word: str) -> str:
    return word[2:].partition("=")[0].replace("-", "_")
