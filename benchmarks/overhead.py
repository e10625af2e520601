"""What an implementation's own Python costs: a model of 1,000 tiny parameters, where arithmetic and bytes cost little.

Microseconds of CPU time of the training thread, a parameter and step, by phase; and what that is more than under
`plain`, which exchanges nothing. Two ranks, in turns as in step_time.py. `all threads` counts communication too.

The guards, which see what scripts write into weights, are clocked one by one inside steps: with these parameters, and
as a share of a step of a GPT of 33 M parameters on one rank, which has all weights to look after.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from common import Promise, Report, machine, main, parser, progress, run_ranks, table, words
from implementations import IMPLEMENTATIONS, build, load, zero_config
from model import GPT, SIZES, ManySmall, token_batches, token_loss

import zrun_runtime
from zrun_runtime.edits import Edits
from zrun_runtime.master import MasterWeights

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


# What runs in a step only because scripts may write into weights; none of them calls another.
GUARDS = ((Edits, "take_back"), (Edits, "flags"), (Edits, "take"), (MasterWeights, "inspect"),
          (MasterWeights, "catch_up"), (MasterWeights, "mark"))  # fmt: skip


def guards(many: bool, dtype: str, steps: int) -> dict[str, float]:
    """CPU time of the guards in a step at ZeRO 1: microseconds a parameter tensor, and share of the step; medians."""
    torch.manual_seed(0)
    size = SIZES["33m"]
    model = ManySmall() if many else GPT(size)
    config = zero_config(1, size.batch, dtype=dtype)
    engine, *_ = zrun_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    data, spent = token_batches(size, 0), [0.0]
    few = torch.ones(2, 4, dtype=next(model.parameters()).dtype)
    for owner, name in GUARDS:
        setattr(owner, name, _clocked(getattr(owner, name), spent))
    taken = []
    for _ in range(steps):
        inputs, targets = next(data)
        spent[0], start = 0.0, time.process_time()
        loss = engine(few).float().square().mean() if many else token_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        taken.append((spent[0], time.process_time() - start))
    tensors, warm = len(list(model.parameters())), max(2, steps // 4)
    return {
        "us": 1e6 * statistics.median(own for own, _ in taken[warm:]) / tensors,
        "share": statistics.median(own / whole for own, whole in taken[warm:]),
    }


def _clocked(call: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def clocked(*given: Any, **named: Any) -> Any:
        start = time.process_time()
        try:
            return call(*given, **named)
        finally:
            spent[0] += time.process_time() - start

    return clocked


def guard_report(steps: int) -> tuple[str, list[Promise]]:
    """A table of what the guards cost, and the promises on it."""
    rows, promises = [], []
    for dtype in ("fp32", "bf16"):
        with progress(f"guards, {dtype}"):
            many = run_ranks("overhead:guards", {"many": True, "dtype": dtype, "steps": steps})
            large = run_ranks("overhead:guards", {"many": False, "dtype": dtype, "steps": steps}, world=1)[0]
        microseconds = statistics.fmean(rank["us"] for rank in many)
        rows.append((f"guards, {dtype}", microseconds, f"{100 * large['share']:.3f} %"))
        promises.append(Promise(f"guards, {dtype}: microseconds a parameter tensor", microseconds, 1.0))
        promises.append(Promise(f"guards, {dtype}: share of a step of 33 M parameters, one rank", large["share"], 0.02))
    headers = ("", "CPU us a tensor and step, 1,000 tiny ones, two ranks", "of a step of 33 M, one rank")
    return table(headers, rows), promises


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
    guarded, promises = guard_report(options.steps)
    return Report(
        "Overhead with 1,000 tiny parameters, CPU microseconds a parameter and step",
        [where, f"median of {options.sweeps} sweeps of {options.steps} steps, the first quarter left out; two ranks"],
        [table(("", *PHASES, "sum", "more than plain", "all threads"), rows), guarded],
        promises,
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
