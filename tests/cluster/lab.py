"""Machines in small: network namespaces joined by a bridge, a real sshd in each. No packet leaves them.

All namespaces share the kernel, the process table and the files of this machine; each has its own interfaces. The
`desk` is where `zrun` is typed; nodes are where its workers run.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.folded import unfolded

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "zrunlab"
PATIENCE = 30.0  # seconds for what should take one
TOOLS = ("ip", "sshd", "ssh-keygen", "nsenter", "fish", "tcsh")
_SSHD_ROOM = "/run/sshd"  # sshd asks for it, an empty directory
_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def missing() -> str:
    """What this machine lacks; empty if nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    tools = [tool for tool in TOOLS if shutil.which(tool, path=_PATH) is None]
    return f"missing: {', '.join(tools)} (tests/system_packages.sh installs them)" if tools else ""


class Node:
    """One machine: a namespace and what runs in it."""

    def __init__(self, lab: Lab, name: str, number: int) -> None:
        self.lab = lab
        self.name = name
        self.space = f"{lab.tag}-{name}"
        self.address = f"10.99.0.{number}"
        self.address6 = f"fd99::{number:x}"
        self.wire = f"w{number}"  # its end at the switch
        self.sshd: subprocess.Popen[bytes] | None = None
        self.cable: subprocess.Popen[bytes] | None = None  # what spoils it
        self.changed = False  # its server is not as it was built

    def words(self, *words: str) -> list[str]:
        """A command line that runs `words` in this namespace."""
        return [tool("nsenter"), f"--net=/run/netns/{self.space}", *words]

    def pids(self) -> list[int]:
        """Every process in the namespace."""
        return [int(pid) for pid in call("ip", "netns", "pids", self.space).split()]

    def pids_of(self, *words: str) -> list[int]:
        """Those whose command line holds all `words`."""
        return [pid for pid in self.pids() if all(word in command_line(pid) for word in words)]

    def workers(self, job_id: str = "") -> list[int]:
        """Ranks and what they started."""
        mark = f"\0ZRUN_JOB_ID={job_id}"
        return [pid for pid in self.pids() if mark in read(f"/proc/{pid}/environ")]

    def start_sshd(self, first: str = "", **options: str) -> None:
        """Starts its SSH server, and waits until it answers.

        Args:
            first: a shell command that is run before, and changes what files the server's sessions see.
        """
        self.changed = bool(first or options)
        config = self.lab.sshd_config(self.name, options)
        # What a login shell of this machine's own user would run is no part of the lab.
        profile = os.path.expanduser("~/.bashrc")
        steps = [f"mount --bind /dev/null {profile}"] if os.path.exists(profile) else []
        steps += [first] if first else []
        steps.append(f"exec {tool('sshd')} -D -e -f {config}")
        command = self.words("unshare", "--mount", "--propagation", "private", "sh", "-c", " && ".join(steps))
        with (self.lab.directory / f"{self.name}.sshd.log").open("ab") as log:
            self.sshd = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_for(lambda: ":0016 " in call(*self.words("cat", "/proc/self/net/tcp")), f"sshd of {self.name}")

    def stop_sshd(self) -> None:
        """Ends the server; sessions go on."""
        if self.sshd is not None:
            self.sshd.kill()
            self.sshd.wait()
            self.sshd = None
        self.changed = True

    def pull_cable(self) -> None:
        call("ip", "-n", self.lab.switch, "link", "set", self.wire, "down")

    def plug_in(self) -> None:
        call("ip", "-n", self.lab.switch, "link", "set", self.wire, "up")

    def spoil_cable(self, delay: float, loss: float) -> None:
        """Makes its cable slow and lossy: seconds and part of the packets, in each direction."""
        tap = f"t{self.wire}"
        program = str(Path(__file__).with_name("bad_cable.py"))
        command = [sys.executable, program, self.wire, tap, str(delay), str(loss)]
        self.cable = subprocess.Popen(
            [tool("nsenter"), f"--net=/run/netns/{self.lab.switch}", *command], stdout=subprocess.PIPE
        )
        assert self.cable.stdout is not None and self.cable.stdout.readline() == b"ready\n"
        call("ip", "-n", self.lab.switch, "link", "set", self.wire, "nomaster")
        call("ip", "-n", self.lab.switch, "link", "set", tap, "master", "br0", "up")

    def mend_cable(self) -> None:
        """As it was."""
        if self.cable is not None:
            self.cable.kill()  # and with it its interface goes
            self.cable.communicate()
            self.cable = None
            call("ip", "-n", self.lab.switch, "link", "set", self.wire, "master", "br0")


