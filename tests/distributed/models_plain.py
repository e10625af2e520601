"""Scenarios: containers, kinds of outputs, optimizer groups, buffers, and odd tensors."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .scenario import CLASSES, WIDTH, Block, Run, Scenario, Spot, Stack


class InSequential(Scenario):
    name = "sequential"

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), Block(24, 32), Block(24, 32), nn.Linear(24, CLASSES))


class InModuleList(Scenario):
    name = "module_list"

    def build(self) -> nn.Module:
        return Stack()


class InModuleDict(Scenario):
    name = "module_dict"

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"in": Block(), "mid": Block(), "out": nn.Linear(WIDTH, CLASSES)})

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts.values():
                x = part(x)
            return x

    def build(self) -> nn.Module:
        return self.Net()


class NoContainer(Scenario):
    """Blocks as attributes, and parameters that belong to the root itself, alone and in a ParameterList."""

    name = "no_container"

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
            self.first, self.second = Block(), Block()
            self.shifts = nn.ParameterList([torch.randn(WIDTH) * 0.1, torch.randn(WIDTH) * 0.1])
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x * self.scale) + self.shifts[0]
            return self.head(self.second(x) + self.shifts[1])

    def build(self) -> nn.Module:
        return self.Net()


class Stages(Scenario):
    """Swin-like: stages of blocks, each with a downsampling of its own, widths growing."""

    name = "stages"

    class Stage(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(width, 2 * width) for _ in range(depth))
            self.shrink = nn.Sequential(nn.LayerNorm(2 * width), nn.Linear(2 * width, 2 * width, bias=False))

        def forward(self, x: Tensor) -> Tensor:  # (batch, length, width) -> (batch, length / 2, 2 * width)
            for block in self.blocks:
                x = block(x)
            return self.shrink(x.unflatten(1, (-1, 2)).flatten(2))

    def build(self) -> nn.Module:
        stages = nn.Sequential(self.Stage(4, 1), self.Stage(8, 2))
        return nn.Sequential(
            OrderedDict(cut=nn.Unflatten(1, (4, 4)), stages=stages, flat=nn.Flatten(), head=nn.Linear(16, CLASSES))
        )


class Groups(Scenario):
    """Three optimizer groups that cut across every block; one without decay, one with a learning rate of its own."""

    name = "groups"

    def build(self) -> nn.Module:
        return Stack()

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        named = list(model.named_parameters())
        plain = [p for name, p in named if p.ndim < 2]
        slow = [p for name, p in named if p.ndim >= 2 and ("stem" in name or "up" in name)]
        rest = [p for name, p in named if p.ndim >= 2 and not ("stem" in name or "up" in name)]
        return [{"params": plain, "weight_decay": 0.0}, {"params": slow, "lr": 1e-3}, {"params": rest}]


class _ManyOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Block(), Block())
        self.left, self.right = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.body(x)
        return self.left(hidden), self.right(hidden), hidden


class TupleOutput(Scenario):
    """A nested tuple with a None and a number in it; on odd steps only one of the outputs is used."""

    name = "tuple_output"

    class Net(_ManyOutputs):
        def forward(self, x: Tensor) -> Any:
            left, right, hidden = self.outputs(x)
            return left, (right, None, 3), [hidden]

    def build(self) -> nn.Module:
        return self.Net()

    def loss(self, run: Run, batch: Any) -> Tensor:
        left, (right, _, _), (hidden,) = run.forward(batch[0])
        loss = F.cross_entropy(left, batch[1])
        return loss if run.spot.step % 2 else loss + F.cross_entropy(right, batch[1]) + hidden.square().mean()


class DictOutput(Scenario):
    """Inputs by keyword, a dict with the loss computed inside the model."""

    name = "dict_output"

    class Net(_ManyOutputs):
        def forward(self, features: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
            left, right, hidden = self.outputs(features)
            loss = None if labels is None else F.cross_entropy(left + right, labels)
            return {"loss": loss, "logits": {"left": left, "right": right}, "hidden": hidden}

    def build(self) -> nn.Module:
        return self.Net()

    def loss(self, run: Run, batch: Any) -> Tensor:
        return run.forward(features=batch[0], labels=batch[1])["loss"]


class DataclassOutput(Scenario):
    name = "dataclass_output"

    @dataclass
    class Output:
        left: Tensor
        rest: tuple[Tensor, Tensor]

    class Net(_ManyOutputs):
        def forward(self, x: Tensor) -> DataclassOutput.Output:
            left, right, hidden = self.outputs(x)
            return DataclassOutput.Output(left, (right, hidden))

    def build(self) -> nn.Module:
        return self.Net()

    def loss(self, run: Run, batch: Any) -> Tensor:
        output = run.forward(batch[0])
        assert isinstance(output, DataclassOutput.Output)
        return F.cross_entropy(output.left * output.rest[0], batch[1]) + output.rest[1].square().mean()


class ModelOutput(Scenario):
    """The kind of Hugging Face: an OrderedDict that is a dataclass too, inside the model and at its end."""

    name = "model_output"

    @dataclass
    class Output(OrderedDict):
        loss: Tensor | None = None
        logits: Tensor | None = None

        def __post_init__(self) -> None:
            self.update(loss=self.loss, logits=self.logits)

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> ModelOutput.Output:
            return ModelOutput.Output(logits=self.block(x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(ModelOutput.Wrapped() for _ in range(2))
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor, labels: Tensor) -> ModelOutput.Output:
            for layer in self.layers:
                x = layer(x)["logits"]
            logits = self.head(x)
            return ModelOutput.Output(F.cross_entropy(logits, labels), logits)

    def build(self) -> nn.Module:
        return self.Net()

    def loss(self, run: Run, batch: Any) -> Tensor:
        output = run.forward(batch[0], labels=batch[1])
        assert output.loss is not None and output["logits"] is output.logits
        return output.loss


class BatchNorm(Scenario):
    """Batch statistics differ from rank to rank, and so do the running ones; a buffer drawn at random is rank 0's."""

    name = "batch_norm"
    hyper = {"adamw": {"eps": 1e-3}}  # a bias before a batch norm has a gradient of pure rounding

    class Mix(nn.Module):
        mix: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mix", torch.randn(WIDTH, WIDTH) / 4)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.mix

    def build(self) -> nn.Module:
        return nn.Sequential(
            *(self.Mix(), nn.Linear(WIDTH, 24), nn.BatchNorm1d(24), nn.ReLU()),
            *(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.Linear(24, CLASSES)),
        )

    def batch(self, spot: Spot) -> Any:
        generator = spot.generator()
        features = torch.randn(8, WIDTH, generator=generator) * (1 + spot.rank) + spot.rank
        return features, torch.randint(CLASSES, (8,), generator=generator)


