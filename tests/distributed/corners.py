"""What the ranks run for test_review.py: models and scripts at the edges of what the runtime has to get right."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zrun_runtime
from zrun_runtime.zero import GatheredParameters

from .scenario import WIDTH, Block, Recipe, Spot, Stack
from .training import digest, gathered, make_config

SHARDED = "blocks.1.up.weight"
EVERYTHING_SHARDED = {"stage3_param_persistence_threshold": 0}


def initialize(model: nn.Module, stage: int, **arguments: Any) -> Any:
    """An engine with SGD at a large learning rate; no group is too small to be sharded."""
    config = make_config(stage, Recipe(), {"lr": 0.1})
    config["zero_optimization"].update(EVERYTHING_SHARDED)
    if "optimizer" in arguments:
        del config["optimizer"]
    return zrun_runtime.initialize(model=model, config=config, **arguments)[0]


def features(rank: int, step: int = 0) -> Tensor:
    """(2, WIDTH), other values for each rank and step."""
    return torch.randn(2, WIDTH, generator=Spot(step, rank, 0).generator())


def train(engine: Any, rank: int, step: int = 0) -> None:
    """One step of accumulation 1."""
    engine.backward(engine(features(rank, step)).square().mean())
    engine.step()


def said(action: Callable[[], Any]) -> str:
    """The class and message of the error that `action` raises, or ""."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def stuck(engine: Any, rank: int) -> list[str]:
    """The parameters that a step does not move."""
    before = gathered(engine.module)
    train(engine, rank)
    after = gathered(engine.module)
    return [name for name in before if torch.equal(before[name], after[name])]


# ---- parameters in unusual places


class Places(nn.Module):
    """Small blocks, and a parameter that no module's call brings, or only the model's own."""

    class Scaled(nn.ModuleList):
        def __init__(self) -> None:
            super().__init__([nn.Linear(WIDTH, WIDTH)])
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self[0](x) * self.scale

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        if kind == "large and the model's own":
            self.table = nn.Parameter(torch.randn(300, WIDTH))
        elif kind == "parametrized":
            self.stem: nn.Module = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        elif kind == "of a module list":
            self.stem = self.Scaled()
        elif kind == "list in a list":
            self.lists = nn.ModuleList([nn.ParameterList([nn.Parameter(torch.ones(WIDTH))])])

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "table"):
            x = x + self.table.sum(0)
        if hasattr(self, "stem"):
            x = self.stem(x)
        if hasattr(self, "lists"):
            x = x * self.lists.get_parameter("0.0")
        for block in self.blocks:
            x = block(x)
        return x


PLACES = ("large and the model's own", "parametrized", "of a module list", "list in a list")


def stuck_in_places(rank: int, world: int, *, kind: str) -> list[str]:
    torch.manual_seed(0)
    return stuck(initialize(Places(kind), 3), rank)


def stuck_embedding(rank: int, world: int) -> bool:
    """A model that is nothing but an embedding."""
    torch.manual_seed(0)
    engine = initialize(nn.Embedding(50, WIDTH), 3)
    before = digest(gathered(engine.module))
    engine.backward(engine(torch.tensor([1, 2])).square().mean())
    engine.step()
    return digest(gathered(engine.module)) == before


def buffers_of_all_types(rank: int, world: int) -> dict[str, list[Any]]:
    """What each rank has in buffers that began with its rank number."""
    model = Stack()
    types = (torch.complex64, torch.int16, torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.int64)
    for number, dtype in enumerate(types):
        model.register_buffer(f"flat{number}", torch.full((3,), 1 - rank).to(dtype))
        model.register_buffer(f"single{number}", torch.tensor(1 - rank).to(dtype))
    initialize(model, 1)
    return {name: buffer.reshape(-1).tolist() for name, buffer in model.named_buffers()}


# ---- edits


def edited_by_data(rank: int, world: int, *, stage: int) -> float:
    """Rank 0 writes through `p.data`, which leaves no trace in the parameter's version."""
    engine = initialize(Stack(), stage)
    parameter = engine.module.get_parameter(SHARDED)
    with GatheredParameters([parameter], modifier_rank=0):
        if rank == 0:
            parameter.data.fill_(3.0)
    return float(gathered(engine.module)[SHARDED].mean())


def step_inside_gathering(rank: int, world: int) -> tuple[bool, bool]:
    """Whether a step shows inside `GatheredParameters`, and outlasts it though a neighbour was edited."""
    engine = initialize(Stack(), 3)
    parameter, neighbour = (engine.module.get_parameter(f"blocks.1.up.{name}") for name in ("weight", "bias"))
    with GatheredParameters([parameter]):
        before = parameter.detach().clone()
        train(engine, rank)
        inside = not torch.equal(parameter, before)
        with torch.no_grad():
            neighbour.add_(1)
    return inside, not torch.equal(gathered(engine.module)[SHARDED], before)


