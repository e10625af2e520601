"""A few steps at stage 3, the losses of all ranks printed with every digit."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from gpt import GPT, GPTConfig
from torch.nn import functional

import zrun_runtime

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3},
    "steps_per_print": 1000,
}


def main() -> None:
    torch.manual_seed(7)
    torch.set_num_threads(1)
    engine, *_ = zrun_runtime.initialize(model=GPT(GPTConfig(context=32, layers=2, width=64)), config=CONFIG)
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(rank)
    for step in range(5):
        data = torch.randint(256, (2, 33), generator=generator)
        loss = functional.cross_entropy(engine(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        print(f"loss {rank} {step} {loss.item()!r}", flush=True)


main()
