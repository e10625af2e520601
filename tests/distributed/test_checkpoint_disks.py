"""Real disks that fill up, vanish, or forbid writing in the middle of a save: nothing that was whole is lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from . import checkpoint_disks as disks
from .worlds import rank_environment

pytestmark = pytest.mark.slow
# What is said, in words of the system, of whatever begins before each call in turn.
SAID = {
    "full": "No space left on device",
    "fills_up": "No space left on device",
    "fills_up_in_background": "No space left on device",
    "file_limit": "File too large",
    "goes_away": "No such file or directory",
    "forbidden": "Permission denied",
    "read_only": "Read-only file system",
}


def _namespace() -> tuple[list[str], list[str]]:
    """The command that gives a process mounts of its own, and the kinds of disks that it may make."""
    if os.geteuid():
        return ["unshare", "--user", "--map-root-user", "--mount"], ["tmpfs"]
    loop = Path("/dev/loop-control").exists() and shutil.which("mkfs.ext4") is not None
    return ["unshare", "--mount", "--propagation", "private"], ["tmpfs", "ext4"] if loop else ["tmpfs"]


def test_a_disk_that_gets_into_trouble(tmp_path: Path) -> None:
    command, kinds = _namespace()
    scenes = [f"{kind}:{scene}" for kind in kinds for scene in disks.SCENES if (kind, scene) != ("tmpfs", "read_only")]
    scenes.sort(key=lambda scene: "forbidden" in scene)  # after it this process may mount no more
    scenes = [scene for scene in scenes if scene != "ext4:forbidden"]
    run = subprocess.run(
        [*command, sys.executable, "-m", disks.__name__, str(tmp_path), *scenes],
        env=rank_environment(0, 1, None),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in run.stdout.splitlines():
        if line.startswith("{"):
            found[json.loads(line)["scene"]].append(json.loads(line))
    assert list(found) == scenes
    for scene, lines in found.items():
        name, place = scene.split(":")[1], str(tmp_path / scene)
        for line in lines:
            assert line["whole"], line
            assert line["said"] == "" or SAID[name] in line["said"], line
            assert line["said"] == "" or (line["said"].startswith("CheckpointError") and place in line["said"]), line
            assert line["said"] == "" or "No space" not in SAID[name] or "missing: " in line["said"], line
        troubled = [line for line in lines if line["said"]]
        assert len(troubled) >= {"full": 3, "file_limit": 3}.get(name, 10), scene
        assert lines[0]["said"] == "" and (lines[-1]["said"] == "" or name == "forbidden"), scene
