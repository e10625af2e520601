"""Disks that cannot hold offloaded state, that fail while training, that several jobs share; jobs that are killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from zrun_runtime.errors import OffloadError

from . import disk_uses as uses
from .offload_uses import Job, make, run_steps
from .worlds import World, rank_environment

pytestmark = pytest.mark.slow

Worlds = Callable[..., World]


def test_a_path_that_cannot_be_used_is_told_before_training(world: Worlds, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, why in ((tmp_path / "nowhere", "does not exist"), (tmp_path / "file", "is not a directory")):
        for key in ("optimizer_tier", "param_tier"):
            job = Job(stage=3, path=str(path), **{key: "nvme"})
            with pytest.raises(OffloadError, match=why):
                make(job)
    with pytest.raises(OffloadError, match="cannot write into /proc"):
        make(Job(optimizer_tier="nvme", path="/proc"))


@pytest.mark.parametrize("key", ("optimizer_tier", "param_tier"))
def test_one_rank_without_its_disk_stops_all(key: str, world: Worlds, tmp_path: Path) -> None:
    said = world(2).run(uses.refused, job=Job(stage=3, path=str(tmp_path), **{key: "nvme"}))
    assert "another rank cannot use its disk" in said[0]
    assert "nowhere does not exist" in said[1]


@pytest.mark.parametrize("kind", ("relative", "home", "link", "letters"))
def test_a_path_may_be_written_in_any_way(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And stays the same place if the script goes elsewhere."""
    place = tmp_path / "größe 盘"
    place.mkdir()
    (tmp_path / "link").symlink_to(place)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = {"relative": f"./{place.name}", "home": f"~/{place.name}", "link": str(tmp_path / "link")}.get(
        kind, str(place)
    )
    engine = make(Job(stage=3, optimizer_tier="nvme", param_tier="nvme", path=path))
    assert len(list(place.iterdir())) == 2, "one directory for the optimizer, one for the parameters"
    monkeypatch.chdir("/")
    run_steps(engine, Job(), 0, range(1))
    engine.destroy()


def test_what_others_put_beside_the_files_is_left_alone(tmp_path: Path) -> None:
    """Names like ours: a link to somewhere else, a lock that is one; a directory whose process died making it goes."""
    mine = tmp_path / "elsewhere"
    mine.mkdir()
    (mine / "precious").write_text("mine")
    host = uses.host_name()
    (tmp_path / f"zrun-offload.{host}.999999999-1.aaaa").symlink_to(mine)
    linked = tmp_path / f"zrun-offload.{host}.999999999-1.bbbb"
    linked.mkdir()
    (linked / "in-use").symlink_to(mine / "precious")
    abroad = tmp_path / "zrun-offload.other-host.999999999-1.cccc"
    abroad.mkdir()
    fresh, old = (tmp_path / f"zrun-offload.{host}.999999999-1.{name}" for name in ("dddd", "eeee"))
    fresh.mkdir()
    old.mkdir()
    os.utime(old, (1, 1))
    reused = tmp_path / f"zrun-offload.{host}.{os.getpid()}-1.ffff"  # our process id, of another process
    reused.mkdir()
    (reused / "in-use").touch()
    make(Job(optimizer_tier="nvme", path=str(tmp_path))).destroy()
    assert (mine / "precious").read_text() == "mine"
    assert linked.exists() and abroad.exists() and fresh.exists()
    assert not old.exists() and not reused.exists()


def _python(code: str, *arguments: str, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*before, sys.executable, "-c", code, *arguments],
        env=rank_environment(0, 1, None),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_full_disk_is_told_before_training(tmp_path: Path) -> None:
    """A file system of 1 MiB, in a mount namespace of its own."""
    code = (
        "import subprocess, sys; from tests.distributed.offload_uses import Job, make\n"
        "subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=64k', 'none', sys.argv[1]], check=True)\n"
        "make(Job(optimizer_tier='nvme', dtype='bf16', path=sys.argv[1]))"
    )
    job = _python(code, str(tmp_path), before=("unshare", "--user", "--map-root-user", "--mount"))
    said = job.communicate(timeout=120)[1]
    assert job.returncode == 1
    assert "zero_optimization.offload_optimizer.nvme_path: reserving" in said and "No space left on device" in said
    assert "bytes are free" in said


