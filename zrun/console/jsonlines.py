"""The console for programs: every event as one JSON line with its host, and the launcher's own words as further kinds.

docs/protocol.md, section "What --json prints", is the contract.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

from zrun.console.output import Output
from zrun.events import Event
from zrun.job import FailureReport, JobView

_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")  # what JSON leaves raw and a terminal or a reader may mind


class JsonConsole:
    """One object a line, flushed as soon as there is a pause.

    Args:
        clock: seconds since the epoch, for a field `time`; None: there is none.
    """

    def __init__(self, output: Output, clock: Callable[[], float] | None = None) -> None:
        self._output = output
        self._clock = clock

    def job_started(self, job: JobView) -> None:
        fields = dataclasses.asdict(job)
        del fields["verbose"]
        self._write("job_started", fields)

    def handle(self, host: str, event: Event) -> None:
        self._write(event.kind, {"host": host, **dataclasses.asdict(event)})

    def message(self, level: str, text: str) -> None:
        self._write("message", {"level": level, "text": text})

    def failed(self, failure: FailureReport) -> None:
        self._write("failure", dataclasses.asdict(failure))

    def tick(self) -> None:
        self._output.flush()

    def close(self, exit_code: int) -> None:
        self._write("exit", {"code": exit_code})
        self._output.flush()

    def _write(self, kind: str, fields: dict[str, Any]) -> None:
        if self._clock is not None:
            fields["time"] = round(self._clock(), 3)
        line = json.dumps({"event": kind, **fields}, ensure_ascii=False, separators=(",", ":"))
        self._output.write(_UNSAFE.sub(lambda m: f"\\u{ord(m[0]):04x}", line) + "\n")
