"""How a command line is read, without starting anything."""

from __future__ import annotations

import contextlib
import random

import click
import pytest
from click.testing import CliRunner

from zrun import cli, tools
from zrun.foreign import INSTEAD
from zrun.registry import directory, registered
from zrun.settings import LaunchConfig


@pytest.fixture
def read(monkeypatch, tmp_path):
    """The LaunchConfig that a command line leads to."""
    monkeypatch.chdir(tmp_path)
    seen: list[LaunchConfig] = []
    monkeypatch.setattr(cli, "run_job", lambda config: seen.append(config) or 0)

    def reader(*words: str) -> LaunchConfig:
        with pytest.raises(SystemExit) as end:
            cli.main(list(words))
        assert end.value.code == 0
        return seen.pop()

    return reader


@pytest.fixture
def refuse(monkeypatch, tmp_path, capsys):
    """What is said about a command line that is wrong."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "run_job", lambda config: pytest.fail(f"ran {config}"))

    def refuser(*words: str) -> str:
        with pytest.raises(SystemExit) as end:
            cli.main(list(words))
        assert end.value.code == 2
        return capsys.readouterr().err

    return refuser


def test_nothing_is_the_smoke_job(read):
    assert read() == LaunchConfig()
    assert read("--num_gpus", "2", "--backend", "gloo") == LaunchConfig(num_gpus=2, backend="gloo")


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["--hostfile", "h", "--num-nodes", "2"], {"hostfile": "h", "num_nodes": 2}),
        (["-H", "h", "-i", "a:0,2@b"], {"hostfile": "h", "include": "a:0,2@b"}),
        (["--include=a"], {"include": "a"}),
        (["-e", "a"], {"exclude": "a"}),
        (["--num_gpus", "2"], {"num_gpus": 2}),
        (["--num-gpus=2"], {"num_gpus": 2}),
        (["--num_accelerators", "2"], {"num_gpus": 2}),
        (["--nproc-per-node", "2"], {"num_gpus": 2}),
        (["--nproc_per_node=2"], {"num_gpus": 2}),
        (["--backend", "nccl"], {"backend": "nccl"}),
        (["--device=cuda"], {"device": "cuda"}),
        (["--master-addr", "h", "--master-port", "7"], {"master_addr": "h", "master_port": 7}),
        (["--module"], {"module": True}),
        (["-m"], {"module": True}),
        (["--no-python"], {"no_python": True}),
        (["--local_rank_arg", "_"], {"local_rank_arg": "_"}),
        (["--local-rank-arg", "-"], {"local_rank_arg": "-"}),
        (["--local-rank-arg=off"], {"local_rank_arg": "off"}),
        (["--env", "A=1", "--env", "B-C=x_y", "--env=D"], {"env": ("A=1", "B-C=x_y", "D")}),
        (["--env", "--x"], {"env": ("--x",)}),
        (["--env-file", "f", "--env_file", "g"], {"env_file": ("f", "g")}),
        (["--log_dir", "my-logs"], {"log_dir": "my-logs"}),
        (["--grace", "1.5", "--lease", "7"], {"grace": 1.5, "lease": 7.0}),
        (["--dry-run", "--plain", "-v"], {"dry_run": True, "plain": True, "verbose": True}),
        (["--json", "--verbose"], {"json": True, "verbose": True}),
    ],
)
@pytest.mark.parametrize("script", [["x.py"], ["x.py", "--num_gpus", "9", "-v", "--", "--help", "run"]])
def test_options(read, words, fields, script):
    assert read(*words, *script) == LaunchConfig(script=script[0], script_args=tuple(script[1:]), **fields)


def test_a_separator_before_the_script_is_ours_and_later_ones_are_not(read):
    assert read("--", "-x.py", "--", "a") == LaunchConfig(script="-x.py", script_args=("--", "a"))
    assert read("-v", "--", "--json") == LaunchConfig(script="--json", verbose=True)


def test_whatever_follows_the_script_is_the_scripts(read):
    rng = random.Random(3)
    pieces = ["--num_gpus", "2", "-v", "--", "--help", "", " ", "\n", "a b", "$X", "'", '"', "*", "ü", "\udcff", "run"]
    pieces += ["--env", "A=1", "--config=ds.json", "-", "---", "\\", "%s", "plan", "\t", "=", "--=", "x" * 5000]
    for _ in range(200):
        args = tuple(rng.choice(pieces) for _ in range(rng.randint(0, 12)))
        config = read("--num_gpus", "3", "x.py", *args)
        assert config == LaunchConfig(script="x.py", script_args=args, num_gpus=3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--num_gpus", "0", "x"], "num_gpus"),
        (["--num_nodes", "0", "x"], "num_nodes"),
        (["--num_gpus", "two", "x"], "two"),
        (["--num_gpus", "9" * 30, "x"], "1<=x<=1024"),
        (["--num_gpus"], "num_gpus"),
        (["--hostfile", "", "x"], "--hostfile is empty"),
        (["--log-dir=", "x"], "--log_dir is empty"),
        (["doctor", "--master_addr", ""], "--master_addr is empty"),
        (["--nproc_per_node=auto", "x"], "leave it out"),
        (["--numgpus", "2", "x"], "--num_gpus"),
        (["--backend", "mpi", "x"], "mpi"),
        (["--device", "tpu", "x"], "tpu"),
        (["--master_port", "70000", "x"], "70000"),
        (["--lease", "0", "x"], "lease"),
        (["--grace", "soon", "x"], "soon"),
        (["--grace", "nan", "x"], "--grace"),
        (["--local_rank_arg", "both", "x"], "both"),
        (["-x"], "-x"),
        (["--module"], "--module"),
        (["--plain", "--json", "x"], "--plain"),
    ],
)
def test_wrong_lines(refuse, words, said):
    text = refuse(*words)
    assert said in text and text.startswith("zrun: error: ")
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["--launcher", "pdsh", "x"], "SSH"),
        (["--nnodes=2", "x"], "--num_nodes N"),
        (["--machine_rank", "1", "x"], "--hostfile"),
        (["--enable_each_rank_log=logs", "x"], "--log_dir"),
        (["--num-processes", "2", "x"], "--num_gpus"),
        (["--gpu_ids", "0", "x"], "--include"),
        (["-c", "print(1)"], "--no_python python -c"),
        (["--mixed_precision", "bf16", "x"], "training config"),
        (["-np", "2", "x"], "--num_gpus"),
    ],
)
def test_options_of_other_launchers(refuse, words, instead):
    assert instead in refuse(*words).partition("->")[2]


def test_no_option_of_ours_is_said_to_be_missing():
    ours = {spelling.lstrip("-") for option in cli.launch.params for spelling in option.opts}
    assert not ours.intersection(INSTEAD)


class Entry:
    """An entry point of another package."""

    def __init__(self, command=None, error=None):
        self.value = "elsewhere:command"
        self._command, self._error = command, error

    def load(self):
        if self._error:
            raise self._error
        return self._command


@pytest.fixture
def offer(monkeypatch):
    def offerer(**entries: Entry) -> None:
        def entry_points(group, name):
            assert group == "zrun.commands"
            return [entries[name]] if name in entries else []

        monkeypatch.setattr("importlib.metadata.entry_points", entry_points)

    return offerer


def test_a_command_of_another_package(offer, monkeypatch, tmp_path):
    @click.command()
    @click.option("--n", type=int)
    def plan(n):
        return n

    offer(plan=Entry(plan))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        cli.main(["plan", "--n", "5"])
    assert end.value.code == 5


def test_a_command_is_one_only_as_the_first_word_and_only_if_no_file_is_called_so(offer, read, tmp_path):
    offer(plan=Entry(error=AssertionError("loaded")))
    assert read("-v", "plan").script == "plan"
    assert read("run", "--", "plan").script == "plan"
    assert read("run", "plan", "x") == LaunchConfig(script="plan", script_args=("x",))
    assert read("run", "--num_gpus", "2", "x") == LaunchConfig(script="x", num_gpus=2)
    assert read("other").script == "other"
    (tmp_path / "plan").touch()
    assert read("plan").script == "plan"
    (tmp_path / "run").touch()
    assert read("run", "x") == LaunchConfig(script="run", script_args=("x",))
    assert read("run", "--", "x").script == "x"


def test_a_command_that_cannot_be_loaded(offer, refuse):
    offer(plan=Entry(error=ImportError("No module named 'torch'")))
    assert "No module named 'torch'" in refuse("plan")


def test_a_group_without_a_word_shows_its_help_and_a_wrong_word_names_the_help_to_read(offer, refuse):
    @click.group()
    def config():
        """Configs."""

    config.add_command(click.Command("check", params=[click.Argument(["file"])]))
    offer(config=Entry(config))
    assert refuse("config").startswith("Usage: zrun config ")
    assert "-> zrun config check --help explains" in refuse("config", "check")
    text = refuse("config", "check", "--xyz")
    assert text == "zrun: error: No such option '--xyz'.\n  -> zrun config check --help lists all options\n"


def test_near_options_are_named_once(refuse):
    assert refuse("--numgpus", "2", "x") == (
        "zrun: error: No such option '--numgpus'.\n  -> did you mean --num_gpus or --num_nodes?\n"
    )


@pytest.mark.parametrize("command", [cli.launch, tools.doctor(cli.launch, print), tools.ps, tools.kill])
def test_help_has_examples_and_options_are_read_with_either_stroke(command):
    text = CliRunner().invoke(command, ["-h"]).output
    assert "Examples:" in text and "zrun " in text.partition("Examples:")[2]
    for option in command.params:
        for spelling in option.opts if isinstance(option, click.Option) else ():
            value = [] if option.is_flag else ["1"]
            dashed = "--" + spelling.lstrip("-").replace("_", "-") if spelling.startswith("--") else spelling
            done = CliRunner().invoke(command, [dashed, *value, "--help"])
            assert "No such option" not in done.output, dashed


def test_a_full_disk_behind_stdout_is_no_traceback(monkeypatch, capsys):
    monkeypatch.delenv("ZRUN_TRACEBACK", raising=False)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        with pytest.raises(SystemExit) as end:
            cli.main(["--show_settings"])
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()
    assert end.value.code == 1
    assert capsys.readouterr().err.startswith("zrun: error: No space left on device\n  -> ")


@pytest.mark.parametrize("words", [("doctor",), ("plan", "--params", "7b"), ("x.py",)])
def test_a_directory_that_is_gone(offer, monkeypatch, tmp_path, capsys, words):
    offer(plan=Entry(error=AssertionError("loaded")))
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(SystemExit) as end:
        cli.main(list(words))
    assert end.value.code == 2
    assert "the current directory cannot be used" in capsys.readouterr().err


def test_an_empty_id_ends_no_job(refuse, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with registered(directory({"XDG_RUNTIME_DIR": str(tmp_path)}), "abc", 1, ("a",), "x.py"):
        assert "the id of the job is empty" in refuse("kill", "")
        assert "there is no job x" in refuse("kill", "--no-wait", "x")
