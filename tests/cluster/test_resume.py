"""Two hosts with disks of their own, whose ranks are killed again and again: it ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

from tests.cluster import lab as labs

KILLS = int(os.environ.get("ZRUN_KILL_ROUNDS", "2"))
STEPS = 12 * KILLS + 10
SCRIPT = """
import os, sys, time, torch
from tests.distributed.checkpoint_uses import config_of, engine_of, mark_of, train

torch.set_num_threads(1)
work, steps = sys.argv[1], int(sys.argv[2])
disk = os.path.join(work, "host" + os.environ["GROUP_RANK"])
os.makedirs(disk, exist_ok=True)
os.chdir(disk)
local = {"async": True, "keep_last": 3, "use_node_local_storage": True, "timeout": 60}
engine = engine_of(config_of(2, checkpoint=local))
engine.load_checkpoint("ckpt")
print("begun", engine.global_steps, flush=True)
while engine.global_steps < steps:
    step = engine.global_steps
    (loss,) = train(engine, step, step + 1)
    with open("losses", "a") as file:
        file.write(f"{step} {loss.hex()}\\n")
    engine.save_checkpoint("ckpt")
    time.sleep(0.03)
print("end", mark_of(engine)["masters"], mark_of(engine)["moments"], flush=True)
"""


def curve(work: Path) -> dict[tuple[int, int], str]:
    """(host, step) -> loss. A step that was done again, since it was lost, had the same loss."""
    found: dict[tuple[int, int], str] = {}
    for host in (0, 1):
        lines = (work / f"host{host}" / "losses").read_text().splitlines()
        for step, loss in (line.split() for line in lines if len(line.split()) == 2):
            assert found.setdefault((host, int(step)), loss) == loss, (host, step)
    return found


def run(lab: labs.Lab, place: Path, kills: int) -> tuple[dict[tuple[int, int], str], set[str]]:
    """The losses of a job whose ranks are killed so many times, and its weights and moments at the end."""
    place.mkdir()
    (place / "train.py").write_text(SCRIPT)
    chance = random.Random(kills)
    words = ["--hostfile", lab.hostfile(slots=1), "--backend", "gloo", "--grace", "1", "--max_restarts", str(KILLS)]
    with labs.zrun(lab, place, *words, "train.py", str(place), str(STEPS)) as job:
        for number in range(kills):
            job.wait_for(("begun", 2 * (number + 1)), 120)
            time.sleep(chance.random() * 0.8)
            victims = chance.choice(lab.nodes).workers()
            labs.kill(chance.choice(victims))
        assert job.wait(120 + STEPS) == 0, job.said
        assert job.out.count("begun") == 2 * (kills + 1), job.said
        ends = {line.split("] end", 1)[1] for line in job.out.splitlines() if "] end" in line}
        assert len(ends) == 1, job.said
    return curve(place), ends


def test_killed_again_and_again_the_curve_is_that_of_a_run_in_peace(lab: labs.Lab, tmp_path: Path) -> None:
    peace, killed = run(lab, tmp_path / "peace", 0), run(lab, tmp_path / "killed", KILLS)
    assert len(peace[0]) == 2 * STEPS
    assert killed == peace
