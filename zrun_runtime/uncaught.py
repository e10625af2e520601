"""What a person sees when an error of the runtime ends their script: the sentence and the line, not our own frames.

[Note: uncaught errors]
An error that the runtime raised on purpose says itself what is wrong and what to do; the frames between the script and
that sentence are ours and help nobody. So `sys.excepthook` prints it short, and a mistake in the config ends the
process with the exit code of one. Everything else goes on to the hook that was there before. So does an error of ours
that was raised while the script handled another one, for that one is the cause. Hooks that were there before still hear
of each error, as they may do more than print (a tracker marks the run as failed); what they would print is left out.
Errors in other threads, in children and in an interactive session are left as they are.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from zrun_runtime.telemetry import telemetry

MARK = "zrun_runtime: "  # the launcher knows the first line by it; the others are indented
_WHOLE = "ZRUN_TRACEBACK"
_SOURCE_LIMIT = 100  # characters of the script's line
_OURS = os.path.dirname(os.path.abspath(__file__))
_LIBRARIES = tuple(
    path for name in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_paths().get(name))
)


class ExceptHook:
    """A `sys.excepthook` over the one that was there; see [Note: uncaught errors]."""

    newest: ExceptHook | None = None  # earlier ones, below hooks of others, pass everything on

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        code = getattr(kind, "zrun_exit_code", None)
        if code is None or self is not ExceptHook.newest or hasattr(sys, "ps1") or not _is_the_cause(error):
            self._before(kind, error, trace)
            return
        if os.environ.get(_WHOLE, "0") not in ("", "0"):
            self._before(kind, error, trace)
        else:
            _say(words(error, trace))
            _keep_whole(error)
            self._tell_the_others(kind, error, trace)
        raise SystemExit(code)

    def _tell_the_others(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self._before is not sys.__excepthook__:
            with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(Exception):
                self._before(kind, error, trace)


def show_short() -> None:
    """Make ours the outermost hook: others, such as torch's for process groups, may have come since the last time."""
    if not isinstance(sys.excepthook, ExceptHook):
        ExceptHook.newest = sys.excepthook = ExceptHook(sys.excepthook)


def words(error: BaseException, trace: TracebackType | None) -> str:
    """What is wrong, where in the script, what to do next: lines of which all but the first are indented."""
    message, hint = getattr(error, "message", str(error)), getattr(error, "hint", "")
    lines = f"{type(error).__name__}: {message}".splitlines()
    lines += _place(trace)
    lines += f"-> {hint}".splitlines() if hint else []
    lines += [line for note in getattr(error, "__notes__", ()) for line in str(note).splitlines()]
    return MARK + "\n  ".join(lines) + "\n"


def _is_the_cause(error: BaseException) -> bool:
    """Nothing that the script handled came before it. What our own code handled did."""
    seen = {id(error)}
    before = _earlier(error)
    while before is not None and id(before) not in seen:
        seen.add(id(before))
        caught = before.__traceback__
        if caught is not None and not _is_ours(caught.tb_frame.f_code.co_filename):
            return False
        before = _earlier(before)
    return True


def _earlier(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _place(trace: TracebackType | None) -> list[str]:
    """Where the script's own code called us: its innermost frame that is of no library."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(trace) if _is_file(frame.f_code.co_filename)]
    outside = [entry for entry in frames if not _is_ours(entry[0].f_code.co_filename)]
    own = [entry for entry in outside if not _is_library(entry[0].f_code.co_filename)] or outside
    if not own:
        return []
    frame, line = own[-1]
    path, function = frame.f_code.co_filename, frame.f_code.co_name
    where = f"at {path}:{line}" + ("" if function == "<module>" else f", in {function}")
    source = linecache.getline(path, line, frame.f_globals).strip()
    if len(source) > _SOURCE_LIMIT:
        source = source[: _SOURCE_LIMIT - 3] + "..."
    return [f"{where}: {source}" if source else where]


def _is_file(path: str) -> bool:
    return not path.startswith("<")


def _is_ours(path: str) -> bool:
    return os.path.abspath(path).startswith(_OURS + os.sep)


def _is_library(path: str) -> bool:
    parts = os.path.abspath(path).split(os.sep)
    return (
        "site-packages" in parts
        or "dist-packages" in parts
        or any(os.path.abspath(path).startswith(library + os.sep) for library in _LIBRARIES)
    )


def _say(text: str) -> None:
    if not telemetry().connected and os.environ.get("WORLD_SIZE", "1") != "1":  # zrun names the rank itself
        rank = os.environ.get("RANK", "?")
        text = "".join(f"[rank{rank}]: {line}" for line in text.splitlines(keepends=True))
    for stream in _streams():
        with contextlib.suppress(OSError, ValueError):
            stream.write(text)
            stream.flush()
            return


def _streams() -> Iterator[Any]:
    """Where to say it. torch's hook puts a buffer in the place of stderr, and forgets it when we end the process."""
    if not isinstance(sys.stderr, io.StringIO) and sys.stderr is not None:
        yield sys.stderr
    if sys.__stderr__ is not None:
        yield sys.__stderr__


def _keep_whole(error: BaseException) -> None:
    """Leave the whole traceback beside the rank's output, as torch's @record does, unless that has done so."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not telemetry().connected or not path:
        return
    stack = "".join(traceback.format_exception(error))
    details = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    text = json.dumps({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": details}})
    with contextlib.suppress(OSError), open(path, "x", encoding="utf-8") as file:
        file.write(text)
