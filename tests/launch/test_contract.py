"""What a worker finds when it starts, and how a command line becomes a job."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys

import pytest

from tests.launch.jobs import ROOT, command, job, read
from zrun import topology
from zrun.console import make_console
from zrun.devices import usable_cores
from zrun.hostfile import Host
from zrun.prepare import prepare
from zrun.settings import LaunchConfig
from zrun.supervisor import Supervisor
from zrun.transport.local import LocalTransport

CPU = ("--backend", "gloo")
TELL = """
    import json, os, sys
    told = {"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "stdin": sys.stdin.read(),
            "session": os.getsid(0) == os.getpid()}
    with open("told" + os.environ["RANK"], "w") as file:
        json.dump(told, file)
"""


def told(directory, rank=0):
    return json.loads((directory / f"told{rank}").read_text())


def test_the_worker_environment(tmp_path):
    with job(tmp_path, TELL, "--num_gpus", "2", *CPU) as run:
        assert run.wait() == 0
    for rank in (0, 1):
        seen = told(tmp_path, rank)
        env = seen["env"]
        assert (seen["cwd"], seen["stdin"], seen["session"]) == (str(tmp_path), "", True)
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "LOCAL_SIZE": "2",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "CROSS_RANK": "0",
            "CROSS_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "ZRUN_DEVICE": "cpu",
            "ZRUN_BACKEND": "gloo",
            "OMP_NUM_THREADS": str(max(1, usable_cores() // 2)),
            "PYTHONUNBUFFERED": "1",
        }
        assert {name: env.get(name) for name in expected} == expected
        assert 1024 < int(env["MASTER_PORT"]) < 65536
        assert env["ZRUN_JOB_ID"] == told(tmp_path, 0)["env"]["ZRUN_JOB_ID"]


def test_arguments_arrive_byte_for_byte(tmp_path):
    odd = ["a b", "c;d", "$X", "it's", '"q"', "*", "", "new\nline", "ü😀", "--config", "ds.json", "--num_gpus", "7"]
    odd += ["--", "-v", "--dry_run", os.fsdecode(b"\xff\xfe"), "\\", "%s", "`x`"]
    with job(tmp_path, TELL, "--num_gpus", "2", *CPU, args=odd) as run:
        assert run.wait() == 0
        for rank in (0, 1):
            assert told(tmp_path, rank)["argv"] == odd


@pytest.mark.parametrize(("style", "expected"), [("_", "--local_rank=1"), ("-", "--local-rank=1")])
def test_the_local_rank_argument(tmp_path, style, expected):
    with job(tmp_path, TELL, "--num_gpus", "2", "--local_rank_arg", style, *CPU, args=["x"]) as run:
        assert run.wait() == 0
        assert told(tmp_path, 1)["argv"] == [expected, "x"]


def test_variables_from_options_and_files(tmp_path):
    (tmp_path / "vars").write_text("A=from file\nB='1\n2'\nC=x=y # why\n")
    options = ["--env_file", "vars", "--env", "A=wins", "--env", "HERE", "--env", "OMP_NUM_THREADS=3"]
    with job(tmp_path, TELL, *options, *CPU, environ={"HERE": "s3cret"}) as run:
        assert run.wait() == 0
        env = told(tmp_path)["env"]
        assert [env[n] for n in ("A", "B", "C", "HERE", "OMP_NUM_THREADS")] == ["wins", "1\n2", "x=y", "s3cret", "3"]


def test_no_secret_is_in_any_command_line_or_file(tmp_path):
    script = """
        import os, pathlib, time
        pathlib.Path("up").touch()
        time.sleep(600)
    """
    (tmp_path / "vars").write_text("FILE_TOKEN=hush-hush-2\n")
    options = ["--env", "API_TOKEN", "--env_file", "vars"]
    with job(tmp_path, script, *options, *CPU, environ={"API_TOKEN": "hush-hush-1"}) as run:
        run.wait_for("up")
        for pid in (*run.pids(), run.process.pid):
            assert "hush-hush" not in read(f"/proc/{pid}/cmdline")
        assert not any("hush-hush" in path.read_text() for path in run.temp.rglob("*") if path.is_file())


def test_a_secret_on_the_command_line_is_warned_of(tmp_path):
    with job(tmp_path, "", "--env", "WANDB_API_KEY=x", *CPU) as run:
        assert run.wait() == 0
        assert "warning" in run.out and "--env WANDB_API_KEY" in run.out


def test_modules_and_programs(tmp_path):
    (tmp_path / "mod.py").write_text("import sys; print('module', sys.argv[1:])")
    with command(tmp_path, *CPU, "--module", "mod", "--flag") as run:
        assert run.wait() == 0
        assert "module ['--flag']" in run.out
    with command(tmp_path, *CPU, "--no_python", "echo", "program", "$RANK") as run:
        assert run.wait() == 0
        assert "program $RANK" in run.out


def test_two_agents_on_this_machine_are_two_nodes(tmp_path, monkeypatch, capfd):
    (tmp_path / "script.py").write_text(
        "import json, os\njson.dump({'env': dict(os.environ)}, open('told' + os.environ['RANK'], 'w'))\n"
    )
    monkeypatch.setenv("PYTHONPATH", "")
    config = LaunchConfig("script.py", backend="gloo")
    made = prepare(config, os.environ, str(tmp_path), [Host("one", 2), Host("none", 0), Host("two", 1)])
    assert Supervisor(made, LocalTransport(os.environ), make_console("json", sys.stdout)).run() == 0
    names = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE", "CROSS_RANK")
    assert [[told(tmp_path, rank)["env"][n] for n in names] for rank in range(3)] == [
        ["0", "0", "2", "3", "2", "0"],
        ["0", "1", "2", "3", "2", "0"],
        ["1", "0", "1", "3", "2", "1"],
    ]
    hosts = {json.loads(line).get("host") for line in capfd.readouterr().out.splitlines()}
    assert {"one", "two"} <= hosts


def test_a_zrun_on_each_host_where_there_is_no_ssh(tmp_path):
    script = """
        import os, torch, torch.distributed as d
        d.init_process_group("gloo")
        t = torch.tensor([float(os.environ["RANK"])])
        d.all_reduce(t)
        names = "RANK LOCAL_RANK LOCAL_WORLD_SIZE WORLD_SIZE GROUP_RANK GLOO_SOCKET_IFNAME".split()
        print("sum", int(t.item()), *(os.environ[name] for name in names), flush=True)
        d.barrier()
        d.destroy_process_group()
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    (tmp_path / "hosts").write_text("first slots=1 addr=127.0.0.1\nsecond slots=2\n")
    (tmp_path / "b").mkdir()
    words = ("--hostfile", str(tmp_path / "hosts"), "--no_ssh", "--master_port", port, *CPU)
    with (
        job(tmp_path, script, *words, "--node_rank", "0") as one,
        job(tmp_path / "b", script, *words, "--node_rank", "1") as two,
    ):
        assert (one.wait(60), two.wait(60)) == (0, 0)
    said = sorted(line.partition("sum ")[2] for line in (one.out + two.out).splitlines() if "] sum " in line)
    assert said == ["3 0 0 1 3 0 lo", "3 1 0 2 3 1 lo", "3 2 1 2 3 1 lo"]
    assert "this is host 1 of 2, second, with ranks 1-2" in two.out


