"""What the ranks run for test_semantics.py: what is trained, and what a model consists of, changes after initialize."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zrun_runtime.zero import GatheredParameters

from .scenario import CLASSES, WIDTH, Recipe, Stack
from .semantics_alone import Alone, adam, engine_over, far, features, said, sgd
from .training import digest, gathered

Found = dict[str, Any]


def both(
    rank: int,
    world: int,
    *,
    stage: int,
    recipe: Recipe,
    before: Callable[[Any, int], None],
    steps: int = 7,
    start: Callable[[Any], None] = lambda model: None,
) -> Found:
    """Train with AdamW; `before(model, step)` is called on the engine's model and on the other before each step."""
    torch.manual_seed(0)
    model = Stack().to(recipe.dtype)
    start(model)
    alone = Alone(copy.deepcopy(model), adam)
    engine = engine_over(model.float(), stage, recipe, adam(model.parameters()))
    named = dict(engine.module.named_parameters())
    for step in range(steps):
        before(engine.module, step)
        before(alone.model, step)
        for micro in range(recipe.accumulation):
            engine.backward(_loss(engine, features(rank, 2 * step + micro, recipe.dtype)))
            engine.step()
            for other in range(world):
                loss = _loss(alone.model, features(other, 2 * step + micro, recipe.dtype))
                (loss / world / recipe.accumulation).backward()
        alone.step()
    found = far(named, alone)
    assert len(found) == len(alone.masters) or any(not p.requires_grad for p in alone.named.values())
    return found


