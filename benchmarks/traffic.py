"""Bytes that a rank sends in an optimizer step, against the formula, and what the network interface says.

In units of (N-1)/N x the bytes of the parameters, with accumulation a: stages 0 and 1 send 2, stage 2 a + 1, stage 3 at
most 3a (the group used last stays from forward to backward, and a lookup's backward needs no weights). The runtime
counts what it sends. All ranks run in a network namespace of their own, where nothing else speaks, so what its loopback
interface sent (headers included) is a second witness.
"""

from __future__ import annotations

import fcntl
import gc
import json
import operator
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Promise, Report, die_with_parent, machine, main, numbers, parser, progress, run_ranks, table
from implementations import zero_config
from model import GPT, SIZES, count, token_batches, token_loss

import zrun_runtime

SHORT: list[str] = []
WARM_UP, MEASURED = 2, 2  # steps; groups are formed anew in the first
_NAMESPACE = ["unshare", "-rn"]  # -r: a user namespace too, so that it takes no privilege
_SIOCSIFFLAGS, _IFF_UP, _IFF_RUNNING = 0x8914, 0x1, 0x40


def formula(stage: int, accumulation: int) -> int:
    """The most a rank sends in a step, in units of (N-1)/N x the bytes of the parameters."""
    return (2, 2, accumulation + 1, 3 * accumulation)[stage]


# ---- in each rank


def measure(cases: list[list[Any]], size: str) -> list[dict[str, Any]]:
    """For each (stage, accumulation, checkpointing): bytes a step, counted on this rank and seen on `lo` by all."""
    return [_measure(size, *case) for case in cases]


def _measure(size: str, stage: int, accumulation: int, checkpointing: bool) -> dict[str, Any]:
    gc.collect()  # the engine before this one
    torch.manual_seed(0)
    sizes = SIZES[size]
    model = GPT(sizes, checkpointing)
    engine, *_ = zrun_runtime.initialize(
        model=model, model_parameters=model.parameters(), config=zero_config(stage, sizes.batch, accumulation)
    )
    data = token_batches(sizes, engine.world.rank)

    def train(steps: int) -> None:
        for _ in range(steps * accumulation):
            inputs, targets = next(data)
            engine.backward(token_loss(engine(inputs), targets))
            engine.step()

    train(WARM_UP)
    engine.traffic()
    before = _sent_by_loopback()
    train(MEASURED)
    counted = engine.traffic()
    seen = _sent_by_loopback() - before
    engine.destroy()
    return {
        "bytes": 4 * count(model),
        "counted": {kind: sent / MEASURED for kind, sent in counted.items()},
        "interface": seen / MEASURED,
    }


def _sent_by_loopback() -> int:
    """Bytes that `lo` of this network namespace has sent so far, headers included, while all ranks are silent."""
    dist.barrier()
    lines = (line.strip().partition(":") for line in Path("/proc/net/dev").read_text().splitlines())
    sent = next(int(figures.split()[8]) for name, _, figures in lines if name == "lo")
    dist.barrier()
    return sent


# ---- around them


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP | _IFF_RUNNING))


def inside(plan: dict[str, Any]) -> None:
    """Run the ranks of every world, and print one line of JSON with all results. Our stdout is a pipe to `collect`."""
    die_with_parent()
    if plan["private"]:
        _raise_loopback()
    found = {}
    for world in plan["worlds"]:
        with progress(f"{len(plan['cases'])} cases, {world} ranks"):
            found[world] = run_ranks("traffic:measure", {"cases": plan["cases"], "size": plan["size"]}, world)
    print(json.dumps(found))


def collect(plan: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The ranks' results by world, and why the interface could not be asked (empty if it could)."""
    trial = subprocess.run([*_NAMESPACE, "true"], capture_output=True, text=True)
    trouble = trial.stderr.strip() or f"unshare ended with {trial.returncode}" if trial.returncode else ""
    prefix = [] if trouble else _NAMESPACE
    command = [*prefix, sys.executable, __file__, "--inside", json.dumps({**plan, "private": not trouble})]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout), trouble


def rows_of(cases: list[list[Any]], world: int, ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What the table shows of one world's cases."""
    rows = []
    for (stage, accumulation, checkpointing), results in zip(cases, zip(*ranks, strict=True), strict=True):
        unit = results[0]["bytes"] * (world - 1) / world
        sent = [sum(result["counted"].values()) for result in results]
        rows.append({
            "case": f"stage {stage}, world {world}, accumulation {accumulation}{', checkpointed' * checkpointing}",
            "formula": formula(stage, accumulation),
            "sent": max(sent) / unit,
            "reduce": results[0]["counted"]["reduce_scatter"] / unit,
            "gather": results[0]["counted"]["all_gather"] / unit,
            "sent/formula": max(sent) / unit / formula(stage, accumulation),
            "interface/sent": results[0]["interface"] / sum(sent),
        })  # fmt: skip
    return rows


def bench(arguments: Sequence[str]) -> Report:
    """See the top of the file."""
    options = parse(arguments)
    cases = [[s, a, c] for s in range(4) for a in options.accumulation for c in (False, True)]
    where = machine()
    found, trouble = collect({"worlds": options.worlds, "cases": cases, "size": options.size})
    rows = [row for world, ranks in found.items() for row in rows_of(cases, int(world), ranks)]
    share = [row["sent/formula"] for row in rows]
    wire = [row["interface/sent"] for row in rows]
    promises = [
        Promise("sent / formula, the most", max(share), 1.02),
        Promise("sent with checkpointing / without", max(map(operator.truediv, share[1::2], share[::2])), 1.001),
    ]
    if not trouble:
        promises.append(Promise("interface / sent, the most", max(wire), 1.02))
        promises.append(Promise("sent / interface, the most", 1 / min(wire), 1.0))
    megabytes = next(iter(found.values()))[0][0]["bytes"] / 1e6
    witness = f"is NOT a witness, others use it too: {trouble}" if trouble else "is in a network namespace of its own"
    return Report(
        "Bytes sent in a step, in units of (N-1)/N x parameter bytes",
        [where, f"GPT of {megabytes:.1f} MB of parameters, fp32; the loopback interface {witness}"],
        [table(list(rows[0]), [[f"{v:.3f}" if isinstance(v, float) else v for v in row.values()] for row in rows])],
        promises,
        {"cases": cases, "ranks": found},
    )


def parse(arguments: Sequence[str]) -> Any:
    """The options of a run."""
    made = parser(__doc__)
    made.add_argument("--size", choices=sorted(SIZES), default="small")
    made.add_argument("--worlds", type=numbers, default=[2, 4])
    made.add_argument("--accumulation", type=numbers, default=[1, 4])
    return made.parse_args(arguments)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(json.loads(sys.argv[2]))
    else:
        sys.exit(main(bench, parse))
