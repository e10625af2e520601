"""Scenarios: modules that read their children's weights without calling them, recurrent nets, GPTs and tied weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .scenario import CLASSES, WIDTH, Block, Run, Scenario, Spot, Stack, TokenScenario, evaluating

# The key bias of attention has a gradient of pure rounding, which Adam would turn into steps of full size.
ATTENTION: dict[str, dict[str, Any]] = {"adamw": {"eps": 1e-3}}


class _Sequences(Scenario):
    """Batches of (3, 5, WIDTH) features and (3,) classes."""

    hyper = ATTENTION

    def batch(self, spot: Spot) -> Any:
        generator = spot.generator()
        return torch.randn(3, 5, WIDTH, generator=generator), torch.randint(CLASSES, (3,), generator=generator)

    def loss(self, run: Run, batch: Any) -> Tensor:
        return F.cross_entropy(run.forward(batch[0]).mean(1), batch[1])

    def after_step(self, run: Run) -> float | None:
        """Evaluation takes fused paths that read weights no module call announces."""
        features, classes = self.batch(run.spot)
        with evaluating(run.module):
            return F.cross_entropy(run.forward(features).mean(1), classes).item()


class AttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


class AttentionInBlock(_Sequences):
    name = "attention_in_block"

    def build(self) -> nn.Module:
        return Stack(AttentionBlock, depth=2)


class AttentionInRoot(_Sequences):
    """MultiheadAttention as an attribute of the root, outside any container."""

    name = "attention_in_root"

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, kdim=WIDTH, vdim=WIDTH)
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.attention(x, x, x)[0])

    def build(self) -> nn.Module:
        return self.Net()


class Encoder(_Sequences):
    name = "transformer_encoder"

    def build(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout=0.0, batch_first=True)
        return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(WIDTH, CLASSES))


class Lstm(_Sequences):
    """Two recurrent layers in the root, one in a block."""

    name = "lstm"

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.cell(x)[0]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(WIDTH, WIDTH // 2, num_layers=2, batch_first=True, bidirectional=True)
            self.blocks = nn.ModuleList([Lstm.Inner(), Lstm.Inner()])
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x, _ = self.rnn(x)
            for block in self.blocks:
                x = x + block(x)
            return self.head(x)

    def build(self) -> nn.Module:
        return self.Net()


class ChildWeights(Scenario):
    """A block that uses its child's weight and never calls the child."""

    name = "child_weights"

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(F.linear(x, self.inner[0].weight, self.inner[0].bias))

    def build(self) -> nn.Module:
        return Stack(self.Part)


class GptBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, WIDTH)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Token and position embeddings, two blocks, a head of its own."""

    def __init__(self, vocabulary: int = 31) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList(GptBlock() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.3)

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(tokens))


class PlainGpt(TokenScenario):
    name = "gpt"
    hyper = ATTENTION

    def build(self) -> nn.Module:
        return Gpt()


class TiedGpt(TokenScenario):
    """The head's weight is the embedding's."""

    name = "gpt_tied_head"
    hyper = ATTENTION

    def build(self) -> nn.Module:
        model = Gpt()
        model.head.weight = model.tokens.weight
        return model


class LinearTiedGpt(TokenScenario):
    """No head at all: the root's forward multiplies by the embedding's weight."""

    name = "gpt_tied_linear"
    hyper = ATTENTION

    class Net(Gpt):
        def __init__(self) -> None:
            super().__init__()
            del self.head

        def forward(self, tokens: Tensor) -> Tensor:
            return F.linear(self.hidden(tokens), self.tokens.weight)

    def build(self) -> nn.Module:
        return self.Net()


class TiedBlocks(Scenario):
    """Two blocks share one linear layer; two others share one parameter under different names."""

    name = "tied_blocks"

    def build(self) -> nn.Module:
        model = Stack(depth=4)
        first, second, third, fourth = model.blocks
        second.up = first.up
        fourth.down.weight = third.down.weight
        return model


class TiedInBlock(Scenario):
    """One weight used by two layers of the same block, once transposed."""

    name = "tied_in_block"

    class Part(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + F.linear(F.gelu(self.up(self.norm(x))), self.up.weight.t()) + self.down(F.gelu(self.up(x)))

    def build(self) -> nn.Module:
        return Stack(self.Part)