def test_a_failure_on_one_node_stops_the_other(tmp_path, capfd):
    (tmp_path / "script.py").write_text(
        "import os, time\nif os.environ['GROUP_RANK'] == '1': raise SystemExit(7)\ntime.sleep(600)\n"
    )
    made = prepare(LaunchConfig("script.py", backend="gloo"), os.environ, str(tmp_path), [Host("a", 2), Host("b", 1)])
    assert Supervisor(made, LocalTransport(os.environ), make_console("plain", sys.stdout)).run() == 7
    assert "rank 2 on b exited with code 7" in capfd.readouterr().out
    assert made.ranks == topology.assign_ranks([Host("a", 2), Host("b", 1)])


def test_a_node_that_is_done_does_not_end_the_other(tmp_path, capfd):
    (tmp_path / "script.py").write_text(
        "import os, time\ntime.sleep(1.0 * int(os.environ['GROUP_RANK']))\nprint('end', os.environ['RANK'])\n"
    )
    made = prepare(LaunchConfig("script.py", backend="gloo"), os.environ, str(tmp_path), [Host("a", 1), Host("b", 1)])
    assert Supervisor(made, LocalTransport(os.environ), make_console("plain", sys.stdout)).run() == 0
    assert "end 1" in capfd.readouterr().out


