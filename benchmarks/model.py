"""The models that the benchmarks train, and their data. Shapes: B batch, T time, C width, H heads, V vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Size:
    """Sizes of a GPT and of one rank's micro-batch."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    context: int
    batch: int


SIZES = {
    "tiny": Size(width=64, layers=2, heads=2, vocabulary=256, context=32, batch=2),
    "small": Size(width=256, layers=6, heads=4, vocabulary=1024, context=32, batch=1),
    "33m": Size(width=512, layers=8, heads=8, vocabulary=8192, context=64, batch=2),
    "110m": Size(width=768, layers=12, heads=12, vocabulary=16384, context=64, batch=1),
    "370m": Size(width=1024, layers=24, heads=16, vocabulary=32768, context=1024, batch=8),
    "1.3b": Size(width=2048, layers=24, heads=16, vocabulary=32768, context=1024, batch=4),
}


class Block(nn.Module):
    """Pre-norm attention and feed-forward. No bias on the keys: its gradient is rounding noise, which Adam enlarges."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.project = nn.Linear(size.width, size.width)
        self.expand = nn.Linear(size.width, 4 * size.width)
        self.contract = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, C)
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, C / H)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.contract(functional.gelu(self.expand(self.norm2(x))))


class GPT(nn.Module):
    """Token ids in, logits of the next token out. Embedding and head are not tied."""

    def __init__(self, size: Size, checkpointing: bool = False) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:  # (B, T) int64 -> (B, T, V)
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(self.norm(x))


class ManySmall(nn.Module):
    """1,000 parameters of at most 16 elements, in 50 blocks of ten layers: what costs time is not the arithmetic."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(10))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return functional.normalize(x, dim=-1)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(50))

    def forward(self, x: Tensor) -> Tensor:  # (B, 4) -> (B, 4)
        for block in self.blocks:
            x = block(x)
        return x


def token_batches(size: Size, rank: int, device: torch.device | str = "cpu") -> Iterator[tuple[Tensor, Tensor]]:
    """Random token ids and the ids that follow them, each (B, T) int64, for ever; other ones on every rank."""
    generator = torch.Generator().manual_seed(1000 + rank)
    while True:
        ids = torch.randint(size.vocabulary, (size.batch, size.context + 1), generator=generator).to(device)
        yield ids[:, :-1], ids[:, 1:]


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in fp32."""
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def count(model: nn.Module) -> int:
    """How many numbers a model's parameters hold."""
    return sum(p.numel() for p in model.parameters())
