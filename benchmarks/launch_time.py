"""From a command to a script's end, and to the first all-reduce: `zrun` beside `torchrun`, two workers, in turns."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import BenchmarkError, Promise, Report, base_environment, machine, main, parser, progress, table

SHORT = ["--pairs", "5"]
LAUNCHERS = {
    "zrun": [sys.executable, "-m", "zrun", "--num_gpus", "2", "--backend", "gloo"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"],
}
SCRIPTS = {
    "nop.py": "",
    # The moment at which the first all-reduce is done, on the clock that we read too.
    "all_reduce.py": """
import sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    open(sys.argv[1], "w").write(repr(time.time()))
dist.barrier()
dist.destroy_process_group()
""",
}


def run_once(launcher: str, script: Path) -> float:
    """Seconds from the start of the command to its end, or to the moment that the script wrote down.

    Raises:
        BenchmarkError: the command failed or hung.
    """
    moment = script.with_suffix(".moment")
    moment.unlink(missing_ok=True)
    command = [*LAUNCHERS[launcher], str(script), str(moment)]
    start = time.time()
    done = subprocess.run(command, env=base_environment(), capture_output=True, text=True, timeout=120)
    end = time.time()
    if done.returncode:
        raise BenchmarkError(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return (float(moment.read_text()) if moment.exists() else end) - start


def run_pairs(pairs: int) -> dict[str, list[dict[str, float]]]:
    """For each script the seconds of every pair; the launcher that goes first alternates."""
    results: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="zrun-bench-") as scratch:
        for name, text in SCRIPTS.items():
            script = Path(scratch, name)
            script.write_text(text)
            for launcher in LAUNCHERS:
                run_once(launcher, script)  # compiles .pyc files and warms the page cache
            results[name] = []
            for number in range(pairs):
                order = list(LAUNCHERS) if number % 2 == 0 else list(LAUNCHERS)[::-1]
                with progress(f"{name}: pair {number + 1} of {pairs}"):
                    results[name].append({launcher: run_once(launcher, script) for launcher in order})
    return results


def bench(arguments: Sequence[str]) -> Report:
    """See the top of the file."""
    options = parse(arguments)
    where = machine()
    results = run_pairs(options.pairs)
    rows, ratios = [], {}
    for name, pairs in results.items():
        each = sorted(pair["zrun"] / pair["torchrun"] for pair in pairs)
        ratios[name] = statistics.median(each)
        seconds = [statistics.median(pair[launcher] for pair in pairs) for launcher in LAUNCHERS]
        until = "its end" if name == "nop.py" else "the first all-reduce is done"
        rows.append((f"{name}, until {until}", *seconds, f"{ratios[name]:.2f} [{each[0]:.2f}-{each[-1]:.2f}]"))
    return Report(
        "Launch time, two workers on this machine, seconds",
        [where, f"median of {options.pairs} pairs; both as `python -m`, after one run each to warm the caches"],
        [table(("", *LAUNCHERS, "ratio"), rows)],
        [Promise("zrun nop.py, x torchrun", ratios["nop.py"], 0.5)],
        results,
    )


def parse(arguments: Sequence[str]) -> Any:
    """The options of a run."""
    made = parser(__doc__)
    made.add_argument("--pairs", type=int, default=9)
    return made.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(bench, parse))
