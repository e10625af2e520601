"""What the ranks run for test_tuning.py: one training under keys that tune it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import zrun_runtime

from .engine_uses import SGD
from .scenario import CLASSES, WIDTH, Recipe, Spot
from .training import digest, gathered, make_config
from .traps import Plain

WIDER = 64


class Deep(nn.Module):
    """Six blocks of two layers of 4160 parameters and a small norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDER), nn.Linear(WIDER, CLASSES)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDER), nn.Linear(WIDER, WIDER), nn.GELU(), nn.Linear(WIDER, WIDER))
            for _ in range(6)
        )
        self.scale = nn.Parameter(torch.ones(WIDER))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x) * self.scale
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def tuned(rank: int, world: int, *, stage: int, keys: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Three steps under each set of keys of zero_optimization: what was sent, in how many pieces, what was live."""
    found = []
    for chosen in keys:
        config = {**make_config(stage, Recipe(), SGD), "zero_optimization": {"stage": stage, **chosen}}
        torch.manual_seed(0)
        engine = zrun_runtime.initialize(model=Deep(), config=config)[0]
        live: list[int] = []
        for block in engine.module.blocks:
            block[1].register_forward_hook(lambda *_, e=engine, to=live: to.append(e.state_bytes()["params"]))
        for step in range(3):
            engine.traffic()
            live.clear()
            features, classes = Plain().batch(Spot(step, rank, 0))
            engine.backward(F.cross_entropy(engine(features), classes))
            engine.step()
        calls = dict(engine.collectives.traffic.calls)
        sent = engine.traffic()
        notes = {n.path.rpartition(".")[2]: (n.kind, n.text) for n in engine.settings.notes}
        found.append(
            {
                "reduced": (calls.get("reduce_scatter", 0), sent["reduce_scatter"]),
                "gathered": (calls.get("all_gather", 0), sent["all_gather"]),
                "live": max(live),
                "digest": digest(gathered(engine.module)),
                "notes": {name: notes[name] for name in chosen},
            }
        )
    return found


class Counted(torch.optim.SGD):
    """Counts how often it is run."""

    runs = 0

    def step(self, closure: Any = None) -> Any:
        self.runs += 1
        return super().step(closure)


def tiles(rank: int, world: int, *, stage: int, sizes: list[float]) -> list[tuple[int, str]]:
    """(runs of an offloaded optimizer in three steps, digest of the weights) under each sub_group_size."""
    found = []
    for size in sizes:
        torch.manual_seed(0)
        model = Deep()
        zero = {"stage": stage, "sub_group_size": size, "offload_optimizer": {"device": "cpu"}}
        config = {**make_config(stage, Recipe(client=True), {}), "zero_optimization": zero}
        optimizer = Counted(model.parameters(), **SGD)
        engine = zrun_runtime.initialize(model=model, config=config, optimizer=optimizer)[0]
        optimizer.runs = 0
        for step in range(3):
            features, classes = Plain().batch(Spot(step, rank, 0))
            engine.backward(F.cross_entropy(engine(features), classes))
            engine.step()
        found.append((optimizer.runs, digest(gathered(engine.module))))
    return found