def gathered_in_inference_mode(rank: int, world: int) -> bool:
    """Gathering, a state dict and an evaluation in inference mode leave a model that can be trained."""
    engine = initialize(Stack(), 3)
    with torch.inference_mode():
        gathered(engine.module)
        engine.state_dict()
        engine(features(rank))
    return stuck(engine, rank) == []


# ---- optimizers


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05, initial_accumulator_value=0.1),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "amsgrad": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True, amsgrad=True),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=0.01),
    "asgd": lambda ps: torch.optim.ASGD(ps, lr=0.05),
}


class Scalar(Stack):
    """With a 0-dim parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.temperature


def with_history(rank: int, world: int, *, stage: int, kind: str, history: int) -> float:
    """How far three steps of an optimizer that has made `history` steps before are from one process's steps."""

    def alone(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Scalar()
        optimizer = OPTIMIZERS[kind](model.parameters())
        for step in range(steps):
            optimizer.zero_grad()
            for other in range(world):
                (model(features(other, step)).square().mean() / world).backward()
            optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    wanted = alone(history + 3)[0]
    model, optimizer = alone(history)
    engine = initialize(model, stage, optimizer=optimizer)
    for step in range(history, history + 3):
        train(engine, rank, step)
    got = gathered(engine.module)
    far = [(got[n] - p.detach()).double().norm() / p.detach().double().norm() for n, p in wanted.named_parameters()]
    return float(max(far))


def stranger_in_the_optimizer(rank: int, world: int, *, stage: int) -> str:
    """An optimizer that also has a parameter of another module, as a loss with weights of its own."""
    model, loss = Stack(), nn.Linear(5, 3)
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    return said(lambda: initialize(model, stage, optimizer=optimizer))


def optimizer_stepped_by_hand(rank: int, world: int, *, stage: int) -> tuple[str, int, list[str]]:
    """The error, how often the user's own hook ran in a step of the engine, and what that step left where it was."""
    model, ran = Stack(), list[int]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *rest: ran.append(1))
    engine = initialize(model, stage, optimizer=optimizer)
    engine.backward(engine(features(rank)).square().mean())
    text = said(optimizer.step)
    engine.step()
    ran.clear()
    still = stuck(engine, rank)
    return text, len(ran), still


# ---- when a unit's weights are wanted


class Listed(Block):
    """Takes its input in a list, where no view can take its place."""

    def forward(self, x: Any) -> Tensor:
        return super().forward(x[0])


class ListedStack(Stack):
    def __init__(self) -> None:
        super().__init__(Listed)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block([x])
        return self.head(x)


class Opaque:
    """An output that nobody can look into."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


class OpaqueStack(Stack):
    class Part(Block):
        def forward(self, x: Tensor) -> Any:
            return Opaque(super().forward(x))

    def __init__(self) -> None:
        super().__init__(self.Part)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x).value
        return self.head(x)


class Borrowed(Stack):
    """The model's own forward reads the weight of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) + F.linear(x, self.embedding.weight).mean() + self.stem(x).mean()


MODELS: dict[str, Callable[[], nn.Module]] = {"listed": ListedStack, "opaque": OpaqueStack, "borrowed": Borrowed}


def backward_after_evaluation(rank: int, world: int, *, kind: str, frozen: bool) -> tuple[list[float], list[float]]:
    """Gradient norms of three steps with an evaluation between forward and backward, and those of one process.

    Vectors are in an optimizer group of their own, so that a block has two flat groups; three if some are frozen.
    """

    def build() -> tuple[nn.Module, list[dict[str, Any]]]:
        torch.manual_seed(0)
        model = MODELS[kind]()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not frozen or "up" not in name)
        trained = [p for p in model.parameters() if p.requires_grad]
        return model, [{"params": [p for p in trained if (p.ndim > 1) is matrix]} for matrix in (True, False)]

    model, groups = build()
    engine = initialize(model, 3, model_parameters=groups)
    norms = []
    for step in range(3):
        loss = engine(features(rank, step)).square().mean()
        with torch.no_grad():
            engine(features(rank, step))
        engine.backward(loss)
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    model, groups = build()
    optimizer, wanted = torch.optim.SGD(groups, lr=0.1), []
    for step in range(3):
        optimizer.zero_grad()
        for other in range(world):
            (model(features(other, step)).square().mean() / world).backward()
        wanted.append(norm_of(model.parameters()))
        optimizer.step()
    return norms, wanted