@pytest.mark.slow
def test_eight_jobs_at_once(tmp_path):
    script = """
        import os, socket, time
        if os.environ["RANK"] == "0":
            server = socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
            server.settimeout(20)
            server.accept()[0].sendall(os.environ["ZRUN_JOB_ID"].encode())
        else:
            for _ in range(200):
                try:
                    with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) as link:
                        assert link.recv(100).decode() == os.environ["ZRUN_JOB_ID"]
                    break
                except ConnectionRefusedError:
                    time.sleep(0.05)
            else:
                raise SystemExit("nobody answers")
    """
    with contextlib.ExitStack() as stack:
        runs = []
        for i in range(8):
            directory = tmp_path / str(i)
            directory.mkdir()
            runs.append(stack.enter_context(job(directory, script, "--num_gpus", "2", *CPU)))
        assert [run.wait() for run in runs] == [0] * 8


def test_a_port_that_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        with job(tmp_path, "", "--master_port", port, *CPU) as run:
            assert run.wait() == 2
            assert port in run.err and str(os.getpid()) in run.err
    with job(tmp_path, TELL, "--master_port", port, *CPU) as run:
        assert run.wait() == 0
        assert told(tmp_path)["env"]["MASTER_PORT"] == port


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.py"], ["missing.py"]),
        (["script"], ["did you mean script.py"]),
        (["scirpt.py"], ["did you mean script.py"]),
        (["nowhere/script.py"], ["no directory"]),
        (["nothing"], ["no script nothing", "command"]),
        (["--num_gpus", "0", "script.py"], ["num_gpus"]),
        (["--num_gpu", "2", "script.py"], ["--num_gpu", "num_gpus"]),
        (["--frobnicate"], ["--frobnicate"]),
        (["--backend", "nccl", "script.py"], ["nccl", "GPU"]),
        (["--device", "cuda", "script.py"], ["cuda", "GPU"]),
        (["--device", "cpu", "--backend", "nccl", "script.py"], ["nccl", "cpu"]),
        (["--plain", "--json", "script.py"], ["--plain", "--json"]),
        (["--module", "--no_python", "x"], ["--module", "--no_python"]),
        (["--no_python", "no-such-program"], ["no-such-program", "PATH"]),
        (["--no_python", "./script.py"], ["not executable"]),
        (["--env", "RANK=1", "script.py"], ["RANK"]),
        (["--env", "MASTER_PORT=1", "script.py"], ["--master_port"]),
        (["--env", "1X=1", "script.py"], ["1X"]),
        (["--env", "NOT_THERE_AT_ALL", "script.py"], ["NOT_THERE_AT_ALL"]),
        (["--env_file", "nothing", "script.py"], ["nothing"]),
        (["--env_file", "bad", "script.py"], ["bad:2", "what is this"]),
        (["hosts"], ["hosts", "hostfile"]),
        (["shell"], ["--no_python"]),
        (["ds.json", "script.py"], ["ds.json is a config", "script first"]),
        ([""], ["name of the script is empty"]),
        (["-"], ["no script -", "has to be a file"]),
        (["/dev/stdin"], ["/dev/stdin", "not a file"]),
        (["directory"], ["directory", "__main__"]),
        (["--local_rank_arg", "x", "script.py"], ["local_rank_arg"]),
        (["--grace", "-1", "script.py"], ["grace"]),
        (["--log_dir", "script.py/logs", "script.py"], ["script.py/logs"]),
        (["--hostfile", "none", "script.py"], ["no hostfile none"]),
        (["--hostfile", "mpi", "script.py"], ["mpi:2:1", "b:2", "b slots=2"]),
        (["--hostfile", "hosts", "--include", "node1:9", "script.py"], ["node1", "slot 9", "hosts:2:1", "0-3"]),
        (["--hostfile", "hosts", "--num_gpus", "5", "script.py"], ["--num_gpus 5", "slots=4"]),
        (["--num_nodes", "2", "--num_gpus", "4", "script.py"], ["--num_nodes 2", "only this machine", "--hostfile"]),
        (["--include", "a", "--exclude", "b", "script.py"], ["--include", "--exclude"]),
        (["--show_ranks", "0,7", *CPU, "script.py"], ["--show_ranks 0,7", "no rank 7", "0-0"]),
        (["--show_ranks", "x", *CPU, "script.py"], ["--show_ranks x", "0,3-5"]),
        (["--no_ssh", "script.py"], ["--node_rank", "go together"]),
        (["--min_nodes", "1", "script.py"], ["--max_restarts"]),
        (["--min_nodes", "2", "--max_restarts", "1", *CPU, "script.py"], ["--min_nodes 2", "1 hosts"]),
        (["--iface", "wire9", *CPU, "script.py"], ["--iface wire9", "it has", "lo"]),
        (["--hostfile", "hosts", "--no_ssh", "--node_rank", "1", *CPU, "script.py"], ["--node_rank 1", "hosts are 1"]),
        (["--no_ssh", "--node_rank", "0", "--max_restarts", "1", "script.py"], ["--max_restarts"]),
        (["--profile", "profile.yaml", "script.py"], ["profile.yaml:1:10", "num_gpus?"]),
        (["--profile", "nul.yaml", "script.py"], ["--env holds a NUL"]),
    ],
)
def test_wrong_usage_is_exit_2_with_the_reason(tmp_path, arguments, words):
    (tmp_path / "script.py").write_text("")
    (tmp_path / "bad").write_text("A=1\nwhat is this\n")
    (tmp_path / "hosts").write_text("# my machines\nnode1 slots=4\n")
    (tmp_path / "mpi").write_text("a slots=1\nb:2\n")
    (tmp_path / "profile.yaml").write_text("num_gpu: 2\n")
    (tmp_path / "nul.yaml").write_text('env: {A: "x\\0y"}\n')
    (tmp_path / "shell").write_text("#!/bin/bash\necho\n")
    (tmp_path / "ds.json").write_text("{}")
    (tmp_path / "directory").mkdir()
    with command(tmp_path, *arguments, environ={"CUDA_VISIBLE_DEVICES": ""}) as run:
        assert run.wait() == 2
        said = run.err + run.out
        assert "Traceback" not in said
        assert all(word in said for word in words), said


