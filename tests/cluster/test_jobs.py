"""What a job on many hosts finds there: its ranks, its words, its environment, its network, its peers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.lab import ROOT, Lab, Run, call, command_line, read, wait_for, zrun

CPU = ("--backend", "gloo", "--connect_timeout", "5")
SHOW = """
import json, os, sys
names = "RANK LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR HF_HOME WORD TOKEN".split()
names += ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
print(json.dumps({"arguments": sys.argv[1:], "cwd": os.getcwd(), **{n: os.environ.get(n) for n in names}}), flush=True)
"""
MEET = """
import datetime, torch.distributed as d
d.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
import torch
t = torch.ones(1)
d.all_reduce(t)
print("sum", int(t.item()), flush=True)
d.destroy_process_group()
"""

# What a reader of guides writes: transformers' Trainer with a DeepSpeed config, started on two hosts.
TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
torch.manual_seed(0)
shape = dict(vocab_size=31, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(31, (32, 8))]
trainer = Trainer(GPT2LMHeadModel(GPT2Config(**shape)), arguments, train_dataset=rows)
loss = trainer.train().training_loss
stage = trainer.model_wrapped.zero_optimization_stage()
print(f"rank {arguments.process_index} of {arguments.world_size} at stage {stage}: {loss:.6f}", flush=True)
"""

# How long it takes to connect to an SSH server.
PING = """
import socket, sys, time
for _ in range(3):
    start = time.monotonic()
    socket.create_connection((sys.argv[1], 22)).close()
    print(time.monotonic() - start)
"""


def run_job(
    lab: Lab, tmp_path: Path, script: str, *options: str, hosts: str = "", args=(), environ=None, timeout=40.0
) -> Run:
    """A job that succeeds."""
    (tmp_path / "script.py").write_text(script)
    words = ("--hostfile", lab.hostfile(hosts), *CPU, *options, "script.py", *args)
    with zrun(lab, tmp_path, *words, environ=environ) as run:
        assert run.wait(timeout) == 0, run.said
    return run


def shown(run: Run) -> list[dict]:
    """What each rank showed, in order of ranks."""
    found = [json.loads(line.partition("] ")[2]) for line in run.out.splitlines() if "] {" in line]
    return sorted(found, key=lambda entry: int(entry["RANK"]))


