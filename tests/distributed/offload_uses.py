"""What the ranks run for test_offload.py: a model trained with its state in one tier or another."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zrun_runtime
from zrun_runtime.tiers import host

from .memory_of_steps import live_bytes
from .models import SCENARIOS
from .scenario import Spot, build
from .training import EngineRun, digest, gathered, masters, trained

STATE_KEYS = (
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "sum",
    "square_avg",
    "step_size",
    "prev",
    "ax",
)


class Signed(torch.optim.Optimizer):
    """A client's own element-wise optimizer, whose state comes with the second step only."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                if state["count"] == 2:
                    state["ax"] = torch.zeros_like(p)
                if "ax" in state:
                    state["ax"].lerp_(p.grad, 0.1)
                p.add_(state.get("ax", p.grad).sign(), alpha=-group["lr"])


CLIENTS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=2e-3, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=2e-3),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "signed": Signed,
}


@dataclass(frozen=True)
class Job:
    """One run. Tiers: none, cpu or nvme. apart: host memory is not the device's, though both are this machine's."""

    stage: int = 2
    optimizer_tier: str = "none"
    param_tier: str = "none"
    apart: bool = False
    dtype: str = "fp32"
    accumulation: int = 1
    clip: float = 0.5
    kind: str = "AdamW"  # a type of the config, or a client of CLIENTS
    model: str = "gpt_tied_head"
    steps: int = 4
    path: str = ""
    zero: dict[str, Any] = field(default_factory=dict)  # more keys of zero_optimization
    more: dict[str, Any] = field(default_factory=dict)  # more keys of the config

    @property
    def resident(self) -> Job:
        """The same without offload."""
        plain = {k: v for k, v in self.zero.items() if not k.startswith(("sub_group", "offload_"))}
        return replace(self, optimizer_tier="none", param_tier="none", apart=False, path="", zero=plain)

    def config(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage, **self.zero}
        disk = {"nvme_path": self.path} if self.path else {}
        if self.optimizer_tier != "none":
            zero["offload_optimizer"] = {"device": self.optimizer_tier, **disk, **zero.get("offload_optimizer", {})}
        if self.param_tier != "none":
            zero["offload_param"] = {
                "device": self.param_tier, "max_in_cpu": 0, **disk, **zero.get("offload_param", {})
            }  # fmt: skip
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "steps_per_print": None,
            "zero_optimization": zero,
            **self.more,
        }
        if self.kind not in CLIENTS:
            config["optimizer"] = {"type": self.kind, "params": {"lr": 2e-3}}
        if self.dtype != "fp32":
            config[self.dtype] = {"enabled": True}
        if self.dtype == "fp16":
            config["fp16"]["initial_scale_power"] = 8
        return config


@contextmanager
def device_apart(apart: bool, on_host: Callable[[Tensor], None] = lambda tensor: None) -> Iterator[None]:
    """Inside, the CPU plays a device with memory of its own. on_host: told of each tensor that is made for the host."""
    ours = [module for name, module in list(sys.modules.items()) if name.startswith("zrun_runtime")]
    homes = [module for module in ours if hasattr(module, "is_host")]
    makers = [module for module in ours if hasattr(module, "host_empty")]
    is_host, host_empty = host.is_host, host.host_empty

    def noted(numel: int, dtype: torch.dtype, pin: bool) -> Tensor:
        tensor = host_empty(numel, dtype, pin)
        on_host(tensor)
        return tensor

    for module in homes:
        module.is_host = (lambda device: False) if apart else is_host
    for module in makers:
        module.host_empty = noted
    try:
        yield
    finally:
        for module in homes:
            module.is_host = is_host
        for module in makers:
            module.host_empty = host_empty


def make(job: Job, seed: int = 0) -> Any:
    """An engine."""
    model = build(SCENARIOS[job.model](), seed=seed)
    parameters = [p for p in model.parameters() if p.requires_grad]
    arguments: dict[str, Any] = {"model": model, "config": job.config()}
    if job.kind in CLIENTS:
        arguments["optimizer"] = CLIENTS[job.kind](parameters)
    else:
        arguments["model_parameters"] = parameters
    return zrun_runtime.initialize(**arguments)[0]


def run_steps(engine: Any, job: Job, rank: int, steps: range) -> list[float]:
    """Train; the losses."""
    run, scenario = EngineRun(engine), SCENARIOS[job.model]()
    for step in steps:
        for micro in range(job.accumulation):
            run.spot = Spot(step, rank, micro)
            torch.manual_seed(run.spot.generator().initial_seed())
            scenario.micro(run)
            engine.step()
    return run.losses


