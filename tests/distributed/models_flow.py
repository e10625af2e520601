"""Scenarios: what runs, when, how often, and what goes wrong in between."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .scenario import CLASSES, WIDTH, Block, Run, Scenario, Stack, evaluating


class UsedTwice(Scenario):
    """The same block two times in a forward, with another between, and once before under no_grad."""

    name = "used_twice"

    class Net(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            with torch.no_grad():
                target = self.blocks[0](x)
            x = self.blocks[0](self.blocks[1](self.blocks[0](x)))
            return self.head(self.blocks[2](x) - target)

    def build(self) -> nn.Module:
        return self.Net()


class Outside(Scenario):
    """Modules called outside the root's forward: an encoder before it, a head with the loss after it."""

    name = "outside_root"

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor, classes: Tensor) -> Tensor:
            return F.cross_entropy(self.project(x), classes)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(Block(), Block())
            self.blocks = nn.ModuleList([Block(), Block()])
            self.criterion = Outside.Loss()

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    def build(self) -> nn.Module:
        return self.Net()

    def loss(self, run: Run, batch: Any) -> Tensor:
        hidden = run.module.encoder(batch[0])
        if run.spot.step % 2:  # a block alone, and twice in this pass
            hidden = run.module.blocks[1](hidden)
        return run.module.criterion(run.forward(hidden), batch[1])


class UnusedOnAll(Scenario):
    """A block that is used on every other step, a layer that never is, and one whose result is thrown away."""

    name = "unused_on_all_ranks"

    class Net(Stack):
        def __init__(self) -> None:
            super().__init__(depth=4)
            self.never = nn.Linear(3, 3)

        def forward(self, x: Tensor, middle: bool) -> Tensor:
            x = self.blocks[0](self.stem(x))
            if middle:
                x = self.blocks[1](x)
            self.blocks[2](x)
            return self.head(self.blocks[3](x))

    def build(self) -> nn.Module:
        return self.Net()

    def loss(self, run: Run, batch: Any) -> Tensor:
        return F.cross_entropy(run.forward(batch[0], run.spot.step % 2 == 0), batch[1])


class UnusedOnSome(Scenario):
    """A parameter and a layer of a block, and a layer of the root, which only some ranks use in a step."""

    name = "unused_on_some_ranks"

    class Part(Block):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.randn(WIDTH) * 0.1)
            self.extra = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, use: bool) -> Tensor:
            x = super().forward(x)
            return x + self.extra(x) + self.shift if use else x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(UnusedOnSome.Part() for _ in range(5))
            self.bonus, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor, use: bool) -> Tensor:
            for index, block in enumerate(self.blocks):
                x = block(x, use if index % 2 else not use)
            return self.head(x + self.bonus(x) if use else x)

    def build(self) -> nn.Module:
        return self.Net()

    def loss(self, run: Run, batch: Any) -> Tensor:
        use = (run.spot.step + run.spot.rank) % 2 == 0
        return F.cross_entropy(run.forward(batch[0], use), batch[1])


class FrozenFirst(Scenario):
    """Stem and first block frozen: their outputs need no gradient."""

    name = "frozen_first"

    def build(self) -> nn.Module:
        model = Stack(depth=4)
        model.stem.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        return model


class FrozenMiddle(Scenario):
    """A whole block and some parameters of others frozen: gradients pass through."""

    name = "frozen_middle"

    def build(self) -> nn.Module:
        model = Stack(depth=4)
        model.blocks[1].requires_grad_(False)
        model.blocks[2].up.requires_grad_(False)
        model.blocks[3].norm.bias.requires_grad_(False)
        return model


class Lora(Scenario):
    """The whole base frozen, small adapters trained."""

    name = "lora"

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down = nn.Linear(base.in_features, 2, bias=False)
            self.up = nn.Linear(2, base.out_features, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    def build(self) -> nn.Module:
        model = Stack().requires_grad_(False)
        for block in model.blocks:
            block.up, block.down = Lora.Adapted(block.up), Lora.Adapted(block.down)
        return model


class _Checkpointed(Stack):
    def __init__(self, reentrant: bool, block: type[nn.Module] = Block) -> None:
        super().__init__(block)
        self.reentrant = reentrant

    def again(self, function: Any, x: Tensor) -> Tensor:
        return checkpoint(function, x, use_reentrant=self.reentrant)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.again(block, x)
        return self.head(x)


class DropoutBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.2, self.training))


class CheckpointReentrant(Scenario):
    """Dropout inside, so the recomputation has to repeat the random numbers too."""

    name = "checkpoint_reentrant"

    def build(self) -> nn.Module:
        return _Checkpointed(True, DropoutBlock)


class CheckpointPlain(Scenario):
    name = "checkpoint_non_reentrant"

    def build(self) -> nn.Module:
        return _Checkpointed(False, DropoutBlock)


