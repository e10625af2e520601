"""What the ranks run for test_bytes.py: bytes sent in a step, told by the runtime and by the loopback interface."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .scenario import Block, Recipe, Run, Scenario, Spot
from .training import EngineRun, make_engine

WARM_UP = 3  # steps in which groups may still be formed anew
MEASURED = 2


@dataclass(frozen=True)
class Job:
    """One measurement."""

    stage: int
    accumulation: int = 1
    checkpointed: str = ""  # "", "reentrant" or "plain"
    optimizer: str = "adamw"


class Wide(Scenario):
    """An embedding, eight equal blocks and a head: a million parameters at width 128. Batches of 8 tokens."""

    vocabulary: ClassVar[int] = 256

    class Net(nn.Module):
        def __init__(self, kind: str, width: int) -> None:
            super().__init__()
            self.kind = kind
            self.tokens = nn.Embedding(Wide.vocabulary, width)
            self.blocks = nn.ModuleList(Block(width, 4 * width) for _ in range(8))
            self.head = nn.Linear(width, Wide.vocabulary, bias=False)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.tokens(tokens)
            for block in self.blocks:
                if self.kind and self.training:
                    x = checkpoint(block, x, use_reentrant=self.kind == "reentrant")
                else:
                    x = block(x)
            return self.head(x)

    def __init__(self, kind: str = "", width: int = 128) -> None:
        self.kind, self.width = kind, width

    def build(self) -> nn.Module:
        return self.Net(self.kind, self.width)

    def batch(self, spot: Spot) -> Any:
        tokens = torch.randint(self.vocabulary, (9,), generator=spot.generator())
        return tokens[:-1], tokens[1:]

    def loss(self, run: Run, batch: Any) -> Tensor:
        return F.cross_entropy(run.forward(batch[0]).float(), batch[1])


def run_steps(run: EngineRun, scenario: Scenario, rank: int, steps: range) -> None:
    """Train for these steps."""
    for step in steps:
        for micro in range(run.engine.gradient_accumulation_steps()):
            run.spot = Spot(step, rank, micro)
            scenario.micro(run)
            run.engine.step()


def sent_by_interface() -> int:
    """Bytes that `lo` of this network namespace has sent so far, headers included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, figures = line.strip().partition(":")
        if name == "lo":
            return int(figures.split()[8])
    raise AssertionError("no loopback interface in this network namespace")


def _together(world: int) -> int:
    """`sent_by_interface` at a moment at which no rank sends, but for two barriers."""
    if world > 1:
        dist.barrier()
    sent = sent_by_interface()
    if world > 1:
        dist.barrier()
    return sent


def measure(rank: int, world: int, *, job: Job) -> dict[str, Any]:
    """Parameter bytes, and bytes per step: counted by the runtime on this rank, and by `lo` for all ranks."""
    scenario = Wide(job.checkpointed)
    engine = make_engine(scenario, job.stage, Recipe(job.optimizer, job.accumulation))
    run = EngineRun(engine)
    run_steps(run, scenario, rank, range(WARM_UP))
    engine.traffic()
    before = _together(world)
    run_steps(run, scenario, rank, range(WARM_UP, WARM_UP + MEASURED))
    counted = {kind: sent / MEASURED for kind, sent in engine.traffic().items()}
    seen = (_together(world) - before) / MEASURED
    size = sum(p.numel() for p in scenario.build().parameters()) * 4
    return {"parameters": size, "counted": counted, "interface": seen}
