"""The built-in smoke job: `zrun` without a script runs this on every rank.

A tiny GPT learns to continue arithmetic sequences, once under each ZeRO stage, from the same start. The job proves that
the backend moves data, that the loss falls, that all ranks end with the same weights, and that every stage gives the
same result. Exit status 1, with a sentence, if any of that is not so.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

import zrun_runtime
from zrun_runtime.plan import ALL_STAGES

VOCABULARY, CONTEXT, WIDTH, STEPS, BATCH = 64, 32, 64, 15, 16


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # x: (batch, context, width)
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.feed(self.norm2(x))


class TinyGPT(nn.Module):
    """Two blocks, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.05)

    def forward(self, ids: Tensor) -> Tensor:  # (batch, context) int64 -> (batch, context, vocabulary)
        context = ids.shape[1]
        x = self.tokens(ids) + self.places(torch.arange(context, device=ids.device))
        mask = torch.full((context, context), float("-inf"), device=ids.device).triu(1)
        for block in self.blocks:
            x = block(x, mask)
        return functional.linear(self.norm(x), self.tokens.weight)


def sequences(step: int, rank: int, device: torch.device) -> Tensor:
    """(batch, context + 1) int64: arithmetic sequences modulo the vocabulary, other ones for each step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    stride = torch.randint(1, 5, (BATCH, 1), generator=generator)
    return ((start + stride * torch.arange(CONTEXT + 1)) % VOCABULARY).to(device)


def train(stage: int) -> tuple[float, float, list[float]]:
    """(first loss, last loss, the sum of the weights on every rank) of one stage."""
    torch.manual_seed(0)
    engine, _, _, _ = zrun_runtime.initialize(
        model=TinyGPT(),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "steps_per_print": STEPS,
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
            "zero_optimization": {"stage": stage},
        },
    )
    engine.expect_steps(STEPS)
    losses = []
    for step in range(STEPS):
        ids = sequences(step, engine.world.rank, engine.device)
        logits = engine(ids[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        losses.append(engine.mean_loss())
    with zrun_runtime.zero.GatheredParameters(list(engine.module.parameters())):
        weights = float(sum(p.detach().double().sum() for p in engine.module.parameters()))
    sums = engine.collectives.exchange(engine.zero.groups[0].ticket, (weights,)).wait()[:, 0].tolist()
    engine.destroy()
    return losses[0], losses[-1], sums


def main() -> int:
    """Run every stage; 0 if all is well."""
    zrun_runtime.init_distributed()
    problems, ends = [], []
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    agreement = "one rank" if size == 1 else f"{size} ranks agree"
    for stage in ALL_STAGES:
        first, last, sums = train(stage)
        ends.append(last)
        if not last < 0.9 * first:
            problems.append(f"ZeRO {stage}: the loss did not fall ({first:.4f} -> {last:.4f})")
        if len(set(sums)) != 1:
            problems.append(f"ZeRO {stage}: ranks ended with different weights (their sums: {sums})")
        if rank == 0:
            print(f"ZeRO {stage}: loss {first:.4f} -> {last:.4f}, {agreement}", flush=True)
    if max(ends) - min(ends) > 1e-3:
        problems.append(f"the stages ended with different losses: {ends}")
    for problem in problems if rank == 0 else ():
        print(f"smoke job: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
