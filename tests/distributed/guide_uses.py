"""What the ranks run for test_guide.py: a practitioner's configs and plain loop."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import zrun_runtime
from zrun_runtime.config import short_report

from .scenario import WIDTH, Block
from .training import digest, gathered

VOCABULARY = 19


class Speaker(nn.Module):
    """Predicts the next of a few words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plain_loop(rank: int, world: int, *, path: str, changes: dict[str, Any], steps: int) -> dict[str, Any]:
    """The loop of the guide, with the config's file as it is, or with some keys changed."""
    torch.manual_seed(rank)
    model = Speaker()
    with open(path) as file:
        written = json.load(file)
    config: Any = {**written, **changes} if changes else path
    args = SimpleNamespace(deepspeed_config=config, local_rank=rank)
    client = None if "optimizer" in written else torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine, _, _, _ = zrun_runtime.initialize(
        args=args, model=model, model_parameters=model.parameters(), optimizer=client
    )
    criterion, losses = nn.CrossEntropyLoss(), []
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(VOCABULARY, (engine.train_micro_batch_size_per_gpu(), 7), generator=generator)
    for _ in range(steps * engine.gradient_accumulation_steps()):
        tokens = tokens.to(engine.device)
        output = engine(tokens[:, :-1])
        loss = criterion(output.flatten(0, 1).float(), tokens[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        losses.append(engine.mean_loss())
    losses = [loss for loss in losses if loss == loss]  # NaN until the first boundary
    return {
        "losses": losses,
        "skipped": engine.skipped_steps,
        "batch": engine.get_batch_info(),
        "clip": engine.gradient_clipping(),
        "dtype": next(engine.module.parameters()).dtype,
        "digest": digest(gathered(engine.module)),
        "report": short_report(engine.settings),
        "tiers": {
            "offload_optimizer": engine.zero.settings.plan.optimizer.tier.value,
            "offload_param": engine.zero.settings.plan.params.tier.value,
        },
    }
