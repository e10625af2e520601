"""How long forward, backward and step take, for those who ask (`wall_clock_breakdown`)."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

Method = TypeVar("Method", bound=Callable[..., Any])


class Stopwatch:
    """Adds up the time of each part of a step.

    On a GPU it is the time between two places in the stream, read when it is asked for: until then nothing waits.
    """

    def __init__(self, device: torch.device, running: bool) -> None:
        self.running = running
        self._on_gpu = device.type == "cuda"
        self._laps: list[tuple[str, Any, Any]] = []  # part, its start and its end: seconds, or events of the stream

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Time what runs inside; nothing if it raises."""
        if not self.running:
            yield
            return
        start = self._now()
        yield
        self._laps.append((part, start, self._now()))

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self) -> dict[str, float]:
        """Milliseconds of each part since it was asked last, in the order in which they ran first."""
        laps, self._laps = self._laps, []
        if laps and self._on_gpu:
            laps[-1][2].synchronize()
        times: dict[str, float] = {}
        for part, start, end in laps:
            lap = start.elapsed_time(end) if self._on_gpu else (end - start) * 1e3
            times[part] = times.get(part, 0.0) + lap
        return times


def timed(part: str) -> Callable[[Method], Method]:
    """Measure a method of an engine."""

    def wrap(method: Method) -> Method:
        @functools.wraps(method)
        def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self.progress.stopwatch.measure(part):
                return method(self, *args, **kwargs)

        return cast(Method, measured)

    return wrap