class ChannelsLast(Scenario):
    """Convolutions in channels_last with batch norms between, and a buffer the model writes itself."""

    name = "channels_last"
    hyper = {"adamw": {"eps": 1e-3}}

    class Net(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 6, 3, padding=1)
            self.norm = nn.BatchNorm2d(6)
            self.second = nn.Conv2d(6, 8, 3, stride=2, padding=1)
            self.head = nn.Linear(8, CLASSES)
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.seen += x.shape[0]
            x = F.relu(self.second(F.relu(self.norm(self.first(x)))))
            return self.head(x.mean((2, 3)))

    def build(self) -> nn.Module:
        return self.Net().to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def batch(self, spot: Spot) -> Any:
        generator = spot.generator()
        images = torch.randn(4, 3, 6, 6, generator=generator).to(memory_format=torch.channels_last)
        return images, torch.randint(CLASSES, (4,), generator=generator)


class OddShapes(Scenario):
    """Parameters smaller than the world, of odd size, of size zero, without dimensions, and transposed views."""

    name = "odd_shapes"

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(OddShapes.Part() for _ in range(2))
            self.temperature = nn.Parameter(torch.tensor(1.3))
            self.turned = nn.Parameter(torch.randn(WIDTH, CLASSES).t() * 0.3)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return F.linear(x, self.turned) * self.temperature

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(0.7))
            self.one, self.three = nn.Parameter(torch.rand(1) + 1), nn.Parameter(torch.rand(3))
            self.empty = nn.Parameter(torch.empty(0, 4))
            self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH, bias=False)
            self.mix = nn.Parameter(torch.randn(7, 7).t())

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.up(x) @ self.mix) * self.three.sum() + self.empty.sum()
            return x * self.one + self.gain * self.down(hidden)

    def build(self) -> nn.Module:
        return self.Net()


class MixedTypes(Scenario):
    """Linear layers in bf16, norms and head in fp32, in the same block."""

    name = "mixed_types"
    tolerance = 4e-3  # half a unit of bf16 is 2e-3

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 24).bfloat16(), nn.Linear(24, WIDTH).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.gelu(self.up(self.norm(x).bfloat16()))).float()

    def build(self) -> nn.Module:
        return Stack(self.Part)
