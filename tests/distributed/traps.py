"""What the ranks run for test_traps.py: engines used the way that breaks a careless runtime."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zrun_runtime
from zrun_runtime.errors import ZeroRuntimeError

from .compare import each
from .models_flow import Boom, Fragile
from .scenario import WIDTH, Block, Recipe, Run, Scenario, Spot, Stack, build
from .training import EngineRun, digest, engine_of, full_grads, gathered, make_engine, masters

SHARDED = "blocks.1.up.weight"


class Plain(Scenario):
    def build(self) -> nn.Module:
        return Stack()


class Breaking(Scenario):
    def build(self) -> nn.Module:
        return Fragile()


class _Poison(torch.autograd.Function):
    """The identity, whose gradient gets one bad element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bad: float) -> Tensor:
        ctx.bad = bad
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0].clone()
        gradient.view(-1)[0] += ctx.bad
        return gradient, None


class Poisoned(Scenario):
    """In step 1 the first micro-batch of the last rank gives one parameter of the second block one bad gradient."""

    class Part(Block):
        def forward(self, x: Tensor, bad: float = 0.0) -> Tensor:
            hidden = F.linear(self.norm(x), self.up.weight, _Poison.apply(self.up.bias, bad))
            return x + self.down(F.gelu(hidden))

    class Net(Stack):
        def forward(self, x: Tensor, bad: float = 0.0) -> Tensor:
            x = self.blocks[0](self.stem(x))
            return self.head(self.blocks[2](self.blocks[1](x, bad)))

    def __init__(self, bad: float, world: int) -> None:
        self.bad, self.world = bad, world

    def build(self) -> nn.Module:
        return self.Net(self.Part)

    def loss(self, run: Run, batch: Any) -> Tensor:
        features, classes = batch
        poisoned = run.spot.step == 1 and run.spot.rank == self.world - 1 and run.spot.micro == 0
        return F.cross_entropy(
            run.forward(features.to(_dtype(run.module)), self.bad if poisoned else 0.0).float(), classes
        )


def _dtype(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype


def _step(engine: Any, rank: int, step: int = 0) -> None:
    """One whole training step of accumulation 1 on plain features."""
    run = EngineRun(engine)
    run.spot = Spot(step, rank, 0)
    Plain().micro(run)
    engine.step()


def _said(action: Callable[[], Any]) -> str:
    """The message of the error that `action` raises, or what it returned."""
    try:
        result = action()
    except ZeroRuntimeError as error:
        return str(error)
    except Exception as error:  # the wrong kind of error is an answer too
        return f"a stranger: {type(error).__name__}: {error}"
    return f"no error but {str(result)[:60]!r}"


# ---- reading what is not there

READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "linear": lambda p: F.linear(torch.ones(2, WIDTH), p),
    "matmul": lambda p: torch.ones(2, p.shape[0]) @ p,
    "sum": lambda p: p.sum(),
    "add": lambda p: p + 1,
    "clone": lambda p: p.clone(),
    "index": lambda p: p[0],
    "iterate": lambda p: list(p),
    "detach": lambda p: p.detach().sum(),
    "data": lambda p: p.data.sum(),
    "numpy": lambda p: p.detach().numpy().sum(),
    "tolist": lambda p: p.tolist(),
    "cast": lambda p: p.double(),
    "stack": lambda p: torch.stack([p, p]),
    "equal": lambda p: torch.equal(p, torch.zeros(p.shape)),
    "write": lambda p: p.data.zero_(),
    "init": lambda p: nn.init.normal_(p),
    "out": lambda p: torch.no_grad()(torch.add)(torch.zeros(p.shape), 1, out=p),
    "copy_from": lambda p: torch.zeros(p.shape).copy_(p),
}


def stray_reads(rank: int, world: int, *, moment: str) -> tuple[dict[str, str], Any]:
    """What each way of reading a parameter outside its use says, and the answers to harmless questions."""
    engine = make_engine(Plain(), 3, Recipe())
    parameter = engine.module.get_parameter(SHARDED)
    features = torch.ones(2, WIDTH)
    loss = None
    if moment == "after step":
        _step(engine, rank)
    elif moment == "after forward":
        loss = engine(features).sum()
    elif moment == "after evaluation":
        with torch.no_grad():
            engine(features)
    elif moment == "after gathering":
        gathered(engine.module)
    said = {name: _said(lambda read=read: read(parameter)) for name, read in READS.items()}  # type: ignore[misc]
    kind = tuple(parameter.shape), parameter.dtype, parameter.numel(), parameter.requires_grad, parameter.ndim
    assert SHARDED in repr(parameter) or "Parameter" in repr(parameter)
    if loss is not None:
        engine.backward(loss)
        engine.step()
    _step(engine, rank, 1)
    return said, kind


