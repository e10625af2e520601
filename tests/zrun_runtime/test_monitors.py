"""Where numbers go: files of text by themselves, packages by what they are called with."""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from zrun_runtime.config import load_config
from zrun_runtime.errors import ConfigError
from zrun_runtime.monitors import Monitors

EVENTS = [("Train/Samples/train_loss", 0.5, 32), ("Train/Samples/lr", 0.25, 32)]


def monitors(rank: int = 0, **sections: dict[str, Any]) -> Monitors:
    source = {name: {"enabled": True, **section} for name, section in sections.items()}
    return Monitors(load_config(source).monitors, rank)


def test_files_of_text(tmp_path: Path) -> None:
    place = {"output_path": str(tmp_path / "deep" / "er"), "job_name": "run"}
    for _ in range(2):  # the second one goes on where the first one was
        monitor = monitors(csv_monitor=place)
        assert monitor.enabled
        monitor.write_events(EVENTS)
        monitor.write_events([])
    folder = tmp_path / "deep" / "er" / "run"
    assert {path.name for path in folder.iterdir()} == {"Train_Samples_train_loss.csv", "Train_Samples_lr.csv"}
    assert (folder / "Train_Samples_train_loss.csv").read_text() == "step,train_loss\n32,0.5\n32,0.5\n"


def test_other_ranks_write_nothing_and_off_is_off(tmp_path: Path) -> None:
    other = monitors(1, csv_monitor={"output_path": str(tmp_path / "x")})
    other.write_events(EVENTS)
    assert not other.enabled and not monitors().enabled and not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"csv_monitor\.output_path: .*file/run cannot be made"):
        monitors(csv_monitor={"output_path": str(tmp_path / "file"), "job_name": "run"})


def test_a_place_that_fails_later_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = monitors(csv_monitor={"output_path": str(tmp_path), "job_name": "run"})
    (tmp_path / "run").rmdir()
    monitor.write_events(EVENTS)
    monitor.write_events(EVENTS)
    assert not monitor.enabled
    assert capsys.readouterr().err.count("nothing more is written there") == 1


@pytest.mark.parametrize("section", ["tensorboard", "wandb", "comet"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_package_that_is_missing_is_told_on_every_rank(
    section: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("tensorboard", "wandb", "comet_ml"):
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(ConfigError, match=f"{section}.enabled: the package .* is not installed"):
        monitors(rank, **{section: {}})


class Recorder(SimpleNamespace):
    """Remembers every call of it and of its methods."""

    def __getattr__(self, name: str) -> Any:
        def record(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            return self

        return record


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a recorder in a package's place; of its attributes `name` is one."""

    def put(name: str, attribute: str, module: str = "") -> Recorder:
        recorder = Recorder(calls=[])
        for each in {name, module or name}:
            stand_in = ModuleType(each)
            stand_in.__spec__ = importlib.machinery.ModuleSpec(each, None)
            setattr(stand_in, attribute, getattr(recorder, attribute))
            monkeypatch.setitem(sys.modules, each, stand_in)
        return recorder

    return put


def test_tensorboard(package: Any, tmp_path: Path) -> None:
    recorder = package("tensorboard", "SummaryWriter", "torch.utils.tensorboard")
    monitors(tensorboard={"output_path": str(tmp_path), "job_name": "run"}).write_events(EVENTS)
    assert recorder.calls == [
        ("SummaryWriter", (), {"log_dir": str(tmp_path / "run")}),
        *(("add_scalar", event, {}) for event in EVENTS),
        ("flush", (), {}),
    ]


def test_wandb(package: Any) -> None:
    recorder = package("wandb", "init")
    monitors(wandb={"team": "t", "group": "g", "project": "p"}).write_events(EVENTS)
    assert recorder.calls[0] == ("init", (), {"project": "p", "group": "g", "entity": "t"})
    assert recorder.calls[1] == ("log", ({name: value for name, value, _ in EVENTS},), {"step": 32})


def test_comet_logs_now_and_then(package: Any) -> None:
    recorder = package("comet_ml", "start")
    monitor = monitors(comet={"api_key": "secret", "experiment_name": "e", "samples_log_interval": 50})
    for samples in (32, 64, 96):
        monitor.write_events([("Train/Samples/lr", 0.1, samples)])
    names = [(name, kwargs) for name, _, kwargs in recorder.calls]
    assert names == [
        ("start", {"api_key": "secret"}),
        ("set_name", {}),
        ("log_metrics", {"step": 32}),
        ("log_metrics", {"step": 96}),
    ]
    notes = load_config({"comet": {"enabled": True, "api_key": "secret"}}).notes
    assert not [note for note in notes if note.value == "secret"], "no report shows it"
