"""The files behind `zrun ps`: ours alone, gone with the job."""

from __future__ import annotations

import json
import os

from zrun.registry import directory, registered, running, sweep


def test_a_job_is_listed_while_it_runs(tmp_path):
    place = directory({"XDG_RUNTIME_DIR": str(tmp_path)})
    assert running(place) == []
    with registered(place, "abc", 4, ("a", "b"), "train.py"):
        (entry,) = running(place)
        assert (entry.job_id, entry.pid, entry.world_size, entry.hosts) == ("abc", os.getpid(), 4, ("a", "b"))
        assert os.stat(place).st_mode & 0o777 == 0o700
        with registered(place, "def", 1, ("a",), "x.py"):
            assert [entry.job_id for entry in running(place)] == ["abc", "def"]
        assert [entry.job_id for entry in running(place)] == ["abc"]
    assert list(tmp_path.iterdir()) == []


def test_files_of_jobs_that_were_killed_are_swept(tmp_path):
    place = directory({"XDG_RUNTIME_DIR": str(tmp_path)})
    os.mkdir(place, 0o700)
    entry = {
        "job_id": "old",
        "pid": os.getpid(),
        "start": 1,
        "world_size": 1,
        "hosts": [],
        "command": "x",
        "since": 1.0,
    }
    (tmp_path / "zrun" / "old.json").write_text(json.dumps(entry))
    (tmp_path / "zrun" / "torn.json").write_text("{")
    assert running(place) == []
    sweep(place)
    assert os.listdir(place) == []


def test_a_directory_of_somebody_else_is_not_believed(tmp_path):
    place = str(tmp_path / "zrun")
    os.mkdir(place)
    os.chmod(place, 0o777)
    with registered(place, "abc", 1, ("a",), "x"):
        assert os.listdir(place) == [] and running(place) == []
    real = tmp_path / "real"
    real.mkdir(0o700)
    os.symlink(real, tmp_path / "link")
    with registered(str(tmp_path / "link"), "abc", 1, ("a",), "x"):
        assert list(real.iterdir()) == []


def test_a_directory_that_goes_away_meanwhile_lists_nothing(tmp_path, monkeypatch):
    place = tmp_path / "zrun"
    place.mkdir(0o700)

    def gone(path):
        raise FileNotFoundError(2, "No such file or directory", path)

    monkeypatch.setattr("os.listdir", gone)
    assert running(str(place)) == []
    with registered(str(place), "id", 1, ("a",), "x.py"):
        pass
