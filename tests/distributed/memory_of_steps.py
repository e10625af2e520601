"""What the ranks run for test_memory.py: the bytes of all live storages, found without asking the runtime."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zrun_runtime
from zrun_runtime.config import load_config
from zrun_runtime.model_size import size_of
from zrun_runtime.savings import footprint_of, plan_of

from .bytes_of_steps import Wide, run_steps
from .scenario import CLASSES, WIDTH, Block, Recipe, Scenario
from .training import EngineRun, make_engine


class Tiny(Scenario):
    """About a thousand parameters."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(WIDTH, 18), nn.Linear(WIDTH, CLASSES))


def live_bytes() -> int:
    """Bytes of every storage that some Python object made since `gc.freeze()` refers to, each storage once."""
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, torch.Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                storage = thing.untyped_storage()
        elif issubclass(kind, torch.UntypedStorage):
            storage = thing
        else:
            continue
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


@dataclass
class Held:
    """Bytes on one rank."""

    parameters: int = 0  # how many the model has
    block: int = 0  # how many one block has, the largest group
    between: int = 0  # between two steps
    within: int = 0  # after the first micro-batch of an accumulation
    forward: int = 0  # most that a hook of a module saw in forward, activations included
    backward: int = 0  # and in backward
    told: dict[str, int] = field(default_factory=dict)  # by engine.state_bytes(), between two steps


def hold(rank: int, world: int, *, stage: int, recipe: Recipe, tiny: bool = False) -> Held:
    """Train two steps, then look, during one micro-batch and after it."""
    scenario = Tiny() if tiny else Wide(width=256)
    gc.collect()
    gc.freeze()  # so that looking at what is alive does not look at what was there before
    try:
        return _hold(rank, scenario, stage, recipe)
    finally:
        gc.unfreeze()


def _hold(rank: int, scenario: Scenario, stage: int, recipe: Recipe) -> Held:
    engine = make_engine(scenario, stage, recipe)
    run, held = EngineRun(engine), Held()
    run_steps(run, scenario, rank, range(2))
    gc.collect()
    held.between, held.told = live_bytes(), dict(engine.state_bytes())
    hooks = _watch(engine.module, held)
    scenario.micro(run)
    for hook in hooks:
        hook.remove()
    engine.step()
    gc.collect()
    held.within = live_bytes()
    model = scenario.build()
    held.parameters = sum(p.numel() for p in model.parameters())
    held.block = max(sum(p.numel() for p in m.parameters()) for m in model.modules() if isinstance(m, Block))
    return held


def _watch(model: nn.Module, held: Held) -> list[Any]:
    """Hooks on every module that note the most bytes alive."""

    def forward(*_: Any) -> None:
        held.forward = max(held.forward, live_bytes())

    def backward(*_: Any) -> None:
        held.backward = max(held.backward, live_bytes())

    hooks: list[Any] = []
    for module in model.modules():
        hooks += [module.register_forward_pre_hook(forward), module.register_forward_hook(forward)]
        hooks += [module.register_full_backward_pre_hook(backward), module.register_full_backward_hook(backward)]
    return hooks


@dataclass(frozen=True)
class Planned:
    """Bytes on one rank between two steps, as they are and as they were predicted."""

    held: int
    disk: int  # its share of all files
    states: int  # predicted, in memory
    buffers: int  # at most, between a disk and the update or a gather
    disk_states: int


def hold_as_planned(rank: int, world: int, *, config: dict[str, Any], path: str) -> Planned:
    """Train two steps under a config whose files go to `path`."""
    scenario = Wide(width=256)
    gc.collect()
    gc.freeze()
    try:
        model = scenario.build()
        settings = load_config(config, world_size=world)
        said = footprint_of(settings, size_of(model), plan_of(settings), one_memory=True)
        engine, *_ = zrun_runtime.initialize(model=model, config=config)
        run_steps(EngineRun(engine), scenario, rank, range(2))
        gc.collect()
        held = live_bytes()
        torch.distributed.barrier()
        disk = sum(f.stat().st_size for f in Path(path).rglob("*") if f.is_file()) // world
        torch.distributed.barrier()  # nobody takes files away before all have counted
        engine.destroy()
        states = said.device.resident + said.host.resident
        return Planned(held, disk, states, said.host.working, said.disk.resident)
    finally:
        gc.unfreeze()