def test_names_that_are_no_text(tmp_path):
    with command(tmp_path, "--show_settings", "--log_dir", "\udcff", environ={"PYTHONIOENCODING": "utf-8"}) as run:
        assert run.wait() == 0
        assert run.err == "" and "\\udcff" in run.out


def test_text_that_no_process_can_be_given(tmp_path):
    (tmp_path / "profile.yaml").write_text('env: {A: "\\ud800"}\n')
    with job(tmp_path, "print('began')", "--profile", "profile.yaml", *CPU) as run:
        assert run.wait() == 2
        assert "cannot start the workers on localhost" in run.out and "Traceback" not in run.out + run.err


def test_the_rank_table(tmp_path):
    with job(tmp_path, "raise SystemExit(1)", "--dry_run", "--num-accelerators=3", "--device", "cpu") as run:
        assert run.wait() == 0
        rows = [line.split() for line in run.out.splitlines()[-3:]]
        assert rows == [[str(i), "localhost", "0", str(i), "cpu"] for i in range(3)]


def test_the_rank_table_of_many_hosts(tmp_path):
    (tmp_path / "h").write_text("n[1-2] slots=2 max_slots=4\nme@fd00::1 slots=1\n")
    options = ["--hostfile", "h", "--exclude", "n2:0", "--dry_run", *CPU]
    with job(tmp_path, "raise SystemExit(1)", *options) as run:
        assert run.wait() == 0
        rows = [line.split() for line in run.out.splitlines()[-4:]]
        expected = [("n1", "0", "0"), ("n1", "0", "1"), ("n2", "1", "0"), ("fd00::1", "2", "0")]
        assert rows == [[str(rank), *place, "cpu"] for rank, place in enumerate(expected)]
        assert "max_slots" in run.err