def test_a_trainer_with_a_deepspeed_config_over_two_hosts(lab, tmp_path):
    """The line of guides: `deepspeed --hostfile=hosts --num_nodes=2 --num_gpus=1 train.py --deepspeed ds.json`."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    batch = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    (tmp_path / "ds.json").write_text(json.dumps({**batch, "zero_optimization": zero}))
    options = ("--as_deepspeed", "--num_nodes=2", "--num_gpus=1")
    words = "--deepspeed ds.json --output_dir trained --max_steps 3 --per_device_train_batch_size 4 --report_to none"
    quiet = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    run = run_job(lab, tmp_path, TRAINER, *options, args=words.split(), environ=quiet, timeout=120.0)
    found = sorted(line.partition("] rank ")[2] for line in run.out.splitlines() if "] rank " in line)
    assert [line.partition(":")[0] for line in found] == ["0 of 2 at stage 3", "1 of 2 at stage 3"]
    assert 0.5 < float(found[0].partition(": ")[2]) < 4.0


def test_every_host_gets_the_same_words_and_variables(lab, tmp_path):
    words = ["a b", "c;d", "$X", "it's", '"q"', "*", "", "line\nbreak", "größe", "`x`", "\\", "--num_gpus"]
    options = ("--env", "WORD=two words; $HOME", "--env", "TOKEN")
    environ = {"TOKEN": "secret-of-mine", "HF_HOME": "/some/where"}
    entries = shown(run_job(lab, tmp_path, SHOW, *options, args=words, environ=environ))
    assert len(entries) == 4
    for rank, entry in enumerate(entries):
        assert entry["arguments"] == words
        assert entry["cwd"] == str(tmp_path)
        assert (entry["WORD"], entry["TOKEN"], entry["HF_HOME"]) == (
            "two words; $HOME",
            "secret-of-mine",
            "/some/where",
        )
        assert (entry["GROUP_RANK"], entry["LOCAL_RANK"]) == (str(rank // 2), str(rank % 2))
        assert entry["MASTER_ADDR"] == "10.99.0.1"
        assert entry["GLOO_SOCKET_IFNAME"] == entry["NCCL_SOCKET_IFNAME"] == "eth0"


def test_unequal_slots(lab, tmp_path):
    entries = shown(run_job(lab, tmp_path, SHOW, hosts="node-2 slots=3\nnode-1 slots=2\n"))
    assert [entry["LOCAL_RANK"] for entry in entries] == ["0", "1", "2", "0", "1"]
    assert [entry["LOCAL_WORLD_SIZE"] for entry in entries] == ["3", "3", "3", "2", "2"]
    assert {entry["MASTER_ADDR"] for entry in entries} == {"10.99.0.2"}


def test_one_remote_host_is_used_and_not_this_machine(lab, tmp_path):
    script = "print('here:', '10.99.0.2' in open('/proc/self/net/fib_trie').read())\n"
    run = run_job(lab, tmp_path, script, "--include", "node-2:0")
    assert "here: True" in run.out and run.out.count("here:") == 1


@pytest.mark.parametrize(
    ("hosts", "master"),
    [
        ("10.99.0.1 slots=1\n10.99.0.2 slots=1\n", "10.99.0.1"),
        ("fd99::1 slots=1\n[fd99::2] slots=1\n", "fd99::1"),
        ("localhost slots=1\nnode-2 slots=1\n", "10.99.0.100"),
        ("node-1 slots=1 addr=fd99::1\nnode-2 slots=1\n", "fd99::1"),
    ],
    ids=["bare addresses", "IPv6", "this machine first", "a given address"],
)
def test_ranks_meet(lab, tmp_path, hosts, master):
    run = run_job(lab, tmp_path, MEET, hosts=hosts)
    assert run.out.count("sum 2") == 2
    assert f"master {f'[{master}]' if ':' in master else master}:" in run.out


def test_what_the_user_says_about_the_network_stays(lab, tmp_path):
    environ = {"GLOO_SOCKET_IFNAME": "lo"}
    entries = shown(run_job(lab, tmp_path, SHOW, "--iface", "eth0", environ=environ))
    assert {(entry["GLOO_SOCKET_IFNAME"], entry["NCCL_SOCKET_IFNAME"]) for entry in entries} == {("lo", "eth0")}
    entries = shown(run_job(lab, tmp_path, SHOW, hosts="localhost slots=1\nnode-2 slots=1\n", environ=environ))
    assert {(entry["GLOO_SOCKET_IFNAME"], entry["NCCL_SOCKET_IFNAME"]) for entry in entries} == {("lo", "eth0")}


def test_stage_3_over_two_hosts_gives_the_losses_of_one(lab, tmp_path):
    script = (Path(__file__).parent / "train_small.py").read_text().replace("parents[2]", "parents[0]")
    script = script.replace("Path(__file__).resolve().parents[0]", f"Path({str(ROOT)!r})")

    def losses(run: Run) -> dict[str, float]:
        words = [line.split()[-4:] for line in run.out.splitlines() if "] loss " in line]
        return {f"{rank}/{step}": float(value) for _, rank, step, value in words}

    together = losses(run_job(lab, tmp_path, script, timeout=120))
    (tmp_path / "script.py").write_text(script)
    with zrun(lab, tmp_path, "--num_gpus", "4", "--backend", "gloo", "script.py") as run:
        assert run.wait(120) == 0, run.said
    alone = losses(run)
    assert len(alone) == 20
    assert together == pytest.approx(alone, rel=1e-6)


def test_secrets_are_in_no_command_line_and_no_file(lab, tmp_path):
    script = (
        "import os, time\nassert os.environ['TOKEN'].startswith('hush')\nprint('up', flush=True)\ntime.sleep(600)\n"
    )
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "variables").write_text("OTHER_TOKEN=hush-in-file\n")
    options = ("--env", "TOKEN", "--env_file", "variables", "--log_dir", "logs")
    with zrun(
        lab, tmp_path, "--hostfile", lab.hostfile(), *CPU, *options, "script.py", environ={"TOKEN": "hush-hush"}
    ) as run:
        run.wait_for(("up", 4))
        for node in (lab.desk, *lab.nodes):
            assert not [pid for pid in node.pids() if "hush" in command_line(pid)]
        run.process.send_signal(signal.SIGTERM)
        run.wait()
        written = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "variables"]
        assert {path.parent.name for path in written} >= {"rank-0", "rank-3"}
        assert not [path for path in written if path.name != "script.py" and "hush" in read(str(path))]


def test_signals_reach_every_rank(lab, tmp_path):
    script = "import os, signal, time\nsignal.signal(signal.SIGUSR1, lambda *_: print('USR1', flush=True))\n"
    script += "print('up', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.1)\n"
    (tmp_path / "script.py").write_text(script)
    with zrun(lab, tmp_path, "--hostfile", lab.hostfile(), *CPU, "script.py") as run:
        run.wait_for(("up", 4))
        run.process.send_signal(signal.SIGUSR1)
        run.wait_for(("USR1", 4))
        (tmp_path / "go").touch()
        assert run.wait() == 0


def test_a_stopped_launcher_keeps_the_job(lab, tmp_path):
    script = "import os, time\nprint('up', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.1)\n"
    (tmp_path / "script.py").write_text(script)
    with zrun(lab, tmp_path, "--hostfile", lab.hostfile(), *CPU, "--lease", "2", "script.py") as run:
        run.wait_for(("up", 4))
        run.process.send_signal(signal.SIGTSTP)
        wait_for(lambda: "State:\tT" in read(f"/proc/{run.process.pid}/status"), "the stop")
        with pytest.raises(subprocess.TimeoutExpired):
            run.process.wait(4)
        run.process.send_signal(signal.SIGCONT)
        (tmp_path / "go").touch()
        assert run.wait() == 0, run.said


def test_a_slow_and_lossy_network(lab, tmp_path):
    lab.nodes[1].spoil_cable(delay=0.03, loss=0.02)
    times = call(*lab.desk.words(sys.executable, "-c", PING, lab.nodes[1].address)).split()
    assert min(map(float, times)) >= 0.06
    run = run_job(lab, tmp_path, MEET, "--lease", "5", timeout=60)
    assert run.out.count("sum 4") == 4


def test_a_stolen_port_leads_to_another(lab, tmp_path):
    script = """
