"""What an implementation's own Python costs: a model of 1,000 tiny parameters, where arithmetic and bytes cost little.

Microseconds of CPU time of the training thread, a parameter and step, by phase; and what that is more than under
`plain`, which exchanges nothing. Two ranks, in turns as in step_time.py. `all threads` counts communication too.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from common import Report, machine, main, parser, progress, run_ranks, table, words
from implementations import IMPLEMENTATIONS, build, load
from model import ManySmall

SHORT = ["--sweeps", "1"]
DEFAULT = "plain,ddp,fsdp2_keep,fsdp2,zrun0,zrun1,zrun2,zrun3"
PARAMETERS = 1000
PHASES = ("forward", "backward", "update")


def measure(implementation: str, steps: int) -> dict[str, float]:
    """Medians over the steps, microseconds of CPU time a parameter, of one rank."""
    load(implementation)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    trainer = build(implementation, ManySmall(), batch=2)
    inputs = torch.randn(2, 4)
    taken: dict[str, list[float]] = {phase: [] for phase in (*PHASES, "all threads")}

    def clocked(phase: str, call: Callable[..., Any], *given: Any) -> Any:
        start = time.thread_time()
        result = call(*given)
        taken[phase].append(time.thread_time() - start)
        return result

    for _ in range(steps):
        dist.barrier()
        start = time.process_time()
        loss = clocked("forward", lambda: trainer.forward(inputs).square().mean())
        clocked("backward", trainer.backward, loss)
        clocked("update", trainer.update)
        taken["all threads"].append(time.process_time() - start)
    warm = max(2, steps // 4)
    return {phase: 1e6 * statistics.median(seconds[warm:]) / PARAMETERS for phase, seconds in taken.items()}


def bench(arguments: Sequence[str]) -> Report:
    """See the top of the file."""
    options = parse(arguments)
    names = words(options.impl)
    where, sweeps = machine(), []
    for number in range(options.sweeps):
        results = {}
        for name in names if number % 2 == 0 else names[::-1]:
            with progress(f"sweep {number + 1} of {options.sweeps}: {name}"):
                ranks = run_ranks("overhead:measure", {"implementation": name, "steps": options.steps})
            results[name] = {key: statistics.fmean(rank[key] for rank in ranks) for key in ranks[0]}
        sweeps.append(results)
    rows = []
    for name in names:
        middle = {key: statistics.median(sweep[name][key] for sweep in sweeps) for key in sweeps[0][name]}
        own = [sum(s[name][p] - s["plain"][p] for p in PHASES) for s in sweeps] if "plain" in names else []
        total = sum(middle[phase] for phase in PHASES)
        more = statistics.median(own) if own else None
        rows.append((name, *(middle[phase] for phase in PHASES), total, more, middle["all threads"]))
    return Report(
        "Overhead with 1,000 tiny parameters, CPU microseconds a parameter and step",
        [where, f"median of {options.sweeps} sweeps of {options.steps} steps, the first quarter left out; two ranks"],
        [table(("", *PHASES, "sum", "more than plain", "all threads"), rows)],
        data=sweeps,
    )


def parse(arguments: Sequence[str]) -> Any:
    """The options of a run."""
    made = parser(__doc__)
    made.add_argument("--impl", default=DEFAULT, help=f"of {', '.join(IMPLEMENTATIONS)} (default: {DEFAULT})")
    made.add_argument("--sweeps", type=int, default=3)
    made.add_argument("--steps", type=int, default=20)
    return made.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(bench, parse))