def states(module: nn.Module) -> dict[str, Tensor]:
    """The optimizer's tensors of every trained parameter, whole. Collective."""
    found = {}
    for name, parameter in trained(module).items():
        for key in STATE_KEYS:
            value = zrun_runtime.safe_get_full_optimizer_state(parameter, key)
            if value is not None:
                found[f"{name}:{key}"] = value.clone()
    return found


@dataclass
class Found:
    """What a run left behind, on one rank."""

    weights: str
    masters: dict[str, Tensor]
    states: dict[str, Tensor]
    losses: list[float]
    norm: float
    on_disk: int  # bytes reserved below the path of this rank's job, while it ran


def train(rank: int, world: int, *, job: Job) -> Found:
    """Train with the job's tiers."""
    with device_apart(job.apart):
        engine = make(job, seed=rank)
        losses = run_steps(engine, job, rank, range(job.steps))
        found = Found(
            digest(gathered(engine.module)),
            masters(engine.module),
            states(engine.module),
            losses,
            float(engine.get_global_grad_norm()),
            disk_bytes(job.path),
        )
        engine.destroy()
    if rank:
        found.masters, found.states = {}, {}
    return found


def disk_bytes(path: str) -> int:
    """Bytes of the files that this process has below `path`."""
    if not path:
        return 0
    mine = Path(path).glob(f"zrun-offload.*.{os.getpid()}-*/*")
    return sum(file.stat().st_size for file in mine)


# ---- memory


@dataclass
class Held:
    """Bytes and elements on one rank."""

    parameters: int
    device: int  # between two steps, beside the model's inputs
    device_most: int  # at any hook of a module in a forward and backward
    host: int  # made for the host, between two steps
    host_most: int  # made for the host, alive at once at any moment of two steps
    block: int


def hold(rank: int, world: int, *, job: Job, width: int = 256) -> Held:
    """Train two steps of a wide model, look, and look at every hook of a third."""
    import gc

    from .bytes_of_steps import Wide
    from .scenario import Block

    class _Counter:
        def __init__(self) -> None:
            self.alive: dict[int, Any] = {}
            self.most = 0

        def note(self, tensor: Tensor) -> None:
            storage = tensor.untyped_storage()
            self.alive[storage._cdata] = storage._weak_ref()
            self.most = max(self.most, self.now())

        def now(self) -> int:
            gone = [key for key, ref in self.alive.items() if torch.UntypedStorage._expired(ref)]
            for key in gone:
                del self.alive[key]
            found = 0
            for ref in self.alive.values():
                storage = torch.UntypedStorage._new_with_weak_ptr(ref)
                found += storage.nbytes() if storage is not None else 0
            return found

    SCENARIOS["wide"] = Wide  # type: ignore[assignment]
    scenario, counter = Wide(width=width), _Counter()
    gc.collect()
    gc.freeze()
    try:
        with device_apart(job.apart, counter.note):
            torch.manual_seed(0)
            model = scenario.build()
            config = job.config()
            engine = zrun_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
            run = EngineRun(engine)
            for step in range(2):
                run.spot = Spot(step, rank, 0)
                scenario.micro(run)
                engine.step()
            for state in engine.optimizer.state.values():  # of masters that are the host's
                for tensor in state.values():
                    counter.note(tensor)
            gc.collect()
            host_bytes = counter.now()
            held = Held(
                sum(p.numel() for p in scenario.build().parameters()),
                live_bytes() - host_bytes,
                0,
                host_bytes,
                0,
                max(sum(p.numel() for p in m.parameters()) for m in model.modules() if isinstance(m, Block)),
            )

            def look(*_: Any) -> None:
                held.device_most = max(held.device_most, live_bytes() - counter.now())

            hooks: list[Any] = []
            for module in model.modules():
                hooks += [module.register_forward_hook(look), module.register_full_backward_hook(look)]
            run.spot = Spot(2, rank, 0)
            scenario.micro(run)
            engine.step()
            for hook in hooks:
                hook.remove()
            held.host_most = counter.most
            engine.destroy()
            return held
    finally:
        gc.unfreeze()
        del SCENARIOS["wide"]


# ---- edits, checkpoints, moves