class Lab:
    """A switch, a desk and some nodes."""

    def __init__(self, directory: Path, nodes: int) -> None:
        self.directory = directory
        self.temp = directory / "temp"  # of all that runs in the lab
        self.tag = f"{PREFIX}{os.getpid()}"
        self.switch = f"{self.tag}-sw"
        self._made_run = False
        self.desk = Node(self, "desk", 100)
        self.nodes = [Node(self, f"node-{i + 1}", i + 1) for i in range(nodes)]

    def build(self) -> None:
        sweep()
        self._made_run = not os.path.isdir(_SSHD_ROOM)
        os.makedirs(_SSHD_ROOM, exist_ok=True)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.temp.mkdir(exist_ok=True)
        self._make_keys()
        call("ip", "netns", "add", self.switch)
        call("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge")
        call("ip", "-n", self.switch, "link", "set", "br0", "up")
        for node in (self.desk, *self.nodes):
            self._join(node)
        for node in self.nodes:
            node.start_sshd()

    def _join(self, node: Node) -> None:
        call("ip", "netns", "add", node.space)
        end = ("peer", "name", "eth0", "netns", node.space)
        call("ip", "-n", self.switch, "link", "add", node.wire, "type", "veth", *end)
        call("ip", "-n", self.switch, "link", "set", node.wire, "master", "br0", "up")
        call("ip", "-n", node.space, "link", "set", "lo", "up")
        call("ip", "-n", node.space, "link", "set", "eth0", "up")
        call("ip", "-n", node.space, "address", "add", f"{node.address}/24", "dev", "eth0")
        call("ip", "-n", node.space, "address", "add", f"{node.address6}/64", "dev", "eth0", "nodad")

    def restore(self) -> None:
        """Everything as `build` left it."""
        for node in self.nodes:
            node.plug_in()
            node.mend_cable()
            if node.changed or node.sshd is None or node.sshd.poll() is not None:
                node.stop_sshd()
                for pid in node.pids():
                    kill(pid)
                node.start_sshd()
        self.write_known_hosts()
        self.write_ssh_config()

    def remove(self) -> None:
        """Ends whatever runs in the namespaces, and takes them away."""
        for node in (self.desk, *self.nodes):
            node.stop_sshd()
            node.mend_cable()
        remove_spaces([self.switch, *(node.space for node in (self.desk, *self.nodes))])
        if self._made_run:
            self._made_run = False
            os.rmdir(_SSHD_ROOM)

    # ---- files -----------------------------------------------------------------------------------------------------

    def _make_keys(self) -> None:
        for name in ("key", "other", *(f"{node.name}.host" for node in self.nodes)):
            call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(self.directory / name))
        (self.directory / "authorized").write_text((self.directory / "key.pub").read_text())
        self.write_known_hosts()
        self.write_ssh_config()

    def write_known_hosts(self, **instead: str) -> None:
        """All nodes are known by their keys. `instead`: other text for some, by name with `_` for `-`."""
        lines = []
        for node in self.nodes:
            kind, key, *_ = (self.directory / f"{node.name}.host.pub").read_text().split()
            line = f"{node.address},{node.address6} {kind} {key}\n"
            lines.append(instead.get(node.name.replace("-", "_"), line))
        (self.directory / "known_hosts").write_text("".join(lines))

    def write_ssh_config(self, **more: str) -> Path:
        """A config by which the nodes' names lead to them. `more`: lines for some, by name with `_` for `-`."""
        lines = []
        for node in self.nodes:
            lines += [f"Host {node.name}", f"    HostName {node.address}"]
            lines += [f"    {line}" for line in more.get(node.name.replace("-", "_"), "").splitlines()]
        lines += [
            "Host *",
            f"    IdentityFile {self.directory}/key",
            f"    UserKnownHostsFile {self.directory}/known_hosts",
        ]
        lines += ["    IdentityAgent none", "    GlobalKnownHostsFile none", "    User root"]
        path = self.directory / "ssh_config"
        path.write_text("\n".join([*lines, ""]))
        return path

    def sshd_config(self, name: str, options: Mapping[str, str]) -> Path:
        found = ROOT if not os.environ.get("PYTHONPATH") else f"{ROOT}:{os.environ['PYTHONPATH']}"
        settings = {
            "HostKey": str(self.directory / f"{name}.host"),
            "AuthorizedKeysFile": str(self.directory / "authorized"),
            "PidFile": "none",
            "UsePAM": "no",
            "StrictModes": "no",
            "PermitRootLogin": "yes",
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "MaxStartups": "200",
            "SetEnv": f"PYTHONPATH={found} TMPDIR={self.temp}",
            **options,
        }
        path = self.directory / f"{name}.sshd_config"
        path.write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
        return path

    def hostfile(self, text: str = "", slots: int = 2) -> str:
        """Writes a hostfile: all nodes with so many slots, or this text."""
        path = self.directory / "hostfile"
        path.write_text(text or "".join(f"{node.name} slots={slots}\n" for node in self.nodes))
        return str(path)


