"""What a run says about itself: once at its start, then at every optimizer step."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from zrun_runtime.config import Config
from zrun_runtime.distributed import World
from zrun_runtime.monitors import Event, Monitors
from zrun_runtime.stopwatch import Stopwatch
from zrun_runtime.telemetry import notice, telemetry

_MEMORY_EVERY_SECONDS = 1.0
_PAGE_BYTES = resource.getpagesize()


@dataclass(frozen=True)
class StepReport:
    """One optimizer step, as rank 0 tells it. Units as in docs/protocol.md."""

    step: int
    samples: int
    skipped_steps: int
    loss: float | None
    learning_rate: float | None
    loss_scale: float | None
    grad_norm: float | None


class Progress:
    """Tells the launcher and the monitors; without a launcher, rank 0 prints a plain line when one is due."""

    def __init__(self, world: World, steps_per_print: int | None, monitors: Monitors, stopwatch: Stopwatch) -> None:
        self.world = world
        self.monitors, self.stopwatch = monitors, stopwatch
        self.steps_per_print = steps_per_print
        self.total_steps: int | None = None
        self.samples = 0  # of all ranks, so far
        self._last = time.monotonic()
        self._memory_said = 0.0
        self._peak = 0

    @classmethod
    def of(cls, config: Config, world: World) -> Progress:
        """What a config asks for."""
        stopwatch = Stopwatch(world.device, config.wall_clock_breakdown)
        return cls(world, config.steps_per_print, Monitors(config.monitors, world.rank), stopwatch)

    def started(self, details: dict[str, str]) -> None:
        """An engine was built."""
        telemetry().emit(
            "run_started",
            rank=self.world.rank,
            steps_per_print=self.steps_per_print,
            total_steps=self.total_steps,
            details=list(details.items()),
        )
        self._last = time.monotonic()

    def step_done(self, report: StepReport) -> None:
        """Say what happened; cheap enough for every step."""
        self.samples += report.samples
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        if now - self._memory_said >= _MEMORY_EVERY_SECONDS:
            self._memory_said = now
            used, peak = self._memory()
            telemetry().emit("memory", rank=self.world.rank, used=used, peak=peak)
        times = self.stopwatch.take()
        if self.world.rank:
            return
        if self.monitors.enabled:
            self.monitors.write_events(_events(report, times, self.samples))
        due = self.steps_per_print is not None and report.step % self.steps_per_print == 0
        said = telemetry().emit("step", rank=0, seconds=seconds, total_steps=self.total_steps, due=due, **vars(report))
        if due and not said and not telemetry().connected:
            sys.stderr.write(_line(report, seconds) + "\n")
        if due and times:
            parts = ", ".join(f"{part} {milliseconds:.1f} ms" for part, milliseconds in times.items())
            notice("info", f"step {report.step} took {seconds * 1e3:.1f} ms on rank 0: {parts}")

    def _memory(self) -> tuple[int, int]:
        """(in use, peak) bytes: of the device, else of this process."""
        if self.world.device.type == "cuda":
            return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[1]) * _PAGE_BYTES
        self._peak = max(self._peak, used, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return used, self._peak


def _events(report: StepReport, times: Mapping[str, float], samples: int) -> list[Event]:
    """The numbers of a step by the field's names."""
    numbers = {
        "train_loss": report.loss,
        "lr": report.learning_rate,
        "grad_norm": report.grad_norm,
        "loss_scale": report.loss_scale,
        **{f"elapsed_time_ms_{part}": milliseconds for part, milliseconds in times.items()},
    }
    return [(f"Train/Samples/{name}", value, samples) for name, value in numbers.items() if value is not None]


def _line(report: StepReport, seconds: float) -> str:
    words = [f"step {report.step}"]
    for name, value, form in (
        ("loss", report.loss, ".4f"),
        ("lr", report.learning_rate, ".2e"),
        ("grad norm", report.grad_norm, ".3g"),
    ):
        if value is not None:
            words.append(f"{name} {value:{form}}")
    words.append(f"{seconds * 1000:.0f} ms")
    if report.skipped_steps:
        words.append(f"{report.skipped_steps} skipped")
    return "[zrun] " + "  ".join(words)
