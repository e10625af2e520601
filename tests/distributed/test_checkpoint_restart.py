"""A job that is started again goes on from its last checkpoint by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.jobs import job
from zrun_runtime.checkpoint.compare import verify
from zrun_runtime.checkpoint.files import list_tags, read_latest

pytestmark = pytest.mark.slow

SCRIPT = """
    import os, signal
    import torch
    import zrun_runtime
    from tests.distributed.checkpoint_uses import config_of, engine_of, mark_of, train

    torch.set_num_threads(1)
    engine = engine_of(config_of(3, checkpoint={"async": True, "keep_last": 1}))
    path, _ = engine.load_checkpoint("ckpt")
    print("begun", engine.global_steps, flush=True)
    while engine.global_steps < 6:
        train(engine, engine.global_steps, engine.global_steps + 1)
        engine.save_checkpoint("ckpt")
        if engine.global_steps == 4 and path is None and "CRASH" in os.environ:
            if engine.global_rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    print("end", mark_of(engine)["masters"], mark_of(engine)["moments"], flush=True)
"""

UNHEARD = """
    import atexit, resource, sys
    import torch
    import zrun_runtime
    from tests.distributed.checkpoint_uses import SmallNet, config_of, engine_of, train

    torch.set_num_threads(1)
    engine = engine_of(config_of(1, checkpoint={"async": True}), SmallNet)
    train(engine, 0, 1)
    engine.save_checkpoint("ckpt")
    engine._saver.wait()
    atexit.register(lambda: sys.stdout.write("cleaned up\\n"))
    if engine.global_rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    engine.save_checkpoint("ckpt", tag="lost")
    sys.stdout.write("the last line\\n")
    sys.exit(0)
"""

ENDS = """
    import torch
    from tests.distributed.checkpoint_uses import SmallNet, config_of, engine_of, train

    torch.set_num_threads(1)
    engine = engine_of(config_of(1, checkpoint={"async": True}), SmallNet)
    train(engine, 0, 1)
    engine.save_checkpoint("ckpt")
"""


def test_the_end_of_a_program_waits_for_its_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with job(tmp_path, ENDS, "--num_gpus", "2", "--backend", "gloo", "--plain") as run:
        assert run.wait(150.0) == 0, run.out + run.err
    assert read_latest(tmp_path / "ckpt") == "global_step1" and verify(tmp_path / "ckpt", "global_step1") == ""


def test_a_program_that_ends_without_hearing_of_a_lost_checkpoint_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it wrote and registered comes out all the same."""
    monkeypatch.chdir(tmp_path)
    with job(tmp_path, UNHEARD, "--num_gpus", "2", "--backend", "gloo", "--plain") as run:
        assert run.wait(150.0) == 1, run.out
        assert run.out.count("the last line") == run.out.count("cleaned up") == 2, run.out
        said = run.out + run.err
        assert "lost was not written" in said and "File too large" in said and "rank 1" in said
    assert read_latest(tmp_path / "ckpt") == "global_step1" and list_tags(tmp_path / "ckpt") == ["global_step1"]
    assert verify(tmp_path / "ckpt", "global_step1") == ""


def test_a_restarted_job_ends_as_if_nothing_had_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for crash in (False, True):
        place = tmp_path / str(crash)
        place.mkdir()
        monkeypatch.chdir(place)
        if crash:
            monkeypatch.setenv("CRASH", "1")
        options = ("--num_gpus", "2", "--max_restarts", "1", "--backend", "gloo", "--plain")
        with job(place, SCRIPT, *options) as run:
            assert run.wait(150.0) == 0, run.out
            begun = [int(line.split("begun")[1]) for line in run.out.splitlines() if "begun" in line]
            assert begun[:2] == [0, 0]
            assert (len(begun) == 4 and begun[2] == begun[3] and begun[2] in (2, 3, 4)) == crash
            found = {line.split("] end", 1)[1] for line in run.out.splitlines() if "] end" in line}
            assert len(found) == 1
            ends += found
    assert ends[0] == ends[1]