def kept_gathered(rank: int, world: int) -> bool:
    """A state dict made inside `GatheredParameters` and used after it, as scripts do before they save."""
    engine = make_engine(Plain(), 3, Recipe())
    _step(engine, rank)
    with zrun_runtime.zero.GatheredParameters(list(engine.module.parameters())):
        kept = engine.module.state_dict()
        wanted = {name: value.clone() for name, value in kept.items()}
    _step(engine, rank, 1)
    return all(torch.equal(kept[name], wanted[name]) for name in wanted)


def stale_graph(rank: int, world: int, *, stage: int) -> tuple[str, bool]:
    """A backward through a forward from before the last step: plain autograd refuses, so must we. And go on."""
    engine = make_engine(Plain(), stage, Recipe())
    old = engine(torch.ones(2, WIDTH)).square().sum()
    _step(engine, rank)
    said = _said(lambda: engine.backward(old))
    engine.zero_grad()
    before = digest(gathered(engine.module))
    _step(engine, rank, 1)
    return said, digest(gathered(engine.module)) != before


def gathered_across_steps(rank: int, world: int) -> tuple[bool, str]:
    """A forward inside `GatheredParameters` must not take the values away before its end."""
    engine = make_engine(Plain(), 3, Recipe())
    parameter = engine.module.get_parameter(SHARDED)
    with zrun_runtime.zero.GatheredParameters([parameter]):
        with torch.no_grad():
            engine(torch.ones(2, WIDTH))
        inside = bool(parameter.sum().isfinite()) and parameter.shape == (24, WIDTH)
    return inside, _said(lambda: parameter.sum())


# ---- gradients and hooks


def grads_after_backward(rank: int, world: int, *, stage: int, accumulation: int) -> dict[str, Any]:
    """Where gradients are after the boundary backward, and after the step."""
    engine = make_engine(Plain(), stage, Recipe(accumulation=accumulation))
    run = EngineRun(engine)
    for micro in range(accumulation):
        run.spot = Spot(0, rank, micro)
        Plain().micro(run)
        if not engine.is_gradient_accumulation_boundary():
            engine.step()
    named = dict(engine.module.named_parameters())
    full = full_grads(engine.module)
    result: dict[str, Any] = {"present": [n for n, p in named.items() if p.grad is not None]}
    result["differ"] = [n for n, p in named.items() if p.grad is not None and not torch.allclose(p.grad, full[n])]
    engine.step()
    result["left"] = [n for n, p in named.items() if p.grad is not None]
    result["full"] = full
    return result


def weights_in_hooks(rank: int, world: int, *, stage: int, late: bool) -> tuple[set[str], list[str]]:
    """Which hooks ran, and those that did not see the true weight of their module."""
    model, wrong, ran = build(Plain()), list[str](), set[str]()
    truth = {name: p.detach().clone() for name, p in model.named_parameters()}

    def watch(kind: str, name: str, child: str = "") -> Callable[..., None]:
        def look(module: nn.Module, *rest: Any) -> None:
            ran.add(f"{kind} {name}")
            weight, wanted = module.get_parameter(f"{child}weight"), truth[f"{name}.{child}weight"]
            if weight.shape != wanted.shape or not torch.equal(weight, wanted):
                wrong.append(f"{kind} {name}")

        return look

    def install() -> None:
        for name, module in model.named_modules():
            if isinstance(module, (nn.Linear, Block)):
                child = "up." if isinstance(module, Block) else ""
                module.register_forward_pre_hook(watch("before", name, child))
                module.register_forward_pre_hook(watch("prepended", name, child), prepend=True)
                module.register_forward_hook(watch("after", name, child))
                module.register_full_backward_pre_hook(watch("before backward", name, child))
                module.register_full_backward_hook(watch("after backward", name, child))

    if not late:
        install()
    engine = engine_of(model, Plain(), stage, Recipe())
    if late:
        install()
    features = torch.randn(2, WIDTH, requires_grad=True)
    engine.backward(engine(features).square().mean())
    return ran, wrong


