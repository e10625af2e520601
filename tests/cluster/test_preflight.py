"""Hosts that are not fit are found before anything starts, in bounded time, each with its own words."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import zrun as package
from tests.cluster.lab import ROOT, Lab, call, tool, zrun

QUIET = "print('started', flush=True)\n"
TIMEOUT = 3.0
OPTIONS = ("--backend", "gloo", "--connect_timeout", str(TIMEOUT))


def refused(lab: Lab, tmp_path: Path, *words: str, options: tuple[str, ...] = (), hostfile: str = "") -> str:
    """Runs a job that has to be refused; what was said."""
    (tmp_path / "script.py").write_text(QUIET)
    began = time.monotonic()
    with zrun(lab, tmp_path, "--hostfile", lab.hostfile(hostfile), *OPTIONS, *options, "script.py") as run:
        assert run.wait(TIMEOUT + 8) == 3, run.said
        assert time.monotonic() - began < TIMEOUT + 5
        assert "started" not in run.out
        for word in words:
            assert word in run.err, run.said
        return run.err


def test_a_host_that_refuses_connections(lab, tmp_path):
    lab.nodes[1].stop_sshd()
    said = refused(lab, tmp_path, "root@10.99.0.2:22", "Connection refused", "/ssh_config -p 22 root@node-2 true")
    assert "1 of 2 hosts is not fit" in said and "nothing was started" in said


def test_a_host_that_is_unplugged(lab, tmp_path):
    lab.nodes[1].pull_cable()
    options = ("--connect_timeout", "4")
    said = refused(lab, tmp_path, "node-2: root@10.99.0.2:22 cannot be reached", options=options)
    assert said.startswith("zrun: waiting for an answer of node-2\n")


def test_a_server_that_says_nothing(lab, tmp_path):
    lab.nodes[1].stop_sshd()
    listen = "import socket, time; s = socket.socket(); s.bind(('', 22)); s.listen(); time.sleep(60)"
    deaf = subprocess.Popen(lab.nodes[1].words(sys.executable, "-c", listen))
    try:
        refused(lab, tmp_path, "accepts the connection but says nothing for 3 s", "--connect_timeout")
    finally:
        deaf.kill()
        deaf.wait()


def test_a_login_shell_that_hangs(lab, tmp_path):
    lab.nodes[1].stop_sshd()
    lab.nodes[1].start_sshd(ForceCommand="sleep 60")
    refused(lab, tmp_path, "node-2: no answer within")


def test_a_login_that_runs_something_else(lab, tmp_path):
    lab.nodes[1].stop_sshd()
    lab.nodes[1].start_sshd(ForceCommand="echo; echo only backups here; echo")
    said = refused(lab, tmp_path, "node-2: its agent did not start; what it said last: 'only backups here'")
    assert "a command that its SSH server forces" in said


def test_a_server_without_sessions(lab, tmp_path):
    lab.nodes[1].stop_sshd()
    lab.nodes[1].start_sshd(MaxSessions="0")
    refused(
        lab, tmp_path, "node-2: root@10.99.0.2:22 runs no program for us: it opens no further session", "MaxSessions"
    )


def test_a_changed_host_key(lab, tmp_path):
    kind, key, *_ = (lab.directory / "other.pub").read_text().split()
    lab.write_known_hosts(node_2=f"10.99.0.2 {kind} {key}\n")
    said = refused(lab, tmp_path, "host key of root@10.99.0.2:22 has CHANGED", "known_hosts:2", "ssh-keygen -f")
    assert "SHA256:" in said


def test_an_unknown_host_key_and_the_choice_to_take_it(lab, tmp_path):
    lab.write_known_hosts(node_2="# nobody\n")
    before = (lab.directory / "known_hosts").read_text()
    refused(lab, tmp_path, "host key of root@10.99.0.2:22 is not known", "--host_key accept-new takes it")
    words = ("--hostfile", lab.hostfile(), *OPTIONS, "--host_key", "accept-new", "script.py")
    with zrun(lab, tmp_path, *words) as run:
        assert run.wait() == 0, run.said
    after = (lab.directory / "known_hosts").read_text()
    kind, key, *_ = (lab.directory / "node-2.host.pub").read_text().split()
    assert after == f"{before}10.99.0.2 {kind} {key}\n"


def test_a_key_that_is_not_accepted(lab, tmp_path):
    config = lab.write_ssh_config(node_2=f"IdentityFile {lab.directory}/other\nIdentitiesOnly yes")
    config.write_text(config.read_text().replace(f"IdentityFile {lab.directory}/key", "IdentityFile none"))
    said = refused(lab, tmp_path, "node-2: root@10.99.0.2:22 refuses the login", f"{lab.directory}/other")
    assert "node-1: root@10.99.0.1:22 refuses the login. Tried: no key was found" in said


def test_a_host_without_python(lab, tmp_path):
    hosts = "node-1 slots=2\nnode-2 slots=2 python=/opt/nothing/python3\n"
    refused(
        lab, tmp_path, "node-2: there is no Python at /opt/nothing/python3", "python= in the hostfile", hostfile=hosts
    )


def test_a_python_without_zrun(lab, tmp_path):
    hosts = f"node-1 slots=2\nnode-2 slots=2 python={wrapper(tmp_path, f'exec {sys.executable} -S -E')}\n"
    refused(lab, tmp_path, "node-2: zrun is not installed for", "-m pip install zrun==", hostfile=hosts)


def test_another_version_of_zrun(lab, tmp_path):
    shutil.copytree(ROOT / "zrun", tmp_path / "old" / "zrun", ignore=shutil.ignore_patterns("__pycache__"))
    init = tmp_path / "old" / "zrun" / "__init__.py"
    init.write_text(init.read_text().replace(package.__version__, "0.0.7"))
    python = wrapper(tmp_path, f"PYTHONPATH={tmp_path}/old exec {sys.executable}")
    hosts = f"node-1 slots=2\nnode-2 slots=2 python={python}\n"
    refused(lab, tmp_path, "node-2: it has zrun 0.0.7, and this machine", hostfile=hosts)


def test_a_host_without_the_directory(lab, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    lab.nodes[1].stop_sshd()
    lab.nodes[1].start_sshd(first=f"mount -t tmpfs none {work.parent} && mkdir -p /run/sshd")
    refused(lab, work, f"node-2: there is no directory {work}")


def test_another_script(lab, tmp_path):
    (tmp_path / "other.py").write_text("print('something else')\n")
    (tmp_path / "script.py").write_text(QUIET)
    lab.nodes[1].stop_sshd()
    lab.nodes[1].start_sshd(first=f"mount --bind {tmp_path}/other.py {tmp_path}/script.py")
    refused(lab, tmp_path, "node-2: its script.py is not the same as here")
    with zrun(lab, tmp_path, "--hostfile", lab.hostfile(), *OPTIONS, "--no_preflight", "script.py") as run:
        assert run.wait() == 0, run.said
        assert run.out.count("started") == 2 and run.out.count("something else") == 2


def test_gpus_that_are_not_there(lab, tmp_path):
    (tmp_path / "script.py").write_text(QUIET)
    hosts = ("--hostfile", lab.hostfile(), "--device", "cuda", "--connect_timeout", "3")
    with zrun(lab, tmp_path, *hosts, "script.py") as run:
        assert run.wait() == 3, run.said
        assert "node-2: slot 1 is asked for: 0 GPUs" in run.err


def test_a_port_that_is_taken_and_one_that_cannot_be_reached(lab, tmp_path):
    listen = "import socket, time; s = socket.socket(); s.bind(('', 29500)); s.listen(); time.sleep(60)"
    taken = subprocess.Popen(lab.nodes[0].words(sys.executable, "-c", listen))
    try:
        refused(lab, tmp_path, "--master_port 29500 is taken by process", options=("--master_port", "29500"))
    finally:
        taken.kill()
        taken.wait()
    said = refused(lab, tmp_path, "10.99.7.7 port", options=("--master_addr", "10.99.7.7"))
    assert "--master_addr" in said


def test_an_interface_that_is_not_there(lab, tmp_path):
    refused(lab, tmp_path, "node-2: it has no interface wire9", "it has eth0, lo", options=("--iface", "wire9"))


def test_a_noisy_csh_like_login(lab, tmp_path):
    """What a shell prints before the agent greets is thrown away."""
    (tmp_path / "script.py").write_text(QUIET)
    lab.nodes[1].stop_sshd()
    lab.nodes[1].start_sshd(ForceCommand='echo "Welcome to node-2"; echo; eval "$SSH_ORIGINAL_COMMAND"')
    with zrun(lab, tmp_path, "--hostfile", lab.hostfile(), *OPTIONS, "script.py") as run:
        assert run.wait() == 0, run.said
        assert run.out.count("started") == 4 and "Welcome" not in run.out


@pytest.mark.parametrize("shell", ["fish", "tcsh", "dash"])
def test_login_shells(lab, tmp_path, shell):
    """Shells that read a command line each in their own way, speak first, and begin where odd files lie."""
    users = re.sub(r"(?m)^root:.*", f"root:x:0:0:root:{tmp_path}/home:{tool(shell)}", Path("/etc/passwd").read_text())
    (tmp_path / "passwd").write_text(users)
    for name in (".cshrc", ".config/fish/config.fish"):
        (tmp_path / "home" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "home" / name).write_text(f"echo Welcome\necho\ntouch {tmp_path}/spoke\n")
    (tmp_path / "home" / "select.py").write_text("raise ImportError('not the one of Python')")
    script = "import os, sys\nprint(sys.argv[1:], os.readlink(f'/proc/{os.getppid()}/exe'), flush=True)\n"
    (tmp_path / "script.py").write_text(script)
    lab.nodes[1].stop_sshd()
    lab.nodes[1].start_sshd(f"mount --bind {tmp_path}/passwd /etc/passwd")
    words = ["a b", "$HOME", "it's", "*", "!x", "(y)"]
    with zrun(lab, tmp_path, "--hostfile", lab.hostfile("node-2 slots=1\n"), *OPTIONS, "script.py", *words) as run:
        assert run.wait() == 0, run.said
        assert f"{words} " in run.out and "Welcome" not in run.out
    assert shell == "dash" or (tmp_path / "spoke").exists()


def test_the_doctor(lab, tmp_path):
    lab.hostfile()
    words = ("--hostfile", str(lab.directory / "hostfile"), "--device", "cpu", "--connect_timeout", "3")
    config = ("--ssh_config", str(lab.directory / "ssh_config"))
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    command = lab.desk.words("env", f"PYTHONPATH={environ['PYTHONPATH']}", sys.executable, "-m", "zrun", "doctor")
    text = call(*command, *words, *config)
    assert "node-1  ok" in text and "node-2  ok" in text and "ranks meet at 10.99.0.1, through eth0" in text
    report = json.loads(call(*command, *words, *config, "--json"))
    assert report["fit"] and [host["host"] for host in report["hosts"]] == ["node-1", "node-2"]
    assert report["hosts"][1]["facts"]["reached_at"] == "10.99.0.2"
    assert report["meeting"]["interfaces"] == ["eth0", "eth0"]


def wrapper(directory: Path, command: str) -> Path:
    """A program that passes for an interpreter."""
    path = directory / "python"
    path.write_text(f'#!/bin/sh\n{command} "$@"\n')
    path.chmod(0o755)
    return path
