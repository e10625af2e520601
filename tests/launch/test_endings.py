"""However a job ends, the exit code says how, and nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.launch.jobs import ROOT, job, kill, state_of

CPU = ("--backend", "gloo")

SLEEP = """
    import os, pathlib, time
    pathlib.Path("up" + os.environ["RANK"]).touch()
    time.sleep(600)
"""
STUBBORN = """
    import os, pathlib, signal, time
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pathlib.Path("up" + os.environ["RANK"]).touch()
    while True:
        time.sleep(600)
"""
# The grandchild is a session of its own, a double fork away, has cleared its environment and ignores TERM.
DAEMON = """
    import os, pathlib, signal, subprocess, sys, time
    code = '''
    import os, pathlib, signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork(): os._exit(0)
    os.setsid()
    pathlib.Path("daemon.new").write_text(str(os.getpid())); os.rename("daemon.new", "daemon")
    time.sleep(600)
    '''
    import textwrap
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env={}, start_new_session=True)
    pathlib.Path("up" + os.environ["RANK"]).touch()
"""


def both_up(run):
    run.wait_for("up0")
    run.wait_for("up1")


def test_success(tmp_path):
    with job(tmp_path, "print('done')", "--num_gpus", "2", *CPU) as run:
        assert run.wait() == 0
        assert run.out.count("done") == 2
        assert run.err == ""
        assert run.pids() == []
        assert list(run.temp.iterdir()) == []


def test_the_failing_workers_code_is_ours(tmp_path):
    script = """
        import os, sys, time
        if os.environ["RANK"] == "1":
            print("the reason", file=sys.stderr)
            os._exit(3)
        time.sleep(600)
    """
    with job(tmp_path, script, "--num_gpus", "3", *CPU) as run:
        assert run.wait(10) == 3
        assert run.pids() == []
        last = run.out[run.out.rindex("ended with") :]
        assert "rank 1 on localhost exited with code 3" in last
        assert "the reason" in last
        assert "2 other ranks stopped" in last
        logs = next(run.temp.iterdir())
        assert str(logs / "rank-1") in last
        assert (logs / "rank-1" / "stderr").read_text() == "the reason\n"
        assert logs.stat().st_mode & 0o777 == 0o700


def test_a_killed_worker(tmp_path):
    script = """
        import os, signal, time
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    """
    with job(tmp_path, script, "--num_gpus", "2", *CPU) as run:
        assert run.wait(10) == 137
        assert "SIGKILL" in run.out
        assert "memory" in run.out
        assert run.pids() == []


def test_a_sibling_that_ignores_term(tmp_path):
    script = """
        import os, pathlib, signal, sys, time
        if os.environ["RANK"] == "1":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            pathlib.Path("deaf").touch()
            time.sleep(600)
        while not os.path.exists("deaf"):
            time.sleep(0.01)
        sys.exit(5)
    """
    with job(tmp_path, script, "--num_gpus", "2", "--grace", "1", *CPU) as run:
        run.wait_for("deaf")
        start = time.monotonic()
        assert run.wait(10) == 5
        assert time.monotonic() - start < 3
        assert run.pids() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_job(tmp_path, number):
    with job(tmp_path, SLEEP, "--num_gpus", "2", *CPU) as run:
        both_up(run)
        run.send(number)
        assert run.wait(10) == 128 + number
        assert run.pids() == []


def test_workers_get_the_grace_to_save(tmp_path):
    script = """
        import os, pathlib, signal, sys, time
        def save(number, frame):
            time.sleep(0.5)
            pathlib.Path("saved" + os.environ["RANK"]).write_text(signal.Signals(number).name)
            sys.exit(0)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, save)
        pathlib.Path("up" + os.environ["RANK"]).touch()
        time.sleep(600)
    """
    with job(tmp_path, script, "--num_gpus", "2", *CPU) as run:
        both_up(run)
        run.send(signal.SIGTERM)
        assert run.wait(10) == 143
        assert [(tmp_path / f"saved{rank}").read_text() for rank in (0, 1)] == ["SIGTERM", "SIGTERM"]


def test_the_second_ctrl_c_kills(tmp_path):
    with job(tmp_path, STUBBORN, "--num_gpus", "2", *CPU) as run:
        both_up(run)
        run.send(signal.SIGINT)
        run.wait_for(lambda: "again" in run.out)
        time.sleep(0.4)
        assert run.process.poll() is None
        run.send(signal.SIGINT)
        assert run.wait(5) == 130
        assert run.pids() == []


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_user_signals_reach_every_worker(tmp_path, number):
    script = """
        import os, pathlib, signal, sys, time
        rank = os.environ["RANK"]
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda n, f: (pathlib.Path("got" + rank).write_text(str(n)), sys.exit(0)))
        pathlib.Path("up" + rank).touch()
        time.sleep(600)
    """
    with job(tmp_path, script, "--num_gpus", "2", *CPU) as run:
        both_up(run)
        run.send(number)
        assert run.wait(10) == 0
        assert {(tmp_path / f"got{rank}").read_text() for rank in (0, 1)} == {str(int(number))}


@pytest.mark.slow
@pytest.mark.parametrize(("script", "grace"), [(SLEEP, "30"), (STUBBORN, "1")], ids=["willing", "stubborn"])
@pytest.mark.parametrize("victim", ["launcher", "agent", "keeper and launcher"])
def test_nothing_outlives_a_killed_part(tmp_path, script, grace, victim):
    with job(tmp_path, script, "--num_gpus", "2", "--grace", grace, *CPU) as run:
        both_up(run)
        keeper, agent = run.agents()
        if victim != "launcher":
            kill(keeper if "keeper" in victim else agent)
        if "launcher" in victim:
            run.process.kill()
        run.wait_gone(3 if script is SLEEP else 1 + 3)
        if victim == "agent":
            assert run.wait(5) == 4
            assert "lost" in run.out and "SIGKILL" in run.out


def test_willing_workers_end_also_when_nobody_is_left_to_tell_them(tmp_path):
    script = """
        import os, pathlib, signal, time
        def end(number, frame):
            pathlib.Path("told" + os.environ["RANK"]).touch()
            raise SystemExit(0)
        signal.signal(signal.SIGTERM, end)
        pathlib.Path("up" + os.environ["RANK"]).touch()
        time.sleep(600)
    """
    with job(tmp_path, script, "--num_gpus", "2", *CPU) as run:
        both_up(run)
        for part in run.agents():
            kill(part, signal.SIGSTOP)  # so that neither can do anything between the two
        for part in run.agents():
            kill(part)
        run.wait_gone(10)
        assert (tmp_path / "told0").exists() and (tmp_path / "told1").exists()
        assert run.wait(20) == 4
        assert "localhost is lost" in run.out


def test_a_job_goes_on_without_its_keeper(tmp_path):
    script = """
        import os, pathlib, time
        pathlib.Path("up" + os.environ["RANK"]).touch()
        while not os.path.exists("go"):
            time.sleep(0.02)
        print("went on")
    """
    with job(tmp_path, script, "--num_gpus", "2", *CPU) as run:
        both_up(run)
        kill(run.agents()[0])
        run.wait_for(lambda: "keeper was killed" in run.out)
        (tmp_path / "go").touch()
        assert run.wait(10) == 0
        assert run.out.count("went on") == 2


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["nobody", "worker", "launcher", "agent"])
def test_no_grandchild_is_left(tmp_path, victim):
    fate = {"nobody": "", "worker": "raise SystemExit(9)"}.get(victim, "time.sleep(600)")
    with job(tmp_path, DAEMON + f"    {fate}\n", "--grace", "1", *CPU) as run:
        run.wait_for("daemon")
        daemon = int((tmp_path / "daemon").read_text())
        try:
            if victim == "launcher":
                run.process.kill()
            elif victim == "agent":
                kill(run.agents()[1])
            code = run.wait(15)
            assert code == {"nobody": 0, "worker": 9, "launcher": -9, "agent": 4}[victim]
            run.wait_for(lambda: state_of(daemon) in ("", "Z"), 8)
        finally:
            kill(daemon)


@pytest.mark.slow
def test_a_silent_launcher_loses_its_lease(tmp_path):
    with job(tmp_path, SLEEP, "--num_gpus", "2", "--lease", "1", *CPU) as run:
        both_up(run)
        run.send(signal.SIGSTOP)
        run.wait_for(lambda: not run.workers(), 6)
        run.send(signal.SIGCONT)
        assert run.wait(10) == 4
        assert "localhost heard nothing of zrun for" in run.out
        assert run.pids() == []


def test_an_agent_that_was_stopped_ends_its_workers(tmp_path):
    with job(tmp_path, SLEEP, "--num_gpus", "2", "--lease", "1", "--grace", "0.5", *CPU) as run:
        both_up(run)
        _, agent = run.agents()
        kill(agent, signal.SIGSTOP)
        run.process.kill()
        time.sleep(0.3)
        assert run.workers()
        run.wait_gone(1 + 0.5 + 5)


@pytest.mark.slow
def test_ctrl_z_holds_the_lease(tmp_path):
    with job(tmp_path, SLEEP, "--num_gpus", "2", "--lease", "1", *CPU) as run:
        both_up(run)
        run.send(signal.SIGTSTP)
        run.wait_for(lambda: state_of(run.process.pid) == "T")
        time.sleep(2.5)
        assert len(run.pids()) == 4
        run.send(signal.SIGCONT)
        time.sleep(1.5)
        assert len(run.pids()) == 4
        run.send(signal.SIGTERM)
        assert run.wait(10) == 143


def test_nohup_stays_nohup(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with job(tmp_path, SLEEP, "--num_gpus", "2", *CPU) as run:
            both_up(run)
            run.send(signal.SIGHUP)
            time.sleep(0.5)
            assert len(run.pids()) == 4
            run.send(signal.SIGTERM)
            assert run.wait(10) == 143
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_job_inside_a_job(tmp_path):
    inner = tmp_path / "inner.py"
    inner.write_text("import os, time\nopen('inner' + os.environ['RANK'], 'w').close()\ntime.sleep(600)\n")
    script = f"""
        import os, subprocess, sys
        command = [sys.executable, "-m", "zrun", "--num_gpus", "2", "--backend", "gloo", {str(inner)!r}]
        raise SystemExit(subprocess.run(command).returncode)
    """
    with job(tmp_path, script, *CPU) as run:
        run.wait_for("inner0")
        run.wait_for("inner1")
        run.process.kill()
        run.wait_gone(3)


def test_one_job_does_not_hurt_another(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        directory.mkdir()
    with job(first, SLEEP, "--num_gpus", "2", *CPU) as one, job(second, SLEEP, "--num_gpus", "2", *CPU) as other:
        both_up(one)
        both_up(other)
        one.send(signal.SIGTERM)
        assert one.wait(10) == 143
        assert len(other.pids()) == 4
        assert other.process.poll() is None


def test_an_agent_whose_stdin_is_empty(tmp_path):
    read_end, write_end = os.pipe()
    os.close(write_end)
    done = subprocess.run(
        [sys.executable, "-m", "zrun.agent"],
        stdin=read_end,
        capture_output=True,
        cwd=ROOT,
        timeout=20,
    )
    os.close(read_end)
    assert (done.returncode, done.stderr) == (0, b"")
