"""Options from the command line, from ZRUN_ variables and from a profile."""

from __future__ import annotations

import os

import pytest

from zrun import cli
from zrun.settings import LaunchConfig


@pytest.fixture(autouse=True)
def no_variables(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith("ZRUN_"):
            monkeypatch.delenv(name)


@pytest.fixture
def read(monkeypatch):
    """The LaunchConfig that words and environment lead to."""
    seen: list[LaunchConfig] = []
    monkeypatch.setattr(cli, "run_job", lambda config: seen.append(config) or 0)

    def reader(*words: str, **variables: str) -> LaunchConfig:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as end:
            cli.main(list(words))
        assert end.value.code == 0
        return seen.pop()

    return reader


@pytest.fixture
def refuse(monkeypatch, capsys):
    """What is said about a profile or a variable that cannot be right."""
    monkeypatch.setattr(cli, "run_job", lambda config: pytest.fail(f"ran {config}"))

    def refuser(*words: str) -> str:
        with pytest.raises(SystemExit) as end:
            cli.main(list(words))
        assert end.value.code == 2
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return said

    return refuser


def profile(tmp_path, text):
    (tmp_path / "zrun.yaml").write_text(text)
    return ["--profile", "zrun.yaml"]


def test_a_profile_may_hold_any_option(read, tmp_path):
    words = profile(
        tmp_path,
        """
        # of this project
        hostfile: hosts
        include: node-*
        num-nodes: 2
        nproc_per_node: 4
        backend: gloo
        local_rank_arg: off
        plain: yes
        json:
        grace: 1.5
        env:
          A: 1
          B: x y
          ON: yes
        env_file: [one, two]
        master_port: 1234
        """,
    )
    assert read(*words, "x.py", "--num_gpus", "7") == LaunchConfig(
        script="x.py",
        script_args=("--num_gpus", "7"),
        hostfile="hosts",
        include="node-*",
        num_nodes=2,
        num_gpus=4,
        backend="gloo",
        local_rank_arg="off",
        plain=True,
        grace=1.5,
        env=("A=1", "B=x y", "ON=yes"),
        env_file=("one", "two"),
        master_port=1234,
    )


def test_what_counts_first(read, tmp_path):
    words = profile(tmp_path, "num_gpus: 1\ngrace: 1\nlease: 2\nenv: [A=1]\nplain: true")
    variables = {"ZRUN_NUM_GPUS": "2", "ZRUN_GRACE": "3", "ZRUN_ENV": "B=1 'C=x y'", "ZRUN_LEASE": ""}
    variables["ZRUN_PLAIN"] = "0"
    config = read(*words, "--num_gpus", "5", **variables)
    assert (config.num_gpus, config.grace, config.lease, config.plain) == (5, 3.0, 2.0, False)
    assert config.env == ("B=1", "C=x y")


def test_the_profile_may_be_named_by_a_variable(read, tmp_path):
    profile(tmp_path, "num_gpus: 3")
    assert read(ZRUN_PROFILE="zrun.yaml").num_gpus == 3
    (tmp_path / "other.yaml").write_text("---\n")
    assert read("--profile", "other.yaml", ZRUN_PROFILE="zrun.yaml").num_gpus is None


def test_every_spelling_is_a_variable(read):
    assert read(ZRUN_NPROC_PER_NODE="3").num_gpus == 3


def test_what_an_outer_job_told_its_worker_is_no_setting(read):
    config = read(ZRUN_JOB_ID="x", ZRUN_DEVICE="cpu", ZRUN_BACKEND="gloo", ZRUN_GRACE="2")
    assert (config.device, config.backend, config.grace) == ("auto", "auto", 2.0)
    assert LaunchConfig() == read(ZRUN_EVENT_FD="3:4", ZRUN_DEVICE="", ZRUN_BACKEND="", ZRUN_GRACE="", ZRUN_JOB_ID="")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_gpu: 2", ["zrun.yaml:1:10", "num_gpu ", "num_gpus?"]),
        ("num_gpus: 2\nfrobnicate: 1", ["zrun.yaml:2:13", "frobnicate", "--help"]),
        ("script: x.py", ["script"]),
        ("profile: x", ["profile"]),
        ("show_settings: true", ["show_settings"]),
        ("num_gpus: 2\nnproc_per_node: 3", ["zrun.yaml:2:17", "zrun.yaml:1:11"]),
        ("num_gpus: 2\nnum_gpus: 3", ["zrun.yaml:2:1", "twice"]),
        ("num_gpus: two", ["'two'", "zrun.yaml:1:11"]),
        ("num_gpus: [2]", ["zrun.yaml:1:11", "num_gpus"]),
        ("backend: mpi", ["'mpi'", "zrun.yaml:1:10"]),
        ("plain: perhaps", ["perhaps", "zrun.yaml:1:8"]),
        ("env: {A: [1]}", ["zrun.yaml:1:10", "env"]),
        ("env_file: {A: 1}", ["zrun.yaml:1:11", "env_file"]),
        ("- a", ["zrun.yaml:1:1"]),
        ("a: [", ["zrun.yaml:1:5", "YAML"]),
        ("plain: true\njson: true", ["--plain", "--json"]),
    ],
)
def test_profiles_that_cannot_be_right(refuse, tmp_path, text, words):
    said = refuse(*profile(tmp_path, text), "x.py")
    assert all(word in said for word in words), said


def test_profiles_that_cannot_be_read(refuse, tmp_path):
    assert "missing.yaml: No such file" in refuse("--profile", "missing.yaml")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert "UTF-8" in refuse("--profile", "bytes")


def test_variables_that_cannot_be_right(refuse, monkeypatch):
    monkeypatch.setenv("ZRUN_NUM_GPUS", "two")
    said = refuse("x.py")
    assert "'two'" in said and "ZRUN_NUM_GPUS" in said
    monkeypatch.setenv("ZRUN_NUM_GPUS", "2")
    monkeypatch.setenv("ZRUN_ENV", "A='1")
    assert "ZRUN_ENV" in refuse("x.py")


def test_show_settings(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cli, "run_job", lambda config: pytest.fail("ran"))
    monkeypatch.setenv("ZRUN_GRACE", "3")
    words = profile(tmp_path, "num_gpus: 2\nenv: {A: x y, API_KEY: hush}")
    with pytest.raises(SystemExit) as end:
        cli.main([*words, "--env-file", "f", "--show_settings", "x.py"])
    assert end.value.code == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert rows["num_gpus"].split() == ["num_gpus", "2", "zrun.yaml:1:11"]
    assert rows["grace"].split() == ["grace", "3.0", "ZRUN_GRACE"]
    assert rows["env_file"].split() == ["env_file", "f", "command", "line"]
    assert rows["backend"].split() == ["backend", "auto", "default"]
    assert rows["hostfile"].split() == ["hostfile", "-", "default"]
    assert "'A=x y' API_KEY=..." in rows["env"] and "zrun.yaml:2:6" in rows["env"]
    assert list(rows)[1:] == [name for name in LaunchConfig.__dataclass_fields__ if not name.startswith("script")]
