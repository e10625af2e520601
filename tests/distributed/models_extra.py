"""Scenarios: shapes of networks that are common outside textbooks, and what they do to hooks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from .models_flow import Lora
from .scenario import CLASSES, WIDTH, Block, Run, Scenario, Stack, evaluating


class SameBlock(Scenario):
    """ALBERT-like: one block object at every place of the list."""

    name = "same_block"

    def build(self) -> nn.Module:
        model = Stack()
        model.blocks = nn.ModuleList([model.blocks[0]] * 3)
        return model


class SingleLayer(Scenario):
    """The model is one layer and has no children."""

    name = "single_layer"

    def build(self) -> nn.Module:
        return nn.Linear(WIDTH, CLASSES)


class LongSkips(Scenario):
    """U-net-like: what early blocks return is used by late ones, and by the loss."""

    name = "long_skips"

    class Join(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x: Tensor, *, skip: Tensor) -> Tensor:
            return torch.tanh(self.mix(torch.cat([x, skip], -1)))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.ModuleList(Block() for _ in range(2))
            self.up = nn.ModuleList(LongSkips.Join() for _ in range(2))
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            kept = []
            for block in self.down:
                x = block(x)
                kept.append(x)
            first = x
            for block in self.up:
                x = block(x, skip=kept.pop())
            return self.head(x), first

    def build(self) -> nn.Module:
        return self.Net()

    def loss(self, run: Run, batch: Any) -> Tensor:
        logits, first = run.forward(batch[0])
        return F.cross_entropy(logits, batch[1]) + 0.1 * first.square().mean()


class NestedInputs(Scenario):
    """Blocks pass a dict with a list in it, and an extra loss that grows on the way."""

    name = "nested_inputs"

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.gate = Block(), nn.Linear(WIDTH, 1)

        def forward(self, state: dict[str, Any]) -> dict[str, Any]:
            (x,) = state["xs"]
            gate = torch.sigmoid(self.gate(x))
            return {"xs": [x + gate * self.block(x)], "extra": state["extra"] + gate.mean()}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(NestedInputs.Part() for _ in range(3))
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
            state = {"xs": [inputs["features"]], "extra": torch.zeros(())}
            for part in self.parts:
                state = part(state)
            return self.head(state["xs"][0]), state["extra"]

    def build(self) -> nn.Module:
        return self.Net()

    def loss(self, run: Run, batch: Any) -> Tensor:
        logits, extra = run.forward({"features": batch[0]})
        return F.cross_entropy(logits, batch[1]) + 0.1 * extra


class _OwnLinear(torch.autograd.Function):
    """A linear layer as fused kernels write it: saves its weight by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x


class CustomFunction(Scenario):
    name = "custom_function"

    class Part(Block):
        def forward(self, x: Tensor) -> Tensor:
            hidden = F.gelu(_OwnLinear.apply(self.norm(x), self.up.weight) + self.up.bias)
            return x + _OwnLinear.apply(hidden, self.down.weight)

    def build(self) -> nn.Module:
        model = Stack(self.Part)
        for block in model.blocks:
            block.down.bias = None
        return model


class LoraCheckpoint(Scenario):
    """Adapters on a frozen base, reentrant checkpoints, and an input that is told to need a gradient."""

    name = "lora_checkpoint"

    class Net(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x).requires_grad_()
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return self.head(x)

    def build(self) -> nn.Module:
        model = self.Net().requires_grad_(False)
        for block in model.blocks:
            block.up = Lora.Adapted(block.up)
        return model


class WeightNorm(Scenario):
    """Weights that are computed from parameters whenever they are read: in a block and in the root."""

    name = "weight_norm"

    def build(self) -> nn.Module:
        model = Stack()
        for layer in (model.stem, model.blocks[1].up):
            parametrizations.weight_norm(layer)
        return model


class Autocast(Scenario):
    """fp32 weights, bf16 arithmetic: a weight whose last bit differs may round the other way."""

    name = "autocast"
    tolerance = 1e-3

    def build(self) -> nn.Module:
        return Stack()

    def loss(self, run: Run, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = run.forward(batch[0])
        return F.cross_entropy(logits.float(), batch[1])


class InferenceMode(Scenario):
    """Evaluation between steps in inference mode, through the engine, the inner module and one block."""

    name = "inference_mode"

    def build(self) -> nn.Module:
        return Stack()

    def after_step(self, run: Run) -> float:
        features, classes = self.batch(run.spot)
        with evaluating(run.module), torch.inference_mode():
            loss = F.cross_entropy(run.forward(features), classes)
            raw = F.cross_entropy(run.module(features), classes)
            return (loss + raw + run.module.blocks[1](features).square().mean()).item()


class GradientPenalty(Scenario):
    """The loss holds a gradient with respect to the input, so the backward goes through a backward."""

    name = "gradient_penalty"
    stages = (0, 1, 2)  # where weights come and go the second backward is an error, not a wrong number

    def build(self) -> nn.Module:
        return Stack()

    def loss(self, run: Run, batch: Any) -> Tensor:
        features = batch[0].requires_grad_()
        logits = run.forward(features)
        (slope,) = torch.autograd.grad(logits.sum(), features, create_graph=True)
        return F.cross_entropy(logits, batch[1]) + 0.1 * slope.square().mean()


class SideGradient(Scenario):
    """A gradient with respect to the input alone, before the backward that counts."""

    name = "side_gradient"

    def build(self) -> nn.Module:
        return Stack()

    def micro(self, run: Run) -> None:
        features, classes = self.batch(run.spot)
        probe = features.clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(run.forward(probe), classes), probe)
        run.backward(F.cross_entropy(run.forward(features + 0.1 * slope.sign()), classes))
