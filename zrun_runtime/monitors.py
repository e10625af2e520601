"""Where a run's numbers go beside the console: CSV files, TensorBoard, Weights & Biases, Comet. Rank 0 alone writes."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from zrun_runtime.config import MonitorsConfig
from zrun_runtime.config.extras_schema import CometConfig, TensorboardConfig, WandbConfig
from zrun_runtime.errors import ConfigError
from zrun_runtime.telemetry import notice

Event = tuple[str, float, int]  # its name, as in Train/Samples/lr; its value; samples of all ranks so far


class Monitor(Protocol):
    """One place that takes numbers."""

    def write(self, events: Sequence[Event]) -> None: ...


class CsvFiles:
    """A file for each name, a row for each value. Rows are on disk at once; files that are there already grow."""

    def __init__(self, config: TensorboardConfig) -> None:
        self.folder = _folder("csv_monitor", config)
        self._files: dict[str, TextIO] = {}

    def write(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            self._file(name).write(f"{samples},{value}\n")

    def _file(self, name: str) -> TextIO:
        if name not in self._files:
            path = self.folder / f"{name.replace('/', '_')}.csv"
            new = not path.exists()
            self._files[name] = path.open("a", buffering=1, encoding="utf-8")
            if new:
                self._files[name].write(f"step,{name.rpartition('/')[2]}\n")
        return self._files[name]


class Tensorboard:
    """Event files for TensorBoard."""

    def __init__(self, config: TensorboardConfig) -> None:
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self.writer = writer(log_dir=str(_folder("tensorboard", config)))

    def write(self, events: Sequence[Event]) -> None:
        for event in events:
            self.writer.add_scalar(*event)
        self.writer.flush()


class Wandb:
    """A run of Weights & Biases."""

    def __init__(self, config: WandbConfig) -> None:
        module = importlib.import_module("wandb")
        self.run = module.init(project=config.project, group=config.group, entity=config.team)

    def write(self, events: Sequence[Event]) -> None:
        self.run.log({name: value for name, value, _ in events}, step=events[-1][2])


class Comet:
    """An experiment of Comet; numbers go there every `samples_log_interval` samples."""

    def __init__(self, config: CometConfig) -> None:
        given = {
            name: getattr(config, name)
            for name in ("api_key", "workspace", "project", "experiment_key", "mode", "online")
            if getattr(config, name) is not None
        }
        self.experiment = importlib.import_module("comet_ml").start(**given)
        if config.experiment_name is not None:
            self.experiment.set_name(config.experiment_name)
        self.interval, self._next = config.samples_log_interval, 0

    def write(self, events: Sequence[Event]) -> None:
        samples = events[-1][2]
        if samples >= self._next:
            self._next = samples + self.interval
            self.experiment.log_metrics({name: value for name, value, _ in events}, step=samples)


_KINDS: dict[str, tuple[str, Callable[[Any], Monitor]]] = {
    "csv_monitor": ("csv", CsvFiles),
    "tensorboard": ("tensorboard", Tensorboard),
    "wandb": ("wandb", Wandb),
    "comet": ("comet_ml", Comet),
}


def _folder(section: str, config: TensorboardConfig) -> Path:
    folder = Path(config.output_path).expanduser() / config.job_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{section}.output_path: {folder} cannot be made: {error.strerror}") from None
    return folder


class Monitors:
    """All that a config asks for. On ranks other than 0 there are none, whatever it asks for.

    Raises:
        ConfigError: on every rank: a package that is asked for is not installed. On rank 0: no place to write to.
    """

    def __init__(self, config: MonitorsConfig, rank: int) -> None:
        self._open: list[tuple[str, Monitor]] = []
        for section, (package, make) in _KINDS.items():
            wanted = getattr(config, section)
            if not wanted.enabled:
                continue
            if importlib.util.find_spec(package) is None:
                raise ConfigError(
                    f"{section}.enabled: the package {package} is not installed",
                    f"pip install {package}, or turn it off; csv_monitor needs none",
                )
            if rank == 0:
                self._open.append((section, make(wanted)))

    @property
    def enabled(self) -> bool:
        """Numbers that are written here go somewhere."""
        return bool(self._open)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write numbers, those of a program too. A place that fails is left out from then on: training goes on."""
        for item in list(self._open) if event_list else ():
            section, monitor = item
            try:
                monitor.write(event_list)
            except OSError as error:
                self._open.remove(item)
                notice("warning", f"{section}: {error}; nothing more is written there")