def norm_of(parameters: Iterable[nn.Parameter]) -> float:
    """The norm of all gradients."""
    return float(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))


class Shuffled(Stack):
    """Calls its blocks in the order it is told."""

    def __init__(self) -> None:
        super().__init__(depth=8)

    def forward(self, x: Tensor, order: Sequence[int] = ()) -> Tensor:
        for index in order:
            x = self.blocks[index](x)
        return self.head(self.stem(x))


def bytes_in_changing_order(rank: int, world: int) -> tuple[int, int]:
    """(the most bytes of parameters in a step whose blocks run in another order than before, in one like before)."""
    engine = initialize(Shuffled(), 3)
    seen: list[int] = []
    for block in engine.module.blocks:
        block.register_forward_hook(lambda *rest: seen.append(engine.state_bytes()["params"]))
    peaks = []
    for order in (
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [3, 0, 6, 1, 7, 2, 5, 4],
        [0, 4, 2, 6, 1, 7, 5, 3],
    ):
        seen.clear()
        engine.backward(engine(features(rank), order).square().mean())
        engine.step()
        peaks.append(max(seen))
    return max(peaks[2:]), peaks[1]


class Dropping(Stack):
    """Leaves its blocks out if told so; runs them in a checkpoint otherwise."""

    def forward(self, x: Tensor, whole: bool = True) -> Tensor:
        x = self.stem(x)
        for block in self.blocks if whole else ():
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


class LastOnSome(Stack):
    """Ends in a layer of its own that only some ranks use."""

    def forward(self, x: Tensor, whole: bool = True) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) if whole else x


def last_layer_on_some_ranks(rank: int, world: int) -> bool:
    """Whether steps work in which the model's last layer runs on alternating ranks."""
    engine = initialize(LastOnSome(), 3)
    for step in range(4):
        engine.backward(engine(features(rank, step), whole=(rank + step) % 2 == 0).square().mean())
        engine.step()
    return float(engine.get_global_grad_norm()) > 0


def checkpoints_on_some_ranks(rank: int, world: int, *, stage: int) -> bool:
    """Whether steps work of which the first rank alone runs reentrant checkpoints."""
    engine = initialize(Dropping(), stage)
    for step in range(2):
        engine.backward(engine(features(rank, step), whole=rank == 0).square().mean())
        engine.step()
    return float(engine.get_global_grad_norm()) > 0


def batch_on_some_ranks(rank: int, world: int, *, stage: int) -> tuple[float, float]:
    """The norm of a step to which the first rank alone had a batch, and what it has to be."""
    torch.manual_seed(0)
    engine = initialize(Stack(), stage)
    if rank == 0:
        engine.backward(engine(features(0)).square().mean())
    engine.step()
    torch.manual_seed(0)
    model = Stack()
    (model(features(0)).square().mean() / world).backward()
    return float(engine.get_global_grad_norm()), norm_of(model.parameters())


def hook_raises_before_ours(rank: int, world: int) -> tuple[list[str], list[str]]:
    """Hooks that raise before the runtime's run; then the embedding's weight is wanted by the model again."""
    engine = initialize(Borrowed(), 3)

    def refuse(module: nn.Module, args: Any) -> None:
        raise ValueError("not now")

    texts = []
    for module in (engine.module, engine.module.blocks[1]):
        handle = module.register_forward_pre_hook(refuse, prepend=True)
        texts.append(said(lambda: engine(features(rank))))
        handle.remove()
    return texts, stuck(engine, rank)


# ---- what stays behind, and copies


def left_behind(rank: int, world: int, *, stage: int, destroy: bool) -> list[bool]:
    """Whether the model, the engine and a parameter outlive the last reference to them."""
    model = Stack()
    engine = initialize(model, stage)
    train(engine, rank)
    if destroy:
        engine.destroy()
    references = weakref.ref(model), weakref.ref(engine), weakref.ref(model.get_parameter(SHARDED))
    del engine, model
    gc.collect()
    return [reference() is not None for reference in references]


def copies(rank: int, world: int, *, stage: int) -> list[bool]:
    """Whether a deep copy and a pickled copy of the model are plain models, and leave the original's training alone."""
    engine = initialize(Stack(), stage)
    train(engine, rank)
    fine = []
    for copied in (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))):
        other = copied(engine.module)
        same = digest(dict(other.named_parameters())) == digest(gathered(engine.module))
        other(features(rank)).sum().backward()
        fine.append(same and all(p.grad is not None for p in other.parameters()) and not stuck(engine, rank))
    return fine
