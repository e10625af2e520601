"""The examples that need no change to run on zrun, by the command that stands at the top of each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.jobs import ROOT

from .running import QUIET

pytestmark = pytest.mark.slow

SAYS = {
    "deepspeed_loop": r"\d+\.\d% of the test points are told apart",
    "hf_trainer": r"evaluation loss \d\.\d+; saved",
    "accelerate_loop": r"loss \d\.\d+ -> \d\.\d+ on 2 processes",
    "lora_sft": r"adapter weights answer with \d\.\d+",
}


@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs_as_its_first_lines_say(name: str, tmp_path: Path) -> None:
    text = (ROOT / "examples" / f"{name}.py").read_text()
    assert "zrun_runtime" not in text, "nothing in it knows of zrun"
    command = "\n".join(re.findall(r"^    (.+)$", text.partition('"""')[2].partition('"""')[0], re.MULTILINE))
    program = tmp_path / "zrun"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m zrun --plain "$@"\n')
    program.chmod(0o755)
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=ROOT,
        env={**os.environ, **QUIET, **path, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(SAYS[name], done.stdout)