class CheckpointNested(Scenario):
    """Blocks checkpointed alone and again in pairs, both kinds; one of them used twice."""

    name = "checkpoint_nested"

    class Net(_Checkpointed):
        def __init__(self) -> None:
            super().__init__(True)

        def pair(self, x: Tensor) -> Tensor:
            return checkpoint(self.blocks[0], self.again(self.blocks[1], x), use_reentrant=False)

        def forward(self, x: Tensor) -> Tensor:
            x = self.again(self.pair, self.stem(x))
            x = checkpoint(self.pair, x, use_reentrant=False)
            return self.head(self.blocks[2](x))

    def build(self) -> nn.Module:
        return self.Net()


class CheckpointTwice(Scenario):
    """A reentrant block used twice: its gradients are complete, reduced, and then become dirty again."""

    name = "checkpoint_twice"

    class Net(_Checkpointed):
        def __init__(self) -> None:
            super().__init__(True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.again(self.blocks[0], self.stem(x))
            x = self.again(self.blocks[1], x)
            return self.head(self.again(self.blocks[2], self.again(self.blocks[0], x)))

    def build(self) -> nn.Module:
        return self.Net()


class Evaluation(Scenario):
    """Between steps: the engine, the bare inner module and a single block, without gradients."""

    name = "evaluation"

    def build(self) -> nn.Module:
        return Stack()

    def after_step(self, run: Run) -> float:
        features, classes = self.batch(run.spot)
        with evaluating(run.module):
            loss = F.cross_entropy(run.forward(features), classes)
            raw = F.cross_entropy(run.module(features), classes)
            return (loss + raw + run.module.blocks[1](features).square().mean()).item()


class EvaluationInside(Scenario):
    """An evaluation between forward and backward, and training-mode forwards whose result is never used."""

    name = "evaluation_inside"

    def build(self) -> nn.Module:
        return Stack()

    def micro(self, run: Run) -> None:
        features, classes = self.batch(run.spot)
        run.forward(features)
        loss = F.cross_entropy(run.forward(features), classes)
        with torch.no_grad():
            run.forward(features)
            run.module(features)
        run.backward(loss)


class TwoBackwards(Scenario):
    """Two backwards before one step: after each forward, after both forwards, and two of the same graph."""

    name = "two_backwards"

    def build(self) -> nn.Module:
        return Stack()

    def micro(self, run: Run) -> None:
        features, classes = self.batch(run.spot)
        kind = run.spot.step % 3
        first = run.forward(features)
        if kind == 0:
            run.backward(F.cross_entropy(first, classes))
        if kind == 2:
            run.backward(F.cross_entropy(first, classes), retain_graph=True)
            run.backward(first.square().mean())
            return
        second = run.forward(features + 1)
        if kind == 1:
            run.backward(F.cross_entropy(first, classes))
        run.backward(F.cross_entropy(second, classes))


class Boom(Exception):
    """What the scenarios below raise on purpose."""


class _Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise Boom


class Fragile(Stack):
    """Raises inside its second block, in forward or in backward, when told to."""

    class Part(Block):
        def forward(self, x: Tensor, fail: str = "") -> Tensor:
            if fail == "forward":
                raise Boom
            return super().forward(_Raising.apply(x) if fail == "backward" else x)

    def __init__(self) -> None:
        super().__init__(self.Part)

    def forward(self, x: Tensor, fail: str = "") -> Tensor:
        x = self.blocks[1](self.blocks[0](self.stem(x)), fail)
        return self.head(self.blocks[2](x))


class ForwardRaises(Scenario):
    name = "forward_raises"

    def build(self) -> nn.Module:
        return Fragile()

    def micro(self, run: Run) -> None:
        features, classes = self.batch(run.spot)
        if run.spot.step % 3 == 0:
            try:
                run.forward(features, "forward")
            except Boom:
                pass
        run.backward(F.cross_entropy(run.forward(features), classes))


class BackwardRaises(ForwardRaises):
    """What the failed backward left in the gradients is cleared with zero_grad, as in any training loop."""

    name = "backward_raises"

    def micro(self, run: Run) -> None:
        features, classes = self.batch(run.spot)
        if run.spot.step % 3 == 0 and run.spot.micro == 0:
            try:
                run.backward(F.cross_entropy(run.forward(features, "backward"), classes))
            except Boom:
                run.zero_grad()
        run.backward(F.cross_entropy(run.forward(features), classes))


class InPlace(Scenario):
    """Operations in place on what blocks return and on what they are given."""

    name = "in_place"

    class Part(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = self.down(F.relu_(self.up(self.norm(x))))
            return y.add_(x)

    class Net(Stack):
        def __init__(self) -> None:
            super().__init__(InPlace.Part)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x).tanh_()
            for block in self.blocks:
                x = block(x).mul_(0.9)
                x += 0.1
            return self.head(x)

    def build(self) -> nn.Module:
        return self.Net()
