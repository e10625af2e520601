"""However a job on many hosts ends: nothing of it is left anywhere, and the exit code says why."""

from __future__ import annotations

import signal
import time

import pytest

from tests.cluster.lab import Lab, Run, kill, wait_for, zrun

SLEEP = """
import os, subprocess, sys, time
if os.environ["LOCAL_RANK"] == "0":
    subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(600)"])
print("up", flush=True)
time.sleep(600)
"""
FAILS = """
import os, time
print("up", flush=True)
time.sleep(1)
if os.environ["RANK"] == "3":
    def broken():
        raise SystemExit(3)
    import sys, traceback
    try:
        raise ValueError("the disk of node-2 is square")
    except ValueError:
        traceback.print_exc()
    broken()
time.sleep(600)
"""
FAST = ("--backend", "gloo", "--lease", "4", "--grace", "2")
BOUND = 4 + 2 + 5  # seconds: lease, grace, and 5


def start(lab: Lab, tmp_path, script: str, *options: str):
    (tmp_path / "script.py").write_text(script)
    return zrun(lab, tmp_path, "--hostfile", lab.hostfile(), *FAST, *options, "script.py")


def all_up(run: Run, lab: Lab, count: int = 4) -> None:
    run.wait_for(("up", count))
    assert all(node.workers() for node in lab.nodes)


def wait_empty(lab: Lab, seconds: float, nodes=None) -> None:
    """Waits until no worker, agent or grandchild is left."""
    for node in nodes or lab.nodes:
        wait_for(lambda node=node: not node.workers() + node.pids_of("zrun.agent"), f"the end on {node.name}", seconds)


def test_a_rank_that_fails_ends_all_within_ten_seconds(lab, tmp_path):
    with start(lab, tmp_path, FAILS, "--grace", "30") as run:
        all_up(run, lab)
        began = time.monotonic()
        assert run.wait(12) == 3
        assert time.monotonic() - began < 10
        wait_empty(lab, 1)
        assert "rank 3 on node-2 exited with code 3" in run.out
        assert run.out.count("ValueError: the disk of node-2 is square") == 1
        assert "3 other ranks stopped" in run.out


def test_the_rank_that_takes_others_along_is_blamed(lab, tmp_path):
    script = """
import datetime, os, sys, torch, torch.distributed as d
def end(*error):  # at once: torch may abort where a process ends with its group
    sys.__excepthook__(*error)
    os._exit(1)
d.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
sys.excepthook = end
print("up", flush=True)
for i in range(100000):
    if i == 5 and os.environ["RANK"] == "3":
        raise ValueError("the first")
    d.all_reduce(torch.ones(1))
"""
    with start(lab, tmp_path, script) as run:
        assert run.wait(40) == 1
        assert "rank 3 on node-2 exited with code 1" in run.out
        assert run.out.rstrip().count("ValueError: the first") == 1


def test_a_launcher_that_is_killed_while_it_asks(lab, tmp_path):
    lab.nodes[1].stop_sshd()
    lab.nodes[1].start_sshd(ForceCommand="sleep 60")
    with start(lab, tmp_path, SLEEP) as run:
        wait_for(lambda: lab.nodes[0].pids_of("zrun.agent"), "the questions")
        run.process.kill()
        wait_empty(lab, 3, lab.nodes[:1])


def test_a_killed_launcher(lab, tmp_path):
    with start(lab, tmp_path, SLEEP) as run:
        all_up(run, lab)
        run.process.kill()
        wait_empty(lab, BOUND)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_to_the_launcher(lab, tmp_path, number):
    with start(lab, tmp_path, SLEEP) as run:
        all_up(run, lab)
        run.process.send_signal(number)
        assert run.wait(10) == 128 + number
        wait_empty(lab, 1)


def test_a_pulled_cable(lab, tmp_path):
    with start(lab, tmp_path, SLEEP) as run:
        all_up(run, lab)
        lab.nodes[1].pull_cable()
        assert run.wait(BOUND) == 4
        wait_empty(lab, BOUND)
        assert "node-2 is lost: it gave no sign of life for 4 s" in run.out


def test_a_killed_agent(lab, tmp_path):
    with start(lab, tmp_path, SLEEP) as run:
        all_up(run, lab)
        (agent,) = [p for p in lab.nodes[1].pids_of("zrun.agent") if parent(p) in lab.nodes[1].pids_of("zrun.agent")]
        kill(agent)
        assert run.wait(BOUND) == 4
        wait_empty(lab, 1)
        assert "node-2 is lost" in run.out and "SIGKILL" in run.out


def test_a_killed_sshd_session(lab, tmp_path):
    with start(lab, tmp_path, SLEEP) as run:
        all_up(run, lab)
        node = lab.nodes[1]
        for pid in node.pids_of("sshd:"):
            kill(pid)
        assert run.wait(BOUND) == 4
        wait_empty(lab, BOUND)
        assert "node-2 is lost: the SSH connection to root@10.99.0.2:22 was cut" in run.out


def test_two_jobs_share_the_nodes_and_one_is_ended(lab, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    quiet = "import os, time\nprint('up', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.1)\n"
    with start(lab, first, SLEEP) as ended, start(lab, second, quiet) as other:
        all_up(ended, lab)
        all_up(other, lab)
        ended.process.terminate()
        assert ended.wait(10) == 143
        (second / "go").touch()
        assert other.wait(10) == 0
        assert "warning" not in other.out + other.err


def test_a_restart_waits_for_the_lost_host(lab, tmp_path):
    script = SLEEP.replace("time.sleep(600)\n", "time.sleep(600 if os.environ['ZRUN_RESTART_COUNT'] == '0' else 0)\n")
    script = script.replace('print("up"', 'print("up", os.environ["ZRUN_RESTART_COUNT"], os.environ["MASTER_PORT"]')
    with start(lab, tmp_path, script, "--max_restarts", "1") as run:
        all_up(run, lab)
        lab.nodes[1].pull_cable()
        run.wait_for(("starts again (1 of 1)", 1))
        lab.nodes[1].plug_in()
        assert run.wait(40) == 0
        ports = {line.split()[-1] for line in run.out.splitlines() if "] up " in line}
        assert len(ports) == 2 and run.out.count("up 1") == 4


TRAIN = """
import os, time, torch, zrun_runtime
batch = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1}
model = torch.nn.Linear(4, 1)
config = {**batch, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 2}}
engine, *_ = zrun_runtime.initialize(model=model, config=config)
print("up", os.environ["WORLD_SIZE"], "accumulates", engine.gradient_accumulation_steps(), flush=True)
time.sleep(600 if os.environ["ZRUN_RESTART_COUNT"] == "0" else 0)
"""


def test_a_restart_goes_on_without_a_host_that_stays_away(lab, tmp_path):
    options = ("--max_restarts", "1", "--min_nodes", "1", "--lease", "2", "--grace", "1", "--connect_timeout", "2")
    with start(lab, tmp_path, TRAIN, *options) as run:
        run.wait_for(("up 4 accumulates 2", 4), 60)
        lab.nodes[0].pull_cable()
        assert run.wait(90) == 0
        assert "goes on without node-1: 1 of 2 hosts are left" in run.out
        assert run.out.count("up 2 accumulates 4") == 2


def parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(") ")[2].split()[1])