@pytest.mark.parametrize("tiers", (("nvme", "none"), ("none", "nvme")), ids="-".join)
@pytest.mark.parametrize("how", ("few bytes a write", "slowly"))
def test_an_odd_disk_changes_nothing(how: str, tiers: tuple[str, str], tmp_path: Path) -> None:
    """Short writes go on where they ended; with several threads no request overtakes another of the same bytes."""
    threads = {"aio": {"thread_count": 8, "queue_depth": 8}}
    job = Job(
        stage=3, optimizer_tier=tiers[0], param_tier=tiers[1], dtype="bf16", path=str(tmp_path), steps=3, more=threads
    )
    assert uses.trained_on_an_odd_disk(how, job) == uses.trained_on_an_odd_disk("", job.resident)


@pytest.mark.parametrize("tiers", (("nvme", "none"), ("none", "nvme")), ids="-".join)
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("nothing is written", "nothing more is written"),
        ("bad block on writing", "Input/output error"),
        ("bad block on reading", "Input/output error"),
        ("full", "No space left on device"),
        ("read-only", "Read-only file system"),
        ("deleted", "No such file or directory"),
        ("truncated", "another program made it 4,096 of"),
    ],
)
def test_a_disk_that_fails_in_a_step(how: str, why: str, tiers: tuple[str, str], tmp_path: Path) -> None:
    """It is said where, training does not go on with what it has, and the last checkpoint is whole and the last."""
    (tmp_path / "disk").mkdir()
    job = Job(
        stage=3, optimizer_tier=tiers[0], param_tier=tiers[1], dtype="bf16",
        path=str(tmp_path / "disk"), zero={"sub_group_size": 512},
    )  # fmt: skip
    said, saved, loaded = uses.trained_on_a_failing_disk(how, job, str(tmp_path / "checkpoints"))
    key = "offload_optimizer" if tiers[0] == "nvme" else "offload_param"
    for text in said[:2]:
        assert f"{key}.nvme_path" in text and str(tmp_path / "disk") in text and why in text
        assert "start again, and load the last checkpoint" in text
    assert said[2], "a checkpoint was saved from what is left"
    assert saved == loaded


@pytest.mark.parametrize("key", ("optimizer_tier", "param_tier"))
def test_a_rank_without_room_stops_all(key: str, world: Worlds, tmp_path: Path) -> None:
    """Of files above a page, which is the trial of the disk."""
    job = Job(stage=3, path=str(tmp_path), **{key: "nvme"})
    said = world(2).run(uses.refused_for_want_of_room, job=job, room=4096)
    assert "another rank cannot use its disk" in said[0]
    assert "reserving" in said[1] and "File too large" in said[1] and "ulimit -f" in said[1]


def test_a_killed_job_is_swept_and_a_live_one_is_not(tmp_path: Path) -> None:
    code = "import sys; from tests.distributed.disk_uses import endless; endless(sys.argv[1])"
    jobs = [_python(code, str(tmp_path)) for _ in range(2)]
    try:
        for job in jobs:
            assert job.stdout is not None and job.stdout.readline() == "training\n"
        mine = {job.pid: next(tmp_path.glob(f"zrun-offload.*.{job.pid}-*")) for job in jobs}
        assert {oct(path.stat().st_mode & 0o777) for path in mine.values()} == {"0o700"}
        assert {oct(file.stat().st_mode & 0o777) for path in mine.values() for file in path.iterdir()} == {"0o600"}
        jobs[0].kill()
        jobs[0].wait()
        assert mine[jobs[0].pid].exists()
        engine = make(Job(optimizer_tier="nvme", path=str(tmp_path)))
        assert not mine[jobs[0].pid].exists(), "the files of the job that was killed are still there"
        assert mine[jobs[1].pid].exists(), "the files of a job that lives were taken from it"
        engine.destroy()
        assert list(tmp_path.iterdir()) == [mine[jobs[1].pid]]
        assert jobs[1].poll() is None
    finally:
        for job in jobs:
            job.kill()
            job.communicate()