class Run:
    """One `zrun` at the desk."""

    def __init__(self, lab: Lab, directory: Path, words: list[str], environ: Mapping[str, str]) -> None:
        self.lab = lab
        self.out_path, self.err_path = directory / "out", directory / "err"
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("ZRUN_", "SSH_"))}
        python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        with self.out_path.open("wb") as out, self.err_path.open("wb") as err:
            self.process = subprocess.Popen(
                lab.desk.words(sys.executable, "-m", "zrun", *words),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=directory,
                env={**kept, "PYTHONPATH": python_path, "TMPDIR": str(lab.temp), **environ},
                preexec_fn=os.setpgrp,  # a group whose parent is in another one can be stopped, however tests are run
            )
        self.started = time.monotonic()

    @property
    def out(self) -> str:
        """What was printed, with a line for each rank also where several said the same."""
        return unfolded(self.out_path.read_text("utf-8", "replace"))

    @property
    def err(self) -> str:
        return self.err_path.read_text("utf-8", "replace")

    @property
    def said(self) -> str:
        return f"\n--- out\n{self.out}\n--- err\n{self.err}"

    def wait(self, timeout: float = PATIENCE) -> int:
        """The exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"zrun still runs after {timeout} s{self.said}") from None

    def wait_for(self, what: object, timeout: float = PATIENCE) -> None:
        """Waits until a condition holds, or so many times a text was printed: (text, times)."""
        holds = what if callable(what) else lambda: self.out.count(what[0]) >= what[1]  # type: ignore[index]
        wait_for(holds, str(what), timeout, lambda: self.said)


@contextmanager
def zrun(
    lab: Lab, directory: Path, *words: str, environ: Mapping[str, str] | None = None, plain: bool = True
) -> Iterator[Run]:
    """A run of `zrun` with these words, on the lab's SSH config."""
    options = ["--ssh_config", str(lab.directory / "ssh_config"), *(["--plain"] if plain else [])]
    run = Run(lab, directory, [*options, *words], environ or {})
    try:
        yield run
    finally:
        kill(run.process.pid)
        run.process.wait(PATIENCE)
        for node in (lab.desk, *lab.nodes):
            for pid in node.workers() + node.pids_of("zrun.agent"):
                kill(pid)
            node.plug_in()
            wait_for(
                lambda node=node: not node.workers() + node.pids_of("zrun.agent"), f"the end of all on {node.name}"
            )


# ---- small things --------------------------------------------------------------------------------------------------


def tool(name: str) -> str:
    return shutil.which(name, path=_PATH) or name


def call(*words: str) -> str:
    result = subprocess.run([tool(words[0]), *words[1:]], capture_output=True, text=True, timeout=PATIENCE)
    if result.returncode:
        raise AssertionError(f"{' '.join(words)}: {result.stderr or result.stdout}")
    return result.stdout


def wait_for(holds: object, what: str, timeout: float = PATIENCE, said: object = None) -> None:
    end = time.monotonic() + timeout
    while not holds():  # type: ignore[operator]
        words = said() if callable(said) else ""
        assert time.monotonic() < end, f"waited in vain for {what}{words}"
        time.sleep(0.05)


def read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace")
    except OSError:
        return ""


def command_line(pid: int) -> str:
    return read(f"/proc/{pid}/cmdline").replace("\0", " ")


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def remove_spaces(names: list[str]) -> None:
    there = call("ip", "netns", "list").split()
    for name in names:
        if name not in there:
            continue
        end = time.monotonic() + PATIENCE
        while (pids := call("ip", "netns", "pids", name).split()) and time.monotonic() < end:
            for pid in pids:
                kill(int(pid))
            time.sleep(0.05)
        call("ip", "netns", "del", name)


def sweep() -> None:
    """Takes away what test runs left that were killed."""
    names = [line.split()[0] for line in call("ip", "netns", "list").splitlines() if line.startswith(PREFIX)]
    owners = {name: int(name.removeprefix(PREFIX).partition("-")[0]) for name in names}
    remove_spaces([name for name, owner in owners.items() if not os.path.exists(f"/proc/{owner}")])
