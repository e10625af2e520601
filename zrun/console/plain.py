"""The console for pipes, files and dumb terminals: whole lines, one after the other, nothing ever rewritten."""

from __future__ import annotations

import time
from collections.abc import Callable

import zrun.console.cells as cells
from zrun.console.fold import Line
from zrun.console.narrator import FailureWords, Narrator
from zrun.console.output import Output
from zrun.events import StepDone

_MARKS = {"info": "", "detail": "", "warning": "warning: ", "error": "error: "}


class PlainConsole(Narrator):
    """One line for each worker line and message, and for each step that is owed one (`due`)."""

    def __init__(self, output: Output, verbose: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(verbose, clock)
        self._stream = output

    def tick(self) -> None:
        super().tick()
        self._stream.flush()

    def close(self, exit_code: int) -> None:
        super().close(exit_code)
        self._stream.flush()

    def show_line(self, line: Line) -> None:
        prefix = self.names.prefix(line.ranks)
        self._write(f"{prefix} {line.text}" if prefix else line.text)

    def show_sentence(self, level: str, text: str) -> None:
        self._write(f"zrun: {_MARKS.get(level, '')}{text}")

    def show_step(self, event: StepDone) -> None:
        if event.due:
            self._write(cells.step_line(self.progress))

    def show_failure(self, words: FailureWords) -> None:
        if words.traceback:
            self._write(f"zrun: {words.title}:")
            for line in words.traceback:
                self._write(f"  {line}")
        self._write(f"zrun: error: {words.message}")
        for remark in words.remarks:
            self._write(f"zrun: {remark}")
        self._stream.flush()

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
