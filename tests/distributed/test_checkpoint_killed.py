"""Whatever instant a job is killed at, `latest` names a whole checkpoint, and the next start goes on from it."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zrun_runtime.checkpoint.compare import verify
from zrun_runtime.checkpoint.files import list_tags, read_latest
from zrun_runtime.checkpoint.open import open_checkpoint

from .worlds import free_port, rank_environment

pytestmark = pytest.mark.slow
ROUNDS = int(os.environ.get("ZRUN_KILL_ROUNDS", "2"))  # starts; each is killed once, at a random instant


def start(directory: Path, mode: str, world: int) -> list[subprocess.Popen[str]]:
    port = free_port()
    command = [sys.executable, "-m", "tests.distributed.checkpoint_killed", str(directory), mode]
    return [
        subprocess.Popen(
            command,
            env=rank_environment(rank, world, port),
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(world)
    ]


def check(directory: Path) -> int:
    """Everything that looks like a checkpoint is whole. Returns the steps that `latest` has."""
    latest = read_latest(directory)
    if latest is None:
        assert list_tags(directory) == []
        return 0
    tags = list_tags(directory)
    assert latest in tags
    for tag in tags:
        assert verify(directory, tag) == ""
    with open_checkpoint(directory) as reader:
        return int(reader.manifest.state["global_steps"])


@pytest.mark.parametrize("mode", ("sync", "async"))
def test_killed_while_saving(mode: str, tmp_path: Path) -> None:
    chance = random.Random(mode)
    directory, steps = tmp_path / "d", 0
    for _ in range(ROUNDS):
        ranks = start(directory, mode, 2)
        try:
            assert ranks[0].stdout is not None
            loaded = ranks[0].stdout.readline()
            assert int(re.findall(r"(\d+)$", loaded)[0]) == steps
            for _ in range(chance.randint(1, 4)):
                assert "saved" in ranks[0].stdout.readline()
            time.sleep(chance.random() * 0.15)
        finally:
            for rank in ranks:
                rank.kill()
            for rank in ranks:
                rank.wait()
        now = check(directory)
        assert now >= steps
        steps = now
    assert steps > 0
