"""Jobs on this machine that start again, that stand still, and that are found and ended by their id."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

from tests.launch.jobs import ROOT, job, state_of

CPU = ("--backend", "gloo", "--plain")


def lines_of(run, word):
    return [line.split(word, 1)[1].split() for line in run.out.splitlines() if f"] {word}" in line]


def test_a_failed_job_starts_again_as_a_whole(tmp_path):
    script = """
        import os, sys, time
        count = os.environ["ZRUN_RESTART_COUNT"]
        print("up", count, os.environ["MASTER_PORT"], os.environ["ZRUN_JOB_ID"], flush=True)
        if count != "2" and os.environ["RANK"] == "1":
            raise ValueError(f"not yet: {count}")
        time.sleep(0 if count == "2" else 600)
    """
    with job(tmp_path, script, "--num_gpus", "2", "--max_restarts", "3", *CPU) as run:
        assert run.wait() == 0
        started = lines_of(run, "up")
        assert sorted(line[0] for line in started) == ["0", "0", "1", "1", "2", "2"]
        assert len({line[1] for line in started}) == len({line[2] for line in started}) == 3
        assert "rank 1 on localhost exited with code 1: ValueError: not yet: 0" in run.out
        assert "the job starts again (2 of 3)" in run.out and "(3 of 3)" not in run.out


def test_files_of_variables_are_read_once(tmp_path):
    """As they may be pipes: `--env_file <(show_secrets)`."""
    script = """
        import os, sys
        print("word", os.environ["WORD"], flush=True)
        sys.exit(3 if os.environ["ZRUN_RESTART_COUNT"] == "0" else 0)
    """
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("WORD='two words'\n",), daemon=True)
    writer.start()
    with job(tmp_path, script, "--env_file", "pipe", "--max_restarts", "1", "--num_gpus", "2", *CPU) as run:
        assert run.wait() == 0, run.out
        assert lines_of(run, "word") == [["two", "words"]] * 4
        assert "its output: " in run.out


def test_the_last_failure_is_the_exit_code(tmp_path):
    script = "import os, sys; sys.exit(3 + int(os.environ['ZRUN_RESTART_COUNT']))"
    with job(tmp_path, script, "--max_restarts", "1", *CPU) as run:
        assert run.wait() == 4
        assert run.out.count("zrun: error:") == 1


def test_a_mistake_in_the_config_stays_one(tmp_path):
    script = """
        import sys
        print("began", flush=True)
        sys.stderr.write("zrun_runtime: ConfigError: ds.json: 7 is odd\\n  -> make it 8\\n")
        sys.exit(2)
    """
    with job(tmp_path, script, "--max_restarts", "3", *CPU) as run:
        assert run.wait() == 2
        assert run.out.count("began") == 1 and "not started again" in run.out
        assert run.out.count("7 is odd") == 1


def test_an_interrupted_job_does_not_start_again(tmp_path):
    script = "import time; print('up', flush=True); time.sleep(600)"
    with job(tmp_path, script, "--max_restarts", "5", *CPU) as run:
        run.wait_for(lambda: "up" in run.out)
        run.process.terminate()
        assert run.wait() == 143
        assert "starts again" not in run.out


def test_a_job_that_stands_still_shows_where(tmp_path):
    script = """
        import os, time
        def load(): time.sleep(600)
        def wait(): time.sleep(600)
        print("up", flush=True)
        load() if os.environ["RANK"] == "1" else wait()
    """
    with job(tmp_path, script, "--num_gpus", "3", "--stall_timeout", "1", *CPU) as run:
        assert run.wait() == 134
        assert "silent for 1 s: rank 1 on localhost differs: at " in run.out
        assert run.pids() == []


def test_words_of_the_watch_do_not_end_a_silence(tmp_path):
    script = """
        import json, os, time
        fd, rank = int(os.environ["ZRUN_EVENT_FD"].split(":")[0]), int(os.environ["RANK"])
        def say(kind, **fields): os.write(fd, (json.dumps({"event": kind, "rank": rank, **fields}) + "\\n").encode())
        print("up", flush=True)
        while True:
            say("position", operation=5 - rank, step=2, text="waits" if rank == 0 else "sleeps", since=1.0)
            say("notice", level="warning", text="rank 0 has waited", from_watch=True)
            time.sleep(0.3)
    """
    with job(tmp_path, script, "--num_gpus", "2", "--stall_timeout", "1.5", *CPU) as run:
        assert run.wait() == 134
        assert "rank 1 on localhost" in run.out and "rank 1: 2 steps done, operation 4: sleeps   <- behind" in run.out


def test_dots_are_no_silence(tmp_path):
    script = """
        import sys, time
        for _ in range(20):
            print(".", end="", flush=True)
            time.sleep(0.2)
    """
    with job(tmp_path, script, "--num_gpus", "2", "--stall_timeout", "1.5", *CPU) as run:
        assert run.wait() == 0, run.out


def test_ctrl_z_is_no_silence(tmp_path):
    script = """
        import os, time
        while not os.path.exists("go"):
            print("working", flush=True)
            time.sleep(0.1)
    """
    with job(tmp_path, script, "--num_gpus", "2", "--stall_timeout", "2", "--lease", "30", *CPU) as run:
        run.wait_for(lambda: run.out.count("working") >= 4)
        run.process.send_signal(signal.SIGTSTP)
        run.wait_for(lambda: state_of(run.process.pid) == "T")
        time.sleep(3)
        run.process.send_signal(signal.SIGCONT)
        time.sleep(0.5)
        (tmp_path / "go").touch()
        assert run.wait() == 0, run.out


def test_ps_and_kill(tmp_path):
    room = tmp_path / "room"
    room.mkdir()
    environ = {"XDG_RUNTIME_DIR": str(room)}

    def tool(*words):
        command = [sys.executable, "-m", "zrun", *words]
        return subprocess.run(
            command, capture_output=True, text=True, env={**environ, "PYTHONPATH": str(ROOT)}, timeout=30
        )

    script = "import time; print('up', flush=True); time.sleep(600)"
    with job(tmp_path, script, *CPU, args=("--token", "hush"), environ=environ) as run:
        run.wait_for(lambda: "up" in run.out)
        (entry,) = [json.loads(line) for line in tool("ps", "--json").stdout.splitlines()]
        assert entry["pid"] == run.process.pid and entry["command"].endswith("script.py")
        assert "hush" not in "".join(path.read_text() for path in room.rglob("*.json"))
        assert tool("kill", "nothing").returncode == 2
        assert tool("kill", entry["job_id"][:6]).returncode == 0
        assert run.wait(1) == 143
    assert list(room.iterdir()) == []
