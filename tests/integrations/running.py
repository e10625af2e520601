"""Runs one of the scripts of this directory under zrun, and reads what it wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.launch.jobs import command

HERE = Path(__file__).parent
CPU = ("--plain", "--backend", "gloo", "--num_gpus", "2")
QUIET = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}


def case(name: str, **arguments: Any) -> str:
    """A case as the scripts take it."""
    return f"{name}={json.dumps(arguments, sort_keys=True)}"


def run_cases(
    directory: Path, script: str, cases: list[str], *words: str, facade: bool = True, ranks: int = 2
) -> dict[str, Any]:
    """What the first rank found, by case."""
    out = directory / "out.jsonl"
    options = (*CPU[:-1], str(ranks), *(["--as_deepspeed"] if facade else []))
    with command(directory, *options, str(HERE / script), "--out", str(out), *words, *cases, environ=QUIET) as run:
        code = run.wait(300)
        assert code == 0, f"{run.out}\n{run.err}"
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return {line.pop("case"): line for line in lines}


def close(mine: list[dict[str, float]], other: list[dict[str, float]], limit: float = 1e-5) -> bool:
    """Two histories have the same entries, and the same numbers to `limit`."""
    return [list(log) for log in mine] == [list(log) for log in other] and all(
        abs(a[key] - b[key]) <= limit for a, b in zip(mine, other, strict=True) for key in a
    )