def test_a_hostfile_of_this_machine_needs_no_ssh(tmp_path):
    (tmp_path / "h").write_text("localhost slots=2\n")
    (tmp_path / ".deepspeed_env").write_text("# for all\nA='x y'\n")
    with job(tmp_path, TELL, "--hostfile", "h", *CPU) as run:
        assert run.wait() == 0
        assert [told(tmp_path, rank)["env"]["A"] for rank in (0, 1)] == ["x y", "x y"]
        assert ".deepspeed_env sets A" in run.out


def test_the_output_of_some_ranks(tmp_path):
    script = """
        import os, time
        print("I am rank", os.environ["RANK"], flush=True)
        if os.environ["RANK"] == "2":
            time.sleep(1)
            raise ValueError("boom")
        time.sleep(600)
    """
    with job(tmp_path, script, "--num_gpus", "4", "--show_ranks", "0,3", *CPU) as run:
        assert run.wait() == 1
        assert "I am rank 0" in run.out and "I am rank 3" in run.out
        assert "I am rank 1" not in run.out
        assert "ValueError: boom" in run.out and "rank 2" in run.out  # failures are shown whosever they are


def test_cores_of_their_own(tmp_path):
    script = """
        import json, os
        with open("told" + os.environ["RANK"], "w") as file:
            json.dump([sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"]], file)
    """
    with job(tmp_path, script, "--num_gpus", "2", "--bind_cores_to_rank", *CPU) as run:
        assert run.wait() == 0
    (first, _), (second, threads) = told(tmp_path, 0), told(tmp_path, 1)
    mine = sorted(os.sched_getaffinity(0))
    assert sorted(first + second) == mine if len(mine) > 1 else first == second == mine
    assert int(threads) >= 1
    with job(tmp_path, script, "--bind_cores_to_rank", "--env", "OMP_NUM_THREADS=7", *CPU) as run:
        assert run.wait() == 0
    assert told(tmp_path) == [mine, "7"]


def test_help_and_version(tmp_path):
    with command(tmp_path, "--version") as run:
        assert run.wait() == 0 and run.out.startswith("zrun ")
    with command(tmp_path, "--help") as run:
        assert run.wait() == 0
        assert "--num_gpus" in run.out and "Examples" in run.out


def test_without_a_gpu_the_console_says_so(tmp_path):
    with job(tmp_path, "", environ={"CUDA_VISIBLE_DEVICES": ""}) as run:
        assert run.wait() == 0
        assert "1 worker" in run.out and "no GPU" in run.out


def test_run_is_always_the_script(tmp_path):
    (tmp_path / "plan").write_text("print('my own plan')")
    for words in (["run", "--", "plan"], ["run", *CPU, "plan"], ["plan"]):
        with command(tmp_path, *words) as run:
            assert run.wait() == 0
            assert "my own plan" in run.out


def test_a_runtime_that_is_not_there_is_said(tmp_path):
    shutil.copytree(ROOT / "zrun", tmp_path / "alone" / "zrun")
    (tmp_path / "alone" / "zrun_runtime.py").touch()  # stands before the package, and is none
    environ = {"PYTHONPATH": str(tmp_path / "alone")}
    with job(tmp_path, "", "--as_deepspeed", *CPU, environ=environ) as run:
        assert run.wait() == 3
        assert "zrun_runtime is not there" in run.out and "Traceback" not in run.out


def test_the_doctor_heeds_profile_and_variables(tmp_path):
    (tmp_path / "script.py").write_text("")
    (tmp_path / "hosts").write_text("localhost slots=3\n")
    (tmp_path / "profile.yaml").write_text("hostfile: hosts\ngrace: 5\n")
    words = ("doctor", "--profile", "profile.yaml", "--json", "script.py", "--config", "ds.json")
    with command(tmp_path, *words, environ={"ZRUN_DEVICE": "cpu"}) as run:
        assert run.wait() == 0, run.err
        report = json.loads(run.out)
    assert report["fit"] and report["hosts"][0]["slots"] == 3 and report["hosts"][0]["facts"]["script_hash"]
    with command(tmp_path, *words, environ={"ZRUN_HOSTFILE": "nowhere"}) as run:
        assert run.wait() == 2
        assert "no hostfile nowhere" in run.err
