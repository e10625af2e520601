"""What the ranks run for test_semantics.py: gradients that come, or are wanted, in unusual ways."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vmap

from zrun_runtime.zero import GatheredParameters

from .compare import distance
from .scenario import Block, Recipe, Stack
from .semantics_alone import Alone, engine_over, far, features, said, sgd

Found = dict[str, Any]


def pair(recipe: Recipe, stage: int, model: nn.Module | None = None) -> tuple[Any, Alone]:
    """An engine, and the same model alone."""
    torch.manual_seed(0)
    model = (model if model is not None else Stack()).to(recipe.dtype)
    alone = Alone(copy.deepcopy(model), sgd)
    return engine_over(model.float(), stage, recipe, sgd(model.parameters())), alone


def _named(engine: Any) -> dict[str, nn.Parameter]:
    return dict(engine.module.named_parameters())


# ---- hooks of modules


def _hook_all(model: Any) -> None:
    def scale(module: nn.Module, *rest: Any) -> Any:
        return (rest[0][0] * 0.5,)  # grad_output of a pre-hook, grad_input of a hook: all but the first is None

    model.blocks[0].register_full_backward_hook(scale)
    model.blocks[1].up.register_full_backward_hook(scale)
    model.blocks[1].register_full_backward_pre_hook(scale)
    model.blocks[2].register_forward_hook(lambda module, args, output: output * 1.5)
    model.blocks[2].up.register_forward_pre_hook(lambda module, args: (args[0] + 0.5,))
    model.register_forward_hook(lambda module, args, output: output + 1)


def module_hooks(rank: int, world: int, *, stage: int, recipe: Recipe, late: bool) -> Found:
    """Hooks that change what passes, forwards and backwards, put on before or after initialize."""
    torch.manual_seed(0)
    model = Stack()
    if not late:
        _hook_all(model)
    engine, alone = pair(recipe, stage, model)
    if late:
        _hook_all(engine.module)
        _hook_all(alone.model)
    for step in range(3):
        engine.backward(engine(features(rank, step, recipe.dtype)).float().square().mean())
        engine.step()
        for other in range(world):
            (alone.model(features(other, step, recipe.dtype)).float().square().mean() / world).backward()
        alone.step()
    return far(_named(engine), alone)


# ---- gradients set by hand


def grads_by_hand(rank: int, world: int, *, stage: int, recipe: Recipe) -> tuple[Found, str, bool]:
    """p.grad set in place of a backward, and before one; what is said after one; whether training then goes on."""
    engine, alone = pair(recipe, stage)
    chosen = ("blocks.1.up.weight", "head.bias", "stem.weight")

    def given(parameter: nn.Parameter, of: int) -> Tensor:
        return torch.full(parameter.shape, 0.1 * (of + 1), dtype=parameter.dtype)

    for name in chosen:  # a step of nothing but gradients set by hand; what has none counts as zero
        engine.module.get_parameter(name).grad = given(engine.module.get_parameter(name), rank)
    engine.step()
    for name, parameter in alone.named.items():
        total = sum(given(parameter, other) for other in range(world)) / world
        parameter.grad = total if name in chosen else torch.zeros_like(parameter)
    alone.step()
    for name in chosen:  # and one where they come before the backward, which adds
        engine.module.get_parameter(name).grad = given(engine.module.get_parameter(name), rank)
        alone.named[name].grad = sum(given(alone.named[name], other) for other in range(world)) / world
    engine.backward(engine(features(rank, 0, recipe.dtype)).float().square().mean())
    engine.step()
    for other in range(world):
        (alone.model(features(other, 0, recipe.dtype)).float().square().mean() / world).backward()
    alone.step()
    found = far(_named(engine), alone)
    engine.backward(engine(features(rank, 1, recipe.dtype)).float().square().mean())
    parameter = engine.module.get_parameter(chosen[0])
    parameter.grad = torch.zeros_like(parameter) if stage < 3 else torch.zeros(parameter.shape, dtype=parameter.dtype)
    text = said(engine.step)
    engine.zero_grad()
    engine.backward(engine(features(rank, 1, recipe.dtype)).float().square().mean())
    engine.step()
    return found, text, engine.was_step_applied()


def stepped_in_backward(rank: int, world: int, *, stage: int) -> tuple[str, bool]:
    """An optimizer fused into the backward through hooks, as a tutorial of torch shows; then training without them."""
    engine, _ = pair(Recipe(), stage)

    def update(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    hooks = [p.register_post_accumulate_grad_hook(update) for p in engine.module.parameters()]
    text = said(lambda: engine.backward(engine(features(rank, 0)).square().mean()))
    for hook in hooks:
        hook.remove()
    engine.backward(engine(features(rank, 0)).square().mean())
    engine.step()
    return text, engine.was_step_applied()


# ---- torch.autograd.grad


def _penalized(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    output = model(x)
    (grad,) = torch.autograd.grad(output.float().sum(), x, create_graph=True)
    return output.float().square().mean() + 0.1 * (grad.float().norm() - 1).square()


def penalty(rank: int, world: int, *, stage: int, recipe: Recipe) -> tuple[Found, str]:
    """A gradient penalty (WGAN-GP), or what is said instead; training goes on."""
    engine, alone = pair(recipe, stage)
    text = ""
    for step in range(2):
        x = features(rank, step, recipe.dtype)
        text = said(lambda x=x: engine.backward(_penalized(engine, x)))  # type: ignore[misc]
        if text:
            engine.zero_grad()
            engine.backward(engine(x).float().square().mean())
        engine.step()
        for other in range(world):
            x = features(other, step, recipe.dtype)
            loss = alone.model(x).float().square().mean() if text else _penalized(alone.model, x)
            (loss / world).backward()
        alone.step()
    return far(_named(engine), alone), text


def saliency(rank: int, world: int, *, stage: int, recipe: Recipe) -> tuple[Found, list[int], bool]:
    """`autograd.grad` for an input before, between and after backwards: right, nothing is reduced for it, and it
    disturbs nothing."""
    engine, alone = pair(recipe, stage)
    reductions, right = [], True

    def look(step: int) -> None:
        nonlocal right
        before = engine.collectives.traffic.calls.get("reduce_scatter", 0)
        gradients = []
        for model in (engine, alone.model):
            x = features(rank, 10 + step, recipe.dtype).requires_grad_()
            gradients.append(torch.autograd.grad(model(x).float().square().mean(), x)[0].float())
        right &= torch.allclose(*gradients, rtol=1e-2, atol=1e-2 if recipe.dtype is torch.bfloat16 else 1e-6)
        reductions.append(engine.collectives.traffic.calls.get("reduce_scatter", 0) - before)

    for step in range(2):
        look(step)
        for micro in range(recipe.accumulation):
            loss = engine(features(rank, 3 * step + micro, recipe.dtype)).float().square().mean()
            engine.backward(loss) if step else (loss / 1).backward()
            if micro == 0:
                engine.step() if recipe.accumulation > 1 else None
                look(step)
        engine.step()
        for other in range(world):
            for micro in range(recipe.accumulation):
                loss = alone.model(features(other, 3 * step + micro, recipe.dtype)).float().square().mean()
                (loss / world / recipe.accumulation).backward()
        alone.step()
    return far(_named(engine), alone), reductions, right


# ---- torch.func


def transforms(rank: int, world: int, *, stage: int, recipe: Recipe) -> Found:
    """A jvp and a Jacobian through the model as it is, then steps with the mean gradient of samples (vmap of grad)."""
    engine, alone = pair(recipe, stage)
    x = features(3, 3, recipe.dtype)

    def answers(model: Any) -> list[Tensor]:
        return [jvp(model, (x,), (torch.ones_like(x),))[1].float(), jacrev(model)(x).float()]

    found = {f"{i}": distance(*both) for i, both in enumerate(zip(answers(engine), answers(alone.model), strict=True))}

    def per_sample(model: Any, batch: Tensor) -> dict[str, Tensor]:
        values = {name: p.detach() for name, p in model.named_parameters()}
        loss = lambda values, one: functional_call(model, values, (one[None],)).float().square().mean()  # noqa: E731
        return {name: g.mean(0) for name, g in vmap(grad(loss), in_dims=(None, 0))(values, batch).items()}

    for step in range(2):
        with GatheredParameters(list(engine.module.parameters())):
            mine = per_sample(engine.module, features(rank, step, recipe.dtype))
        for name, parameter in engine.module.named_parameters():
            parameter.grad = mine[name]
        engine.step()
        for other in range(world):
            for name, value in per_sample(alone.model, features(other, step, recipe.dtype)).items():
                before = alone.named[name].grad
                alone.named[name].grad = value / world + (0 if before is None else before)
        alone.step()
    return found | far(_named(engine), alone)


# ---- gradients dropped


def dropped(rank: int, world: int, *, stage: int, recipe: Recipe) -> Found:
    """`engine.zero_grad()` in the middle of a window drops what was reduced, too."""
    engine, alone = pair(recipe, stage)
    for step in range(2):
        engine.backward(engine(features(rank, 20 + step, recipe.dtype)).float().square().mean() * 100)
        engine.zero_grad()
        engine.backward(engine(features(rank, step, recipe.dtype)).float().square().mean())
        engine.step()
        for other in range(world):
            (alone.model(features(other, step, recipe.dtype)).float().square().mean() / world).backward()
        alone.step()
    return far(_named(engine), alone)


# ---- weights changed inside a forward


class Clamping(Stack):
    """Clamps a weight of its own in its forward, where sharded weights come and go."""

    class Part(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.up.weight.clamp_(-0.05, 0.05)
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__(self.Part)


def clamped_inside(rank: int, world: int, *, stage: int, recipe: Recipe) -> tuple[str, float]:
    """What is said, and the largest weight that the model then computes with."""
    torch.manual_seed(0)
    engine, _ = pair(recipe, stage, Clamping())
    text = said(lambda: engine(features(rank, 0, recipe.dtype)))
    if not text:
        engine.backward(engine(features(rank, 0, recipe.dtype)).float().square().mean())
        engine.step()
    weight = engine.module.blocks[1].up.weight
    with GatheredParameters([weight]):
        return text, float(weight.detach().abs().max())
