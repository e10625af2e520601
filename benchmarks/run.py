"""Run the benchmarks in short form and print one report: `python benchmarks/run.py [--only NAME,...] [--full]`.

Exit status 1 if a promise is broken, 2 if something could not be measured.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from common import BenchmarkError, Promise, Report, parser, table, words

# gpu_check belongs to a machine with a GPU and runs only when it is named.
BENCHMARKS = (
    "launch_time",
    "many_hosts",
    "traffic",
    "memory",
    "checkpoint",
    "fake_world",
    "offload",
    "overhead",
    "step_time",
)


def run(name: str, full: bool) -> Report | str:
    """One benchmark's report, or why there is none."""
    module = importlib.import_module(name)
    print(f"{name}:", file=sys.stderr, flush=True)
    try:
        return module.bench([] if full else module.SHORT)
    except BenchmarkError as error:
        return str(error)


def summary(promises: list[Promise], failures: dict[str, str]) -> str:
    """How many promises are kept, and those that are not."""
    broken = [promise for promise in promises if not promise.kept]
    lines = [f"## {len(promises) - len(broken)} of {len(promises)} promises kept"]
    if broken:
        rows = [(p.text, f"{p.value:.4g}", f"{p.limit:.4g}") for p in broken]
        lines.append(table(("broken", "is", "at most"), rows))
    lines += [f"{name} could not be measured: {why}" for name, why in failures.items()]
    return "\n\n".join(lines)


def main() -> int:
    """Run, print, and say with the exit status how it went."""
    made = parser(__doc__)
    made.add_argument("--only", type=words, default=list(BENCHMARKS), help=f"of {', '.join(BENCHMARKS)}, gpu_check")
    made.add_argument("--full", action="store_true", help="as each runs by itself, not in short form")
    options = made.parse_args()
    for name in options.only:
        if name not in (*BENCHMARKS, "gpu_check"):
            made.error(f"--only: {name!r} is not one of {', '.join(BENCHMARKS)}, gpu_check")
    promises: list[Promise] = []
    failures: dict[str, str] = {}
    data: dict[str, Any] = {}
    for name in options.only:
        report = run(name, options.full)
        if isinstance(report, str):
            failures[name] = report
            continue
        promises += report.promises
        data[name] = report.data
        print(report.text(), end="\n\n", flush=True)
    print(summary(promises, failures))
    if options.json:
        Path(options.json).write_text(json.dumps(data, indent=1) + "\n")
    if failures:
        return 2
    return 0 if all(promise.kept for promise in promises) else 1


if __name__ == "__main__":
    sys.exit(main())
