from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest

from zrun.environment import (
    STAYING,
    TRAVELLING_PREFIXES,
    check_spelling,
    looks_secret,
    parse_env_file,
    read_assignment,
    travelling,
    with_history,
    worker_environment,
)
from zrun.errors import UsageError
from zrun.job import JobSpec

SPEC = JobSpec(
    job_id="abc",
    host="two",
    node_rank=1,
    node_count=2,
    world_size=5,
    first_rank=3,
    local_world_size=2,
    master_addr="10.0.0.1",
    master_port=1234,
    device="cpu",
    backend="gloo",
    command=("python", "x.py"),
    cwd="/",
    environment={"ADDED": "yes"},
)


def test_ranks_of_the_second_node():
    env = worker_environment(SPEC, 1, {"BASE": "1", "RANK": "77", "ZRUN_EVENT_FD": "3:4"}, cores=8)
    expected = {"RANK": "4", "LOCAL_RANK": "1", "WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    expected |= {"CROSS_RANK": "1", "CROSS_SIZE": "2", "GROUP_WORLD_SIZE": "2", "LOCAL_SIZE": "2", "BASE": "1"}
    expected |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234", "ADDED": "yes", "OMP_NUM_THREADS": "4"}
    assert {name: env.get(name) for name in expected} == expected
    assert "ZRUN_EVENT_FD" not in env and "CUDA_VISIBLE_DEVICES" not in env


def test_what_the_user_set_stays():
    env = worker_environment(SPEC, 0, {"OMP_NUM_THREADS": "7", "PYTHONUNBUFFERED": ""}, cores=8)
    assert (env["OMP_NUM_THREADS"], env["PYTHONUNBUFFERED"]) == ("7", "")
    assert worker_environment(SPEC, 0, {}, cores=1)["OMP_NUM_THREADS"] == "1"


def test_nothing_of_another_launcher_is_passed_on():
    base = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCH_LOGS": "x"}
    env = worker_environment(SPEC, 0, base, cores=8)
    assert "TORCHELASTIC_USE_AGENT_STORE" not in env and env["TORCH_LOGS"] == "x"


def test_being_deepspeed():
    spec = dataclasses.replace(SPEC, as_deepspeed=True, environment={"PYTHONPATH": "/mine"})
    found = worker_environment(spec, 0, {"CUDA_VISIBLE_DEVICES": "0"}, 8)
    facade, _, own = found["PYTHONPATH"].partition(os.pathsep)
    assert own == "/mine"
    assert (Path(facade) / "deepspeed" / "__init__.py").is_file()
    assert found["CUDA_VISIBLE_DEVICES"] == "", "on the CPU trainers must see no GPU"
    assert "PYTHONPATH" not in worker_environment(SPEC, 0, {}, 8)


def test_the_history_of_the_job_is_told():
    told = {"ZRUN_RESTART_COUNT": "2", "ZRUN_FIRST_WORLD_SIZE": "16"}
    users = {"A": "1", "ZRUN_RESTART_COUNT": "7"}
    assert with_history(users, 2, 16, shows_stacks=False) == {"A": "1", **told}
    assert with_history(users, 2, 16, shows_stacks=True) == {"A": "1", **told, "PYTHONFAULTHANDLER": "1"}


def test_devices():
    whole = dataclasses.replace(SPEC, device="cuda", devices=("4", "GPU-9"))
    assert worker_environment(whole, 1, {}, 8)["CUDA_VISIBLE_DEVICES"] == "4,GPU-9"
    slices = dataclasses.replace(SPEC, device="cuda", devices=("MIG-a", "MIG-b"))
    assert worker_environment(slices, 1, {}, 8)["CUDA_VISIBLE_DEVICES"] == "MIG-b"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=1", {"A": "1"}),
        ("A=", {"A": ""}),
        ("A=x=y", {"A": "x=y"}),
        ("A= b\nc ", {"A": " b\nc "}),
        ("H", {"H": "h"}),
        ("MY_*", {"MY_A": "1", "MY_B": "2"}),
        ("R*", {"ROOM": "3"}),
        ("A=*", {"A": "*"}),
    ],
)
def test_assignments(text, expected):
    environ = {"H": "h", "MY_A": "1", "MY_B": "2", "OTHER_MY_C": "3", "RANK": "0", "ROOM": "3"}
    assert read_assignment(text, environ) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "=1", "1A=2", "A-B=1", "A B=1", "MISSING", "A\n=1", "*", "NO_*", "A-*", "RANK*"),
        *("RANK=0", "ZRUN_JOB_ID=x", "ZRUN_RESTART_COUNT=3", "ZRUN_FIRST_WORLD_SIZE=9"),
    ],
)
def test_wrong_assignments(text):
    with pytest.raises(UsageError):
        read_assignment(text, {"RANK": "0"})


