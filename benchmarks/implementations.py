"""The same training under every implementation: fused AdamW, gradients clipped to norm 1, fp32.

Imports of the peers are inside functions: a rank loads one of them, and its memory is measured.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.95), 0.1, 1.0
ADAMW: dict[str, Any] = {"lr": LEARNING_RATE, "betas": BETAS, "weight_decay": WEIGHT_DECAY}

# name -> the module that its ranks need beside torch
IMPLEMENTATIONS = {
    "ddp": "torch.nn.parallel",
    "ddp_view": "torch.nn.parallel",  # with gradients as views of its buckets
    "ddp_zero": "torch.distributed.optim",  # DDP with ZeroRedundancyOptimizer
    "fsdp2_keep": "torch.distributed.fsdp",  # parameters stay from forward to backward
    "fsdp2": "torch.distributed.fsdp",
    "plain": "torch.nn",  # nothing is exchanged: what computing alone costs
    **{f"zrun{stage}": "zrun_runtime" for stage in range(4)},
    **{f"deepspeed{stage}": "deepspeed" for stage in (1, 2, 3)},
}


@dataclass(frozen=True)
class Trainer:
    """One optimizer step is forward, backward and update, each called once."""

    forward: Callable[[Tensor], Any]
    backward: Callable[[Tensor], None]
    update: Callable[[], None]


def load(name: str) -> None:
    """Import what an implementation needs, so that it counts neither as the model's memory nor as its time."""
    importlib.import_module(IMPLEMENTATIONS[name])


def build(name: str, model: nn.Module, batch: int) -> Trainer:
    """Train `model`, which has a list `blocks`, under an implementation. The process group is there already."""
    if name.startswith(("zrun", "deepspeed")):
        return _engine(name[:-1], int(name[-1]), model, batch)
    wrapped = _wrap(name, model)
    if name == "ddp_zero":
        zero = importlib.import_module("torch.distributed.optim").ZeroRedundancyOptimizer
        optimizer = zero(wrapped.parameters(), torch.optim.AdamW, fused=True, **ADAMW)
    else:
        optimizer = torch.optim.AdamW(wrapped.parameters(), fused=True, **ADAMW)

    def update() -> None:
        nn.utils.clip_grad_norm_(wrapped.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Trainer(wrapped, lambda loss: loss.backward(), update)


def zero_config(stage: int, batch: int, accumulation: int = 1, dtype: str = "fp32") -> dict[str, Any]:
    """The JSON config of a ZeRO stage."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(BETAS)}},
        "zero_optimization": {"stage": stage},
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    return config


def _engine(family: str, stage: int, model: nn.Module, batch: int) -> Trainer:
    library = importlib.import_module({"zrun": "zrun_runtime"}.get(family, family))
    engine, *_ = library.initialize(model=model, model_parameters=model.parameters(), config=zero_config(stage, batch))
    return Trainer(engine, engine.backward, engine.step)


def _wrap(name: str, model: Any) -> nn.Module:
    if name == "plain":
        return model
    if name.startswith("ddp"):
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=name == "ddp_view")
    fsdp = importlib.import_module("torch.distributed.fsdp")
    mesh = importlib.import_module("torch.distributed.device_mesh").init_device_mesh("cpu", (dist.get_world_size(),))
    for part in [*model.blocks, model]:
        fsdp.fully_shard(part, mesh=mesh, reshard_after_forward=name == "fsdp2")
    return model
