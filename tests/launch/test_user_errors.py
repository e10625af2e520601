"""An error that the runtime raises on purpose is a sentence and a line of the script; others keep their traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

from tests.launch.jobs import ROOT, job
from tests.launch.test_output import of_kind

CPU = ("--backend", "gloo")
BEGIN = """\
import os, sys, threading, torch, zrun_runtime
def train(**changes):
    model = torch.nn.Linear(4, 4)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **changes}
    return zrun_runtime.initialize(model=model, config=config)[0]
"""
CALLED = "zrun_runtime.initialize(model=model, config=config)"
BAD = "train(train_batch_size=7)"


def script(tail: str) -> str:
    return BEGIN + textwrap.dedent(tail)


def plain(tmp_path, tail, **environ):
    """The script under Python alone."""
    path = tmp_path / "script.py"
    path.write_text(script(tail), "utf-8")
    base = {k: v for k, v in os.environ.items() if not k.startswith(("ZRUN_", "TORCHELASTIC_"))}
    found = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environ = {**base, "PYTHONPATH": os.pathsep.join(found), **environ}
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, env=environ, timeout=60)


def test_a_config_that_does_not_divide_is_said_once_and_exits_with_2(tmp_path):
    with job(tmp_path, script(BAD), "--num_gpus", "2", "--json", "--log_dir", "logs", *CPU) as run:
        assert run.wait(60) == 2
        (failure,) = of_kind(run, "failure")
        assert (failure["returncode"], failure["exit_code"], failure["same_count"]) == (2, 2, 2)
        assert failure["host"] == "localhost" and failure["rank"] in (0, 1)
        first, where = failure["traceback"].splitlines()
        assert first.startswith("zrun_runtime: InvalidConfig: ") and "7 is not a multiple of 2" in first
        assert where == f"  at {tmp_path}/script.py:5, in train: return {CALLED}[0]"
        recorded = json.loads((tmp_path / "logs" / f"rank-{failure['rank']}" / "error.json").read_text("utf-8"))
        whole = recorded["message"]["extraInfo"]["py_callstack"]
        assert whole.startswith("Traceback") and "script.py" in whole and "load_config" in whole


def test_the_console_shows_it_once(tmp_path):
    with job(tmp_path, script("train(gradient_acumulation_steps=1)"), "--num_gpus", "2", "--plain", *CPU) as run:
        assert run.wait(60) == 2
        assert "Traceback" not in run.out and run.out.count("zrun_runtime: ") == 1
        assert "2 ranks failed alike" in run.out


def test_an_error_of_one_rank_names_the_rank_and_keeps_exit_code_1(tmp_path):
    tail = """
        if os.environ["RANK"] == "1":
            model = torch.nn.Embedding(4, 4, sparse=True)
            os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_PORT="0")
            zrun_runtime.initialize(model=model, config={"train_batch_size": 1, "zero_optimization": {"stage": 1}})
        threading.Event().wait()
    """
    with job(tmp_path, script(tail), "--num_gpus", "2", "--json", *CPU) as run:
        assert run.wait(60) == 1
        (failure,) = of_kind(run, "failure")
        assert failure["rank"] == 1 and failure["others_stopped"] == 1
        assert failure["traceback"].startswith("zrun_runtime: ParameterError: ")
        assert "  -> " in failure["traceback"] and "script.py:10" in failure["traceback"]


def test_an_error_that_only_follows_from_the_script_s_own_keeps_both_tracebacks(tmp_path):
    tail = f"""
        try:
            raise KeyError("mine")
        except KeyError:
            {BAD}
    """
    run = plain(tmp_path, tail, WORLD_SIZE="2", RANK="5")
    assert run.returncode == 1
    assert run.stderr.count("Traceback (most") == 2 and "KeyError: 'mine'" in run.stderr
    assert "DistributedError: RANK=5 does not fit" in run.stderr


def test_under_python_alone_and_through_the_hook_of_torch(tmp_path):
    tail = """
        from torch.distributed.elastic.multiprocessing.errors import record
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        @record
        def main():
            zrun_runtime.checkpointing.configure(None, "no/ds.json")
        main()
    """
    run = plain(tmp_path, tail, TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json"))
    first, where = run.stderr.splitlines()
    assert run.returncode == 2
    assert first.startswith("zrun_runtime: ConfigError: no such config file: ") and first.endswith("no/ds.json")
    assert where.startswith(f"  at {tmp_path}/script.py:11, in main: zrun_runtime.checkpointing.configure(")