@pytest.mark.parametrize(
    ("name", "secret"),
    [("WANDB_API_KEY", True), ("hf_token", True), ("DB_PASSWORD", True), ("AWS_SECRET_X", True), ("PATH", False)],
)
def test_secret_names(name, secret):
    assert looks_secret(name) == secret


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("A=1", "1"),
        ("A = 1", "1"),
        ("  export A=1  ", "1"),
        ("A=", ""),
        ("A=b c", "b c"),
        ("A=b # why", "b"),
        ("A=b#c", "b#c"),
        ("A=# all", ""),
        ("A=x=y==", "x=y=="),
        ("A='single # $X \\n'", "single # $X \\n"),
        ('A="two\\nlines \\"q\\" \\$ \\\\ \\z"', 'two\nlines "q" $ \\ \\z'),
        ("A='first\nsecond'", "first\nsecond"),
        ('A="first\n\n# no comment\nlast" # comment', "first\n\n# no comment\nlast"),
        ('A=""', ""),
        ("A=it's", "it's"),
        ("A=1\nA=2", "2"),
        ("\n# B=1\n   # C=1\r\nA=1\r\n\r\n", "1"),
    ],
)
def test_env_files(line, value):
    assert parse_env_file(line, "f") == {"A": value}


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("A=1\nB", "f:2"),
        ("A=1\n\nB='x\ny", "f:3"),
        ("A='x' y", "f:1"),
        ("1A=2", "f:1"),
        ("\nRANK=1", "f:2"),
        ("A B=1", "f:1"),
        ("=1", "f:1"),
    ],
)
def test_wrong_env_files_name_the_line(text, where):
    with pytest.raises(UsageError, match=where):
        parse_env_file(text, "f")


def test_a_file_may_be_read_with_names_that_zrun_sets():
    assert parse_env_file("RANK=1", "f", check_spelling) == {"RANK": "1"}
    with pytest.raises(UsageError, match="f:1"):
        parse_env_file("1A=1", "f", check_spelling)


def test_what_travels_to_other_hosts():
    goes = ["NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "TORCH_LOGS", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_CACHE_PATH", "HF_HOME"]
    goes += ["OMP_NUM_THREADS", "PYTHONPATH", "TRANSFORMERS_X", "WANDB_API_KEY", "MLFLOW_RUN_ID", "UCX_TLS", "MV2_X"]
    stays = ["CUDA_VISIBLE_DEVICES", "TORCHELASTIC_RUN_ID", "PATH", "HOME", "LD_LIBRARY_PATH", "SSH_AUTH_SOCK", "RANK"]
    stays += ["MASTER_ADDR", "SLURM_JOB_ID", "ZRUN_JOB_ID", "MY_TORCH"]
    assert travelling(dict.fromkeys(goes + stays, "x")) == dict.fromkeys(goes, "x")


def test_what_travels_is_documented():
    text = (Path(__file__).resolve().parents[2] / "docs" / "settings.md").read_text("utf-8")
    begin = text.index("Prefixes that travel:")
    goes, _, stays = text[begin : text.index("Anything else", begin)].partition("Never:")
    assert tuple(re.findall("`([A-Z0-9_]+)`", goes)) == TRAVELLING_PREFIXES
    assert tuple(re.findall("`([A-Z0-9_]+)`", stays)) == STAYING


def test_a_nul_is_no_text():
    with pytest.raises(UsageError, match="file: it holds a NUL byte"):
        parse_env_file("A=1\nB=x\0y\n", "file")
