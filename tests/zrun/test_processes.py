from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from zrun.processes import Ending, JobProcesses, Mark, Process, read_process, send_signal

MARK = Mark("job-under-test", 0)


@pytest.fixture
def sleeper():
    started: list[subprocess.Popen] = []

    def start(**environ: str) -> subprocess.Popen:
        command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
        process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, start_new_session=True)
        assert process.stdout is not None
        process.stdout.readline()  # its environment is its own from here on
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def marked(job_id="job-under-test", node_rank="0"):
    return {"ZRUN_JOB_ID": job_id, "ZRUN_NODE_RANK": node_rank}


def found(root, sessions=()):
    search = JobProcesses(MARK, root)
    for leader in sessions:
        search.add_session(leader)
    return {process.pid for process in search.find()}


def test_the_mark_has_to_be_exact(sleeper):
    root = sleeper()  # no ancestor of them, so that the mark alone decides
    ours = sleeper(**marked())
    others = [
        sleeper(**marked("job-under-test-2")),
        sleeper(**marked("xjob-under-test")),
        sleeper(**marked(node_rank="1")),
        sleeper(OTHER="ZRUN_JOB_ID=job-under-test", ZRUN_NODE_RANK="0"),
        sleeper(XZRUN_JOB_ID="job-under-test", ZRUN_NODE_RANK="0"),
    ]
    pids = found(root.pid)
    assert ours.pid in pids
    assert not pids & {process.pid for process in others}


def test_descendants_belong_to_it(sleeper):
    child = sleeper()
    assert child.pid in found(os.getpid())
    assert os.getpid() not in found(os.getpid())


def test_sessions_belong_to_it(sleeper):
    root, leader, stranger = sleeper(), sleeper(), sleeper()
    pids = found(root.pid, sessions=[leader.pid])
    assert leader.pid in pids and stranger.pid not in pids


def test_what_is_older_than_the_job_does_not(sleeper):
    older, root = sleeper(**marked()), sleeper()
    assert older.pid not in found(root.pid)


def test_the_dead_are_not_found(sleeper):
    child = sleeper(**marked())
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert child.pid not in found(os.getpid())


def test_a_signal_never_hits_another_process_of_that_number(sleeper):
    child = sleeper()
    process = read_process(child.pid)
    assert process is not None
    impostor = Process(process.pid, process.parent, process.session, process.state, process.start - 1)
    assert not send_signal(impostor, signal.SIGKILL)
    assert child.poll() is None
    assert send_signal(process, signal.SIGKILL)
    assert child.wait(10) == -signal.SIGKILL
    assert not send_signal(process, signal.SIGKILL)


def test_a_name_with_parentheses_is_read(tmp_path):
    path = tmp_path / "a ) R 1 (b"
    path.symlink_to(sys.executable)
    with subprocess.Popen([str(path), "-c", "input()"], executable=str(path), stdin=subprocess.PIPE) as child:
        process = read_process(child.pid)
        assert process is not None and process.parent == os.getpid()
        child.communicate(b"\n")


class World:
    """Processes that end at given signals, as an Ending sees them."""

    def __init__(self, *pids: int) -> None:
        self.alive = {pid: Process(pid, 1, pid, "S", 100) for pid in pids}
        self.heard: list[tuple[int, int]] = []
        self.stubborn: set[int] = set()

    def find(self) -> list[Process]:
        return list(self.alive.values())

    def send(self, process: Process, number: int) -> bool:
        self.heard.append((process.pid, number))
        if number == signal.SIGKILL or (number != signal.SIGCONT and process.pid not in self.stubborn):
            self.alive.pop(process.pid, None)
        return True

    def heard_by(self, pid: int) -> list[int]:
        return [number for who, number in self.heard if who == pid]


def test_an_ending_is_polite_once_and_kills_at_the_deadline():
    world = World(1, 2)
    world.stubborn = {2}
    ending = Ending(world.find, signal.SIGTERM, deadline=10.0, send=world.send)
    assert [ending.step(t) for t in (0.0, 5.0, 9.9)] == [False, False, False]
    assert world.heard_by(1) == [signal.SIGTERM, signal.SIGCONT]
    assert world.heard_by(2) == [signal.SIGTERM, signal.SIGCONT]
    assert [ending.step(t) for t in (10.0, 10.1)] == [False, True]
    assert world.heard_by(2)[-1] == signal.SIGKILL


def test_an_ending_tells_those_that_come_late():
    world = World(1)
    world.stubborn = {1, 2}
    ending = Ending(world.find, signal.SIGTERM, deadline=10.0, send=world.send)
    ending.step(0.0)
    world.alive[2] = Process(2, 1, 1, "S", 200)
    ending.step(1.0)
    assert signal.SIGTERM in world.heard_by(2)


def test_an_ending_can_be_hastened_but_not_delayed():
    world = World(1)
    world.stubborn = {1}
    ending = Ending(world.find, signal.SIGINT, deadline=10.0, send=world.send)
    ending.step(0.0)
    ending.change(signal.SIGTERM, 50.0)
    ending.step(1.0)
    assert world.heard_by(1) == [signal.SIGINT, signal.SIGCONT, signal.SIGTERM, signal.SIGCONT]
    assert ending.deadline == 10.0
    ending.change(signal.SIGKILL, 2.0)
    ending.step(2.0)
    assert ending.step(2.1)