def _loss(model: Any, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


# ---- freezing and unfreezing


def _schedule(model: Any, step: int) -> None:
    """Parts of groups, whole modules, back and forth; something is frozen whole windows long."""
    model.blocks[1].up.requires_grad_(step not in (1, 2, 5))
    model.stem.requires_grad_(step % 2 == 0)
    model.head.weight.requires_grad_(step < 4)


def _unfreezing(model: Any, step: int) -> None:
    """From the head down, one more part every second step."""
    for index, part in enumerate((model.head, *model.blocks[::-1], model.stem)):
        part.requires_grad_(index <= step // 2)


def freezing(rank: int, world: int, *, stage: int, recipe: Recipe, kind: str) -> Found:
    """A schedule of what is frozen: moments and counts of steps are those of each parameter."""
    if kind == "gradual unfreezing":
        start = lambda model: _unfreezing(model, 0)  # noqa: E731
        return both(rank, world, stage=stage, recipe=recipe, before=_unfreezing, start=start)
    return both(rank, world, stage=stage, recipe=recipe, before=_schedule)


def frozen_late(rank: int, world: int, *, stage: int, recipe: Recipe) -> Found:
    """Frozen between backward and step, as in adversarial loops: what got a gradient is updated, as torch does."""
    torch.manual_seed(0)
    model = Stack().to(recipe.dtype)
    alone = Alone(copy.deepcopy(model), adam)
    engine = engine_over(model.float(), stage, recipe, adam(model.parameters()))
    named = dict(engine.module.named_parameters())
    for step in range(3):
        engine.backward(_loss(engine, features(rank, step, recipe.dtype)))
        engine.module.blocks.requires_grad_(False)
        engine.step()
        engine.module.blocks.requires_grad_(True)
        for other in range(world):
            (_loss(alone.model, features(other, step, recipe.dtype)) / world).backward()
        alone.step()
    return far(named, alone)


def frozen_on_one_rank(rank: int, world: int, *, stage: int) -> str:
    """What a rank hears if one of them freezes something that the others do not."""
    engine = engine_over(Stack(), stage, Recipe(), None, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    engine.module.head.requires_grad_(rank > 0)
    engine.backward(_loss(engine, features(rank, 0)))
    return said(engine.step)


# ---- what the optimizer has


def by_hand(rank: int, world: int, *, stage: int, recipe: Recipe) -> Found:
    """Learning rate and decay are changed in `param_groups`, the engine's and the client's own object."""
    torch.manual_seed(0)
    model = Stack().to(recipe.dtype)
    alone = Alone(copy.deepcopy(model), sgd)
    optimizer = sgd(model.parameters())
    engine = engine_over(model.float(), stage, recipe, optimizer)
    named = dict(engine.module.named_parameters())
    for step in range(4):
        for one in (optimizer if step % 2 else engine.optimizer, alone.optimizer):
            one.param_groups[0]["lr"] = 0.1 / (step + 1)
            one.param_groups[0]["weight_decay"] = 0.1 * step
        engine.backward(_loss(engine, features(rank, step, recipe.dtype)))
        engine.step()
        for other in range(world):
            (_loss(alone.model, features(other, step, recipe.dtype)) / world).backward()
        alone.step()
    return far(named, alone)


def _swap_groups(groups: list[Any]) -> None:
    groups[0], groups[1] = groups[1], groups[0]


REGROUPINGS: dict[str, Callable[[list[Any]], Any]] = {
    "a group popped": lambda groups: groups.pop(),
    "all groups cleared": lambda groups: groups.clear(),
    "a list shortened": lambda groups: groups[1].update(params=[]),
    "groups exchanged": _swap_groups,
}


def regrouped(rank: int, world: int, *, stage: int) -> dict[str, str]:
    """What is said of parameters that a script takes out of the optimizer's groups, where torch leaves them untrained,
    or moves to other groups."""
    texts = {}
    for kind, change in REGROUPINGS.items():
        model = Stack()
        groups = [{"params": list(model.stem.parameters()), "lr": 0.1}, {"params": list(model.blocks.parameters())}]
        engine = engine_over(model, stage, Recipe(), sgd(groups))
        change(engine.optimizer.param_groups)
        texts[kind] = said(lambda engine=engine: engine(features(rank, 0)))  # type: ignore[misc]
    return texts


class Adapter(nn.Module):
    """A low-rank addition to a linear layer, which takes its place."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.base, self.down, self.up = base, nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def _adapt(model: Any) -> list[nn.Parameter]:
    dtype = model.stem.weight.dtype
    adapter = Adapter(nn.Identity()).to(dtype)
    model.stem = nn.Sequential(model.stem, adapter)
    return list(adapter.parameters())


def _new_head(model: Any) -> list[nn.Parameter]:
    torch.manual_seed(6)
    model.head = nn.Linear(WIDTH, CLASSES + 2).to(model.head.weight.dtype)
    return list(model.head.parameters())


def _thaw(model: Any) -> list[nn.Parameter]:
    model.stem.requires_grad_(True)
    return list(model.stem.parameters())


ADDITIONS: dict[str, Callable[[Any], list[nn.Parameter]]] = {
    "adapter": _adapt,
    "new head": _new_head,
    "thawed": _thaw,
}


def added(rank: int, world: int, *, stage: int, recipe: Recipe, kind: str) -> tuple[str, Found, Found]:
    """Something new is to be trained. Without `add_param_group`: what is said. With it: as torch does.

    The last are the distances of the new parameters by themselves.
    """
    torch.manual_seed(0)
    model = Stack().to(recipe.dtype)
    model.stem.requires_grad_(kind != "thawed")
    trained = [p for p in model.parameters() if p.requires_grad]
    twin = copy.deepcopy(model)
    alone = Alone(twin, lambda masters: adam(masters if kind != "thawed" else masters[2:]))
    engine = engine_over(model.float(), stage, recipe, adam(trained))
    text, fresh = "", {}
    for step in range(4):
        if step == 2:
            with GatheredParameters(list(engine.module.parameters())):
                new = ADDITIONS[kind](engine.module)
            text = said(lambda: engine(features(rank, 0, recipe.dtype)))
            engine.optimizer.add_param_group({"params": new, "lr": 1e-3})
            fresh = {name: p for name, p in engine.module.named_parameters() if any(p is q for q in new)}
            theirs = ADDITIONS[kind](alone.model)
            names = {id(p): name for name, p in alone.model.named_parameters()}
            for parameter in theirs:
                alone.named[names[id(parameter)]] = parameter
                alone.masters[names[id(parameter)]] = nn.Parameter(parameter.detach().float().clone())
            masters = [alone.masters[names[id(parameter)]] for parameter in theirs]
            alone.optimizer.add_param_group({"params": masters, "lr": 1e-3})
        engine.backward(_loss(engine, features(rank, step, recipe.dtype)))
        engine.step()
        for other in range(world):
            (_loss(alone.model, features(other, step, recipe.dtype)) / world).backward()
        alone.step()
    old = {name: p for name, p in engine.module.named_parameters() if name not in fresh}
    return text, far(old, alone), far(fresh, alone)


def assigned(rank: int, world: int, *, stage: int) -> tuple[str, str, bool]:
    """What is said after load_state_dict(assign=True) and after an unfreezing that no optimizer knows of; and whether
    training goes on once the old state of things is restored."""
    model = Stack()
    model.stem.requires_grad_(False)
    keys = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = engine_over(model, stage, Recipe(), None, **keys)
    engine.module.stem.requires_grad_(True)
    thawed = said(lambda: engine(features(rank, 0)))
    engine.module.stem.requires_grad_(False)
    old = dict(engine.module.head.named_parameters())
    with GatheredParameters(list(engine.module.parameters())):
        state = {name: value.clone() for name, value in engine.module.head.state_dict().items()}
        engine.module.head.load_state_dict(state, assign=True)
    text = said(lambda: engine(features(rank, 0)))
    for name, parameter in old.items():
        setattr(engine.module.head, name, parameter)
    before = digest(gathered(engine.module.head))
    engine.backward(_loss(engine, features(rank, 0)))
    engine.step()
    return text, thawed, digest(gathered(engine.module.head)) != before


def thawed_in_a_window(rank: int, world: int, *, stage: int) -> str:
    """Unfrozen between two micro-batches of one update."""
    torch.manual_seed(0)
    model = Stack()
    optimizer = sgd(model.parameters())
    model.stem.requires_grad_(False)
    engine = engine_over(model, stage, Recipe(accumulation=2), optimizer)
    engine.backward(_loss(engine, features(rank, 0)))
    engine.step()
    engine.module.stem.requires_grad_(True)
    engine.backward(_loss(engine, features(rank, 1)))
    text = said(engine.step)
    engine.zero_grad()
    return text


def modes(rank: int, world: int, *, stage: int, recipe: Recipe) -> Found:
    """Training in evaluation mode and back: dropout and batch statistics are as the mode says."""

    def flip(model: Any, step: int) -> None:
        model.train(step % 2 == 0)

    def start(model: Any) -> None:
        model.blocks[0] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0), nn.LayerNorm(WIDTH)).to(recipe.dtype)

    return both(rank, world, stage=stage, recipe=recipe, before=flip, start=start, steps=3)