def edited(rank: int, world: int, *, job: Job, how: str) -> tuple[list[bool], str]:
    """Write into weights between two steps, train on: (did the edit stay in the master?, digest of the weights)."""
    with device_apart(job.apart):
        engine = make(job, seed=rank)
        run_steps(engine, job, rank, range(2))
        parameter = next(p for n, p in trained(engine.module).items() if p.dim() == 2)
        before = zrun_runtime.safe_get_full_fp32_param(parameter)
        with torch.no_grad():
            if how == "gathered":
                with zrun_runtime.zero.GatheredParameters([parameter], modifier_rank=0):
                    parameter[0].fill_(0.5)
            elif how == "set":
                value = before.clone()
                value[0] = 0.5
                zrun_runtime.zero.safe_set_full_fp32_param(parameter, value)
            else:
                parameter[0].fill_(0.5)
        run_steps(engine, job, rank, range(2, 3))
        after = zrun_runtime.safe_get_full_fp32_param(parameter)
        kept = [bool(((after[0] - 0.5).abs() < 0.01).all()), bool(((after[1:] - before[1:]).abs() < 0.01).all())]
        mark = digest(gathered(engine.module))
        engine.destroy()
    return kept, mark


def set_by_hand(rank: int, world: int, *, job: Job, which: str) -> tuple[list[bool], float, str, str]:
    """Set state, master weights and a gradient of a matrix, `which` of them (full, local); step, and train on.

    (is what was set what is read?, the norm of the step, digests of masters and states)
    """
    zero = zrun_runtime.zero

    def call(verb: str, what: str, *arguments: Any) -> Any:
        return getattr(zero, f"safe_{verb}_{which}_{what}")(*arguments)

    numbers, kept = torch.Generator().manual_seed(rank if which == "local" else 0), []
    with device_apart(job.apart):
        engine = make(job)
        run_steps(engine, job, rank, range(2))
        matrix = next(p for p in trained(engine.module).values() if p.dim() == 2)
        for key, size in (("exp_avg", 1e-3), ("exp_avg_sq", 1e-5)):
            value = size * torch.rand(call("get", "optimizer_state", matrix, key).shape, generator=numbers)
            call("set", "optimizer_state", matrix, value, key)
            kept.append(torch.equal(call("get", "optimizer_state", matrix, key), value))
        weights = 0.02 * torch.randn(call("get", "fp32_param", matrix).shape, generator=numbers)
        call("set", "fp32_param", matrix, weights)
        run, scenario = EngineRun(engine), SCENARIOS[job.model]()
        run.spot = Spot(2, rank, 0)
        scenario.micro(run)
        gradient = 0.1 * torch.randn(call("get", "grad", matrix).shape, generator=numbers)
        call("set", "grad", matrix, gradient)
        kept.append(torch.equal(call("get", "grad", matrix), gradient))
        kept.append(torch.equal(call("get", "fp32_param", matrix), weights))
        engine.step()
        norm = float(engine.get_global_grad_norm())
        run_steps(engine, job, rank, range(3, 4))
        found = digest(masters(engine.module)), digest(states(engine.module))
        engine.destroy()
    return kept, norm, *found


def saved_and_loaded(rank: int, world: int, *, job: Job, other: Job, directory: str) -> tuple[str, str]:
    """Save under one job, load under another, train both on: the digests of their weights."""
    marks = []
    for number, one in enumerate((job, other)):
        with device_apart(one.apart):
            engine = make(one, seed=rank + number)
            if number == 0:
                run_steps(engine, one, rank, range(2))
                engine.save_checkpoint(directory, tag="offloaded")
            else:
                engine.load_checkpoint(directory, tag="offloaded")
            run_steps(engine, one, rank, range(2, 4))
            marks.append(digest(masters(engine.module)))
            engine.destroy()
    return marks[0], marks[1]


def parked(rank: int, world: int, *, job: Job) -> tuple[int, int, str, str]:
    """Move state to the host and back between two steps: bytes made for the host, before and after; what a step says
    in between; digest of the masters after one more."""
    made: list[int] = []
    with device_apart(job.apart, lambda tensor: made.append(tensor.nbytes)):
        engine = make(job, seed=rank)
        run_steps(engine, job, rank, range(2))
        before = sum(made)
        engine.offload_states()
        after, said = sum(made), ""
        with torch.no_grad():
            engine(torch.zeros(2, 6, dtype=torch.long))
        try:
            engine.step()
        except zrun_runtime.EngineError as error:
            said = str(error)
        engine.reload_states()
        run_steps(engine, job, rank, range(2, 4))
        mark = digest(masters(engine.module))
        engine.destroy()
    return before, after, said, mark
