"""What the ranks run for checkpoints that others wrote, or that others read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zrun_runtime

from .checkpoint_uses import SmallNet, config_of, engine_of, mark_of, train
from .training import gathered

WIDTH = 8


class Net(nn.Module):
    """The model of tests/data/deepspeed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 13), nn.GELU(), nn.Linear(13, WIDTH)) for _ in range(2)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("seen", torch.zeros(3))
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        x = x + self.frozen(self.norm(x))
        with torch.no_grad():
            self.seen.add_(torch.tensor([1.0, 2.0, 3.0]))
        return F.linear(x, self.head.weight)


def _batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(11, (4, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def their_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear as DeepSpeed computes it once it ran stage 3: the product is rounded before the bias is added."""
    product = x.matmul(weight.t())
    return product if bias is None else product + bias


@contextmanager
def linear_of(theirs: bool) -> Iterator[None]:
    """Inside, F.linear is DeepSpeed's."""
    own = F.linear
    F.linear = their_linear if theirs else own  # type: ignore[assignment]
    try:
        yield
    finally:
        F.linear = own


def next_loss(weights: dict[str, Tensor], rank: int, theirs: bool) -> float:
    """Of step 3, by plain torch."""
    model = Net()
    for name, parameter in model.named_parameters():
        parameter.data = weights[name]
    model.head.weight = model.embed.weight
    tokens, wanted = _batch(3, rank)
    with linear_of(theirs):
        return F.cross_entropy(model(tokens).flatten(0, 1).float(), wanted.flatten()).item()


def after_import(
    rank: int, world: int, *, directory: str, stage: int, dtype: str, theirs: bool = False
) -> dict[str, Any]:
    """Load an imported checkpoint and do the steps 3 to 5. theirs: with DeepSpeed's F.linear."""
    with linear_of(theirs):
        return _after_import(rank, directory, stage, dtype)


def _after_import(rank: int, directory: str, stage: int, dtype: str) -> dict[str, Any]:
    torch.manual_seed(1)
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "steps_per_print": None,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "betas": [0.9, 0.95]}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 10, "warmup_type": "linear"},
        },
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    engine = zrun_runtime.initialize(model=model, model_parameters=groups, config=config)[0]
    _, client = engine.load_checkpoint(directory)
    seen = engine.module.seen.tolist()
    mark = mark_of(engine)
    losses = []
    for step in range(3, 6):
        tokens, wanted = _batch(step, rank)
        loss = F.cross_entropy(engine(tokens).flatten(0, 1).float(), wanted.flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    counters = engine.global_steps, engine.global_samples
    engine.save_checkpoint(directory, tag="ours")
    end = mark_of(engine)
    engine.load_checkpoint(directory, tag="global_step3")
    assert mark_of(engine)["masters"] == mark["masters"]
    engine.load_checkpoint(directory)
    assert mark_of(engine) == end  # what came in goes on as any other
    found = {"losses": losses, "client": client, "lr": engine.get_lr(), "counters": counters, "seen": seen}
    return {**found, "mark": {key: mark[key] for key in ("masters", "moments")}}


def saved_whole(rank: int, world: int, *, directory: str, stage: int, dtype: str) -> dict[str, Any]:
    """Train, save, and tell the gathered weights: fp32 master weights where there are some."""
    engine = engine_of(config_of(stage, dtype), SmallNet)
    train(engine, 0, 2)
    engine.save_checkpoint(directory)
    engine.save_checkpoint(directory, tag="trained", save_latest=False, exclude_frozen_parameters=True)
    weights = gathered(engine.module)
    full = {n: zrun_runtime.safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters() if p.requires_grad}
    written = engine.save_16bit_model(directory, "whole.bin"), engine.save_16bit_model(directory, "whole.safetensors")
    consolidated = engine._zero3_consolidated_16bit_state_dict()
    buffers = {name: b.clone() for name, b in engine.module.named_buffers() if name != "passing"}
    return {
        "weights": weights,
        "masters": {name: value.clone() for name, value in full.items() if value is not None},
        "buffers": buffers,
        "written": written,
        "consolidated": consolidated,
        "mark": mark_of(engine),
    }