import os, socket, sys
port = int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0" and not os.path.exists("stolen"):
    open("stolen", "w").close()
    sys.exit(f"The server socket has failed to listen on any address. port: {port}, name: EADDRINUSE")
print("port", port, flush=True)
"""
    run = run_job(lab, tmp_path, script)
    assert "another program has taken port" in run.out
    ports = [line.split()[-1] for line in run.out.splitlines() if "] port" in line]
    assert len(set(ports[-4:])) == 1


def test_a_stall_names_the_rank_that_differs(lab, tmp_path):
    script = """
import os, time
def load_data(): time.sleep(600)
def wait_for_others(): time.sleep(600)
print("up", flush=True)
load_data() if os.environ["RANK"] == "2" else wait_for_others()
"""
    (tmp_path / "script.py").write_text(script)
    with zrun(lab, tmp_path, "--hostfile", lab.hostfile(), *CPU, "--stall_timeout", "2", "script.py") as run:
        assert run.wait() == 134
        assert "rank 2 on node-2 differs: at " in run.out and ":3 in load_data" in run.out
        assert "3 others are at" in run.out


def test_ps_and_kill(lab, tmp_path):
    (tmp_path / "script.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    room = tmp_path / "room"
    room.mkdir()

    def tool(*words: str) -> str:
        environ = [f"XDG_RUNTIME_DIR={room}", f"PYTHONPATH={ROOT}"]
        return call(*lab.desk.words("env", *environ, sys.executable, "-m", "zrun", *words))

    environ = {"XDG_RUNTIME_DIR": str(room)}
    with zrun(lab, tmp_path, "--hostfile", lab.hostfile(), *CPU, "script.py", environ=environ) as run:
        run.wait_for(("up", 4))
        (entry,) = [json.loads(line) for line in tool("ps", "--json").splitlines()]
        assert (entry["pid"], entry["world_size"]) == (run.process.pid, 4)
        assert entry["hosts"] == ["node-1", "node-2"] and entry["job_id"] in tool("ps")
        tool("kill", entry["job_id"])
        assert run.wait(1) == 143
        assert tool("ps", "--json") == "" and list(room.iterdir()) == []


def test_keys_of_the_ssh_agent(lab, tmp_path):
    locked = lab.directory / "locked"
    if not locked.exists():
        call("ssh-keygen", "-q", "-t", "ed25519", "-N", "a phrase", "-f", str(locked))
    config = lab.directory / "ssh_config"
    text = config.read_text().replace("IdentityAgent none", "# the agent of the environment")
    config.write_text(text.replace(f"IdentityFile {lab.directory}/key", f"IdentityFile {locked}"))
    words = ("--hostfile", lab.hostfile(), *CPU, "script.py")
    sock = tmp_path / "agent.sock"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(sock)], stdout=subprocess.DEVNULL)
    try:
        wait_for(sock.exists, "the agent")
        (tmp_path / "script.py").write_text(SHOW)
        with zrun(lab, tmp_path, *words) as run:
            assert run.wait() == 3
            assert f"{locked} (needs its passphrase: ssh-add {locked})" in run.err
        call("env", f"SSH_AUTH_SOCK={sock}", "ssh-add", "-q", str(lab.directory / "key"))
        with zrun(lab, tmp_path, *words, environ={"SSH_AUTH_SOCK": str(sock)}) as run:
            assert run.wait() == 0, run.said
        assert len(shown(run)) == 4
        config.write_text(f"IdentityAgent {sock}\n{config.read_text()}")
        with zrun(lab, tmp_path, *words) as run:
            assert run.wait() == 0, run.said
    finally:
        agent.kill()
        agent.wait()


def test_a_jump_host(lab, tmp_path):
    """node-2 is only reached over node-1, and known by another name."""
    lab.write_ssh_config(node_2="ProxyJump node-1")
    run = run_job(lab, tmp_path, MEET)
    assert run.out.count("sum 4") == 4


def test_a_proxy_command(lab, tmp_path):
    pipe = f"{sys.executable} {tmp_path}/pipe.py %h %p"
    (tmp_path / "pipe.py").write_text(
        "import os, select, socket, sys\n"
        "s = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "while True:\n"
        "    for f in select.select([s, 0], [], [])[0]:\n"
        "        data = s.recv(65536) if f is s else os.read(0, 65536)\n"
        "        if not data: sys.exit()\n"
        "        s.sendall(data) if f == 0 else os.write(1, data)\n"
    )
    lab.write_ssh_config(node_2=f"ProxyCommand {pipe}")
    run = run_job(lab, tmp_path, SHOW)
    assert len(shown(run)) == 4
    wait_for(lambda: not lab.desk.pids_of("pipe.py"), "the end of the proxy")


def test_algorithms_of_ssh_config(lab, tmp_path):
    some = "Ciphers aes256-gcm@openssh.com\nMACs hmac-sha2-512\nKexAlgorithms umac-odd,ecdh-sha2-nistp521"
    lab.write_ssh_config(node_1=some, node_2="HostKeyAlgorithms ssh-ed25519\nPubkeyAcceptedAlgorithms ssh-ed25519")
    assert len(shown(run_job(lab, tmp_path, SHOW))) == 4
    for line, words in {
        "Ciphers chacha20-poly1305@openssh.com": "restricts ciphers for node-1 to chacha20-poly1305@openssh.com",
        "PubkeyAcceptedAlgorithms rsa-sha2-512": "refuses the login",
    }.items():
        lab.write_ssh_config(node_1=line)
        with zrun(lab, tmp_path, "--hostfile", lab.hostfile(), *CPU, "script.py") as run:
            assert run.wait() == 3
            assert words in run.err


def test_a_jump_host_is_logged_in_to_once(lab, tmp_path):
    """Its server takes one login at a time, and drops those that come meanwhile."""
    names = [f"behind-{i}" for i in range(6)]
    config = lab.write_ssh_config()
    blocks = [f"Host {name}\n    HostName 10.99.0.2\n    ProxyJump node-1\n" for name in names]
    config.write_text("".join(blocks) + config.read_text())
    lab.nodes[0].stop_sshd()
    lab.nodes[0].start_sshd(MaxStartups="1:100:1")
    run = run_job(lab, tmp_path, SHOW, hosts="".join(f"{name} slots=1\n" for name in names))
    assert len(shown(run)) == 6