def doubled_by_hooks(rank: int, world: int, *, stage: int, kind: str) -> dict[str, Tensor]:
    """Gradients of a model on which the user's hooks double every gradient, before or after initialize."""
    model = build(Plain())

    def double(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2)

    def install() -> None:
        for parameter in model.parameters():
            if kind.startswith("tensor"):
                parameter.register_hook(lambda grad: grad * 2)
            else:
                parameter.register_post_accumulate_grad_hook(double)

    if kind.endswith("early"):
        install()
    engine = engine_of(model, Plain(), stage, Recipe())
    if kind.endswith("late"):
        install()
    run = EngineRun(engine)
    run.spot = Spot(0, rank, 0)
    Plain().micro(run)
    return full_grads(engine.module)


# ---- ranks that diverge


class Diverging(Stack):
    """Calls the blocks it is told to call."""

    def forward(self, x: Tensor, which: list[int]) -> Tensor:
        x = self.stem(x)
        for index in which:
            x = self.blocks[index](x)
        return self.head(x)


class Paths(Scenario):
    def build(self) -> nn.Module:
        return Diverging()


def diverge(rank: int, world: int, *, odd_one: list[int], others: list[int]) -> tuple[str, str, list[str]]:
    """The last rank takes its own way through the blocks, after a common step.

    Returns what this rank gets to hear: the kind of error and its text, or the gradients that are wrong without one.
    """
    engine = make_engine(Paths(), 3, Recipe())
    features = torch.ones(2, WIDTH)
    engine.backward(engine(features, [0, 1, 2]).sum())
    engine.step()
    plain = build(Paths())
    plain.load_state_dict(gathered(engine.module))
    for way in [others] * (world - 1) + [odd_one]:
        (plain(features, way).sum() / world).backward()
    wanted = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in plain.named_parameters()}
    try:
        engine.backward(engine(features, odd_one if rank == world - 1 else others).sum())
        got = full_grads(engine.module)
        engine.step()
    except Exception as error:
        return type(error).__name__, str(error), []
    return "", "", each("gradient of", got, wanted, 1e-5)


def one_skips_the_backward(rank: int, world: int) -> tuple[str, str]:
    """The last rank goes on to its next forward while the others are in the backward of this one."""
    engine = make_engine(Paths(), 3, Recipe())
    features = torch.ones(2, WIDTH)
    try:
        for _ in range(2):
            loss = engine(features, [0, 1, 2]).sum()
            if rank < world - 1:
                engine.backward(loss)
                engine.step()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "no error"


def one_raises(rank: int, world: int) -> tuple[str, str]:
    """The last rank meets an exception inside its second block, skips the batch and goes on; the others don't."""
    engine = make_engine(Breaking(), 3, Recipe())
    try:
        for step in range(2):
            features = torch.ones(2, WIDTH)
            try:
                output = engine(features, "forward" if rank == world - 1 and step == 0 else "")
            except Boom:
                continue
            engine.backward(output.sum())
            engine.step()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "no error"


# ---- what goes wrong inside a step


def poisoned(rank: int, world: int, *, stage: int, recipe: Recipe, bad: float) -> dict[str, Any]:
    """Three steps, of which the middle one has a bad gradient on the last rank."""
    scenario = Poisoned(bad, world)
    engine = make_engine(scenario, stage, recipe)
    run = EngineRun(engine)
    digests, norms = [digest(gathered(engine.module))], []
    for step in range(3):
        for micro in range(recipe.accumulation):
            run.spot = Spot(step, rank, micro)
            scenario.micro(run)
            engine.step()
        digests.append(digest(gathered(engine.module)))
        norms.append(float(engine.get_global_grad_norm()))
    counters = engine.global_steps, engine.skipped_steps
    return {"digests": digests, "norms": norms, "counters": counters, "masters": masters(engine.module)}


def sharded_after_exception(rank: int, world: int, *, where: str) -> tuple[bool, list[str], bool]:
    """Whether the exception came through, what can be read after it, and whether training goes on."""
    engine = make_engine(Breaking(), 3, Recipe())
    features = torch.ones(2, WIDTH)
    _step(engine, rank)
    raised = False
    context = torch.no_grad() if where == "evaluation" else nullcontext()
    try:
        with context:
            output = engine(features, "backward" if where == "backward" else "forward")
        engine.backward(output.sum())
    except Boom:
        raised = True
    named = [(n, p) for n, p in engine.module.named_parameters() if n.startswith("blocks") and p.ndim == 2]
    readable = [name for name, parameter in named if "GatheredParameters" not in _said(lambda p=parameter: p.sum())]
    engine.zero_grad()
    before = digest(gathered(engine.module))
    _step(engine, rank, 1)
    return raised, readable, digest(gathered(engine.module)) != before
