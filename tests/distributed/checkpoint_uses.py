"""What the ranks run for test_checkpoint.py: engines that save, load and go on."""

from __future__ import annotations

import random
import tempfile
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zrun_runtime

from .scenario import WIDTH, Block
from .training import digest, gathered

TOKENS = 31


class Net(nn.Module):
    """Tied weights, a frozen half, batch norm's buffers, dropout's random numbers, a weight that lies channels-last."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        for block in self.blocks[: blocks // 2]:
            block.requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.conv = nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("codes", torch.arange(3))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x.flatten(0, 1).float()).to(x.dtype).view_as(x)
        x = self.dropout(x)
        x = x + self.conv(x.reshape(len(x), 4, 4, -1)).reshape(x.shape)
        return self.head(x)


class SmallNet(Net):
    """Without batch norm and dropout, so that the number of ranks makes no difference but that of rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)  # type: ignore[assignment]
        self.dropout = nn.Dropout(0.0)


def config_of(
    stage: int,
    dtype: str = "fp32",
    accumulation: int = 1,
    tier: str = "none",
    param_tier: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    """tier: where optimizer state is: none, cpu or nvme. param_tier: of parameters; None: at stage 3 as `tier`."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": [0.02, 0.01]}},
        "steps_per_print": None,
        "checkpoint": {"timeout": 20},
    }
    if dtype == "autocast":
        config["torch_autocast"] = {"enabled": True, "dtype": "bf16"}
    elif dtype != "fp32":
        config[dtype] = {"enabled": True, **({"initial_scale_power": 8} if dtype == "fp16" else {})}
    param_tier = param_tier or (tier if stage == 3 else "none")
    for key, device in (("offload_optimizer", tier), ("offload_param", param_tier)):
        if device != "none":
            config["zero_optimization"][key] = {"device": device, "nvme_path": tempfile.gettempdir()}
    for key, value in more.items():
        config[key] = {**config[key], **value} if isinstance(config.get(key), dict) else value
    return config


def engine_of(config: dict[str, Any], kind: type[nn.Module] = Net, seed: int = 0) -> Any:
    """An engine over a fresh model: two optimizer groups, one without decay."""
    torch.manual_seed(seed)
    model = kind()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    return zrun_runtime.initialize(model=model, model_parameters=groups, config=config)[0]


def batch_of(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    tokens = torch.randint(TOKENS, (4, 5), generator=generator)
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def loss_of(engine: Any, step: int, micro: int, rank: int) -> Tensor:
    tokens, wanted = batch_of(step, micro, rank)
    return F.cross_entropy(engine(tokens).flatten(0, 1).float(), wanted.flatten())


def train(engine: Any, first: int, last: int, same: bool = False) -> list[float]:
    """Steps first..last-1; the losses of this rank. same: all ranks see the same batches."""
    losses = []
    for step in range(first, last):
        for micro in range(engine.gradient_accumulation_steps()):
            loss = loss_of(engine, step, micro, 0 if same else engine.global_rank)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def mark_of(engine: Any) -> dict[str, Any]:
    """What must be equal to the bit if two engines are: weights, master weights, moments, buffers, counters, rates."""
    names = {n: p for n, p in engine.module.named_parameters() if p.requires_grad}
    masters = {n: zrun_runtime.safe_get_full_fp32_param(p).clone() for n, p in names.items()}
    moments = {
        f"{n}/{key}": value.clone()
        for n, p in names.items()
        for key in ("exp_avg", "exp_avg_sq")
        if (value := zrun_runtime.safe_get_full_optimizer_state(p, key)) is not None
    }
    return {
        "weights": digest(gathered(engine.module)),
        "masters": digest(masters),
        "moments": digest(moments),
        "buffers": digest({n: b.detach().clone() for n, b in engine.module.named_buffers()}),
        "counters": (engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.global_samples),
        "rates": engine.get_lr(),
        "scale": engine.loss_scale(),
    }


# ---- cases


def straight(rank: int, world: int, *, directory: str, stage: int, dtype: str, accumulation: int, **keys: Any) -> Any:
    """Six steps, saved after three."""
    engine = engine_of(config_of(stage, dtype, accumulation, **keys))
    random.seed(rank)
    train(engine, 0, 3)
    state = {"epoch": 7, "who": rank, "list": [1, (2.5, None)], "tensor": torch.arange(4) + rank}
    saved = engine.save_checkpoint(directory, client_state=state)
    after = mark_of(engine)
    chance = random.random(), float(np.random.rand()), float(torch.rand(()))
    losses, end = train(engine, 3, 6), mark_of(engine)
    engine.destroy()  # a checkpoint that is written in the background is there after it
    return {"saved": saved, "after": after, "chance": chance, "losses": losses, "end": end}


def resumed(rank: int, world: int, *, directory: str, stage: int, dtype: str, accumulation: int, **keys: Any) -> Any:
    """The last three of them, by an engine that begins with other weights and loads."""
    keys.pop("seed", None)
    engine = engine_of(config_of(stage, dtype, accumulation, **keys), seed=5)
    path, state = engine.load_checkpoint(directory)
    after = mark_of(engine)
    chance = random.random(), float(np.random.rand()), float(torch.rand(()))
    return {
        "path": path,
        "state": state,
        "after": after,
        "chance": chance,
        "losses": train(engine, 3, 6),
        "end": mark_of(engine),
    }


def saved_for_others(rank: int, world: int, *, directory: str, stage: int, dtype: str, tier: str) -> Any:
    """Two steps on the same batches everywhere, a save, two more."""
    engine = engine_of(config_of(stage, dtype, tier=tier), SmallNet)
    train(engine, 0, 2, same=True)
    engine.save_checkpoint(directory)
    mark = mark_of(engine)
    return {"mark": {k: mark[k] for k in ("masters", "moments", "rates")}, "losses": train(engine, 2, 4, same=True)}


def loaded_by_others(rank: int, world: int, *, directory: str, stage: int, dtype: str, tier: str, stepped: bool) -> Any:
    """The two more, by other ranks at another stage. stepped: the engine has trained before."""
    engine = engine_of(config_of(stage, dtype, tier=tier), SmallNet, seed=3)
    if stepped:
        train(engine, 7, 8)
    engine.load_checkpoint(directory)
    mark = mark_of(engine)
    return {"mark": {k: mark[k] for k in ("masters", "moments", "rates")}, "losses": train(engine, 2, 4, same=True)}
