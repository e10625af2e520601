"""What the ranks run for test_zero.py: models built in zero.Init, edits of gathered parameters, single states."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zrun_runtime
from zrun_runtime import departures, master, shards, zero

from .compare import distance, flat
from .engine_uses import SGD, loss_of, stack_engine
from .scenario import CLASSES, WIDTH, Block, Recipe, Scenario, Spot, Stack, build
from .training import digest, full_grads, gathered, make_config, masters
from .traps import Plain, _said


def _config(stage: int, dtype: str = "") -> dict[str, Any]:
    return {**make_config(stage, Recipe(), SGD), **({dtype: {"enabled": True}} if dtype else {})}


def _train(engine: Any, rank: int, steps: int = 2) -> dict[str, Tensor]:
    for step in range(steps):
        engine.backward(loss_of(engine, Spot(step, rank, 0)))
        engine.step()
    return {name: weight.float() for name, weight in gathered(engine.module).items()}


# ---- zero.Init


class Everything(nn.Module):
    """Construction as libraries do it: nested, copied, tied, initialised again from outside and from inside."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.table = nn.Embedding(11, WIDTH)
        block = Block()
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(2))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.body = nn.Sequential(nn.Linear(WIDTH, 40), nn.GELU(), nn.Linear(40, WIDTH))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("steps", torch.arange(4.0))
        self.apply(self._again)

    @staticmethod
    def _again(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.2)
            if module.bias is not None:
                module.bias.data.fill_(0.01)
        if isinstance(module, nn.Embedding):
            with torch.no_grad():
                module.weight.mul_(0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        x = x + self.attention(x, x, x)[0] + self.recurrent(x)[0]
        return self.head(self.body(x))


def _tokens(rank: int, step: int) -> Tensor:
    return torch.randint(11, (2, 5), generator=Spot(step, rank, 0).generator())


def _train_tokens(engine: Any, rank: int) -> dict[str, Tensor]:
    for step in range(2):
        tokens = _tokens(rank, step)
        engine.backward(F.cross_entropy(engine(tokens).flatten(0, 1).float(), tokens.flatten()))
        engine.step()
    return {name: weight.float() for name, weight in gathered(engine.module).items()}


def built_in_init(rank: int, world: int, *, stage: int, dtype: str, client: bool) -> dict[str, Any]:
    """A model built in zero.Init trains as the same model built plainly; ranks are seeded differently."""
    config, result = _config(stage, dtype), {}
    torch.manual_seed(rank)
    plain = Everything()
    torch.manual_seed(rank)
    with zero.Init(config_dict_or_path=config):
        model = Everything()
    parameters = dict(model.named_parameters())
    result["dtypes"] = {str(p.dtype) for p in parameters.values()} | {str(model.steps.dtype)}
    result["shapes"] = all(p.shape == plain.get_parameter(n).shape for n, p in parameters.items())
    result["tied"] = model.head.weight is model.table.weight
    result["stray"] = _said(lambda: model(_tokens(rank, 0)))
    kept = sum(p.data.untyped_storage().nbytes() for p in parameters.values() if type(p) is nn.Parameter)
    result["full bytes"] = kept
    arguments = {"optimizer": torch.optim.SGD(model.parameters(), **SGD)} if client else {}
    engine = zrun_runtime.initialize(model=model, config=config, **arguments)[0]
    twin = zrun_runtime.initialize(model=plain, config=config)[0]
    start, wanted = gathered(engine.module), gathered(twin.module)
    result["start"] = distance(flat(start), flat(wanted))
    result["end"] = distance(flat(_train_tokens(engine, rank)), flat(_train_tokens(twin, rank)))
    result["digest"] = digest(gathered(engine.module))
    return result


class Constants(nn.Module):
    """Tensors made in every way, beside one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("one", torch.Tensor([63]).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("angles", 1.0 / torch.arange(1, 9))
        self.register_buffer("counts", torch.arange(5))
        self.plain = torch.tensor([0.1, 0.2])


def constants(rank: int, world: int) -> bool:
    """Whether zero.Init, asked for 16 bits, leaves all but parameters as they are."""
    with zero.Init(config_dict_or_path={"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}):
        found = Constants()
    wanted = Constants()
    pairs = [(found.plain, wanted.plain), *zip(found.buffers(), wanted.buffers(), strict=True)]
    return all(one.dtype is other.dtype and torch.equal(one, other) for one, other in pairs)


def odd_gatherings(rank: int, world: int) -> list[str]:
    """What is said of a module in place of its parameters, and of a rank that there is not; then one that is right."""
    engine = zrun_runtime.initialize(model=build(Plain()), config=_config(3))[0]
    parameters = list(engine.module.parameters())
    with zero.GatheredParameters([parameters[0], parameters[0], nn.Parameter(torch.ones(1))], modifier_rank=world - 1):
        pass
    return [
        _said(lambda: zero.GatheredParameters(engine.module)),
        _said(lambda: zero.GatheredParameters(parameters, modifier_rank=world)),
    ]


def edited_before_initialize(rank: int, world: int, *, stage: int) -> dict[str, Any]:
    """Initialising again, loading by name as from_pretrained does, and the module form."""
    source = {name: p.detach().clone() for name, p in build(Plain(), seed=7).named_parameters()}
    torch.manual_seed(rank)
    with zero.Init():
        model = Stack()
        with zero.GatheredParameters(model.stem.weight, modifier_rank=0):
            if rank == 0:
                nn.init.constant_(model.stem.weight, 0.125)
        nn.init.constant_(model.head.weight, 0.25)
        read = float(model.head.weight.sum())
    outside = _said(lambda: model.head.weight.sum()) if world > 1 else ""
    nn.init.constant_(model.head.bias, -1.0)  # as every rank does it, it is done
    model.head.bias.data.fill_(0.5 + rank)
    before = {name: value.clone() for name, value in _whole(model).items()}
    for prefix, module in model.named_modules():  # one module at a time; sets differ in order between ranks
        with zero.GatheredParameters(set(module.parameters(recurse=False)), modifier_rank=0):
            if rank == 0:
                for name, p in module.named_parameters(recurse=False):
                    p.data.copy_(source[f"{prefix}.{name}".lstrip(".")])
    second = build(Plain(), seed=7)
    zero.Init(module=second)
    loaded, module_form = _whole(model), _whole(second)
    with zero.GatheredParameters(list(model.parameters())):
        gathered_said = _said(lambda: zrun_runtime.initialize(model=model, config=_config(stage))) if world > 1 else ""
    engine = zrun_runtime.initialize(model=model, config=_config(stage))[0]
    trained = _train(engine, rank)
    twin = zrun_runtime.initialize(model=build(Plain(), seed=7), config=_config(stage))[0]
    return {
        "stem": bool((before["stem.weight"] == 0.125).all()),
        "head": bool((before["head.weight"] == 0.25).all()) and read == 0.25 * WIDTH * CLASSES,
        "outside": outside,
        "outside in place": bool((before["head.bias"] == 0.5).all()),
        "gathered": gathered_said,
        "loaded": all(torch.equal(loaded[name], source[name]) for name in source),
        "module form": all(torch.equal(module_form[name], source[name]) for name in source),
        "end": distance(flat(trained), flat(_train(twin, rank))),
    }


def _whole(model: nn.Module) -> dict[str, Tensor]:
    with zero.GatheredParameters(list(model.parameters())):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


class Wide(nn.Module):
    """Sixteen layers of 1 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(16):
            self.layers.append(nn.Linear(512, 512, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers the most bytes of large storages that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, Any] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in [result] if isinstance(result, Tensor) else []:
            storage = tensor.untyped_storage()
            if storage.nbytes() > 100_000:
                self.known[storage._cdata] = torch.multiprocessing.reductions.StorageWeakRef(storage)
        alive = 0
        for key, ref in list(self.known.items()):
            if ref.expired():
                del self.known[key]
                continue
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            alive += storage.nbytes() if storage is not None else 0
        self.peak = max(self.peak, alive)
        return result


def bytes_while_building(rank: int, world: int) -> tuple[int, int]:
    """(most bytes while a wide model is built in zero.Init, most bytes until initialize is done)."""
    with _Watch() as watch:
        with zero.Init():
            model = Wide()
        building = watch.peak
        config = {**_config(3), "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
        engine = zrun_runtime.initialize(model=model, config=config)[0]
    whole = watch.peak
    engine.backward(engine(torch.ones(1, 512)).sum())
    engine.step()
    return building, whole


def parts_and_autos(rank: int, world: int) -> dict[str, Any]:
    """What zero.Init refuses; and "auto", which it takes as initialize does."""
    first = torch.distributed.new_group([0])

    class Mpu:
        @staticmethod
        def get_model_parallel_world_size() -> int:
            return 2

    said = {
        "group": _said(lambda: zero.Init(data_parallel_group=first)) if rank == 0 else "",
        "quantized": _said(lambda: zero.Init(zero_quantized_weights=True)),
        "within": _said(lambda: zero.Init(zero_param_parallel_group=first)),
        "mpu": _said(lambda: zero.Init(mpu=Mpu())),
        "device": _said(lambda: zero.Init(remote_device="disk")),
    }
    offload = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    places = [zero.Init(), zero.Init(remote_device="cpu"), zero.Init(remote_device="nvme")]
    places.append(zero.Init(config_dict_or_path=offload))
    tiers = [place._building.plan.params.tier.value for place in places]
    everyone = torch.distributed.group.WORLD
    with zero.Init(config_dict_or_path={"bf16": {"enabled": "auto"}}, data_parallel_group=everyone):
        model = nn.Linear(2, 2)
    return {**said, "dtype": str(model.weight.dtype), "tiers": tiers}


def built_on_the_host(rank: int, world: int, *, apart: bool) -> tuple[float, set[str]]:
    """How far a model whose slices waited on the host ends up from one built plainly; types of its weights."""
    config = _config(3, "bf16")
    config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    ends, dtypes = [], set()
    with ExitStack() as stack:
        for module in (shards, master, departures) if apart else ():  # as if the device's memory were not the host's
            stack.enter_context(mock.patch.object(module, "is_host", lambda device: False))
        for early in (True, False):
            torch.manual_seed(rank)
            with zero.Init(config_dict_or_path=config, remote_device="cpu", enabled=early):
                model = Everything()
            engine = zrun_runtime.initialize(model=model, config=config)[0]
            ends.append(flat(_train_tokens(engine, rank)))
            dtypes = {str(p.dtype) for p in model.parameters()}
    return distance(*ends), dtypes


# ---- edits


def edits(rank: int, world: int, *, stage: int, dtype: str, modifier: int | None) -> dict[str, Any]:
    """A weight edited inside GatheredParameters, in place and through `.data`: seen at once, and by the next steps."""
    engine = stack_engine(stage, dtype=dtype)
    _train(engine, rank, 1)
    weights = engine.module.blocks[1].up.weight, engine.module.blocks[1].down.weight
    with zero.GatheredParameters(list(weights), modifier_rank=modifier):
        if modifier is None or rank == modifier:
            with torch.no_grad():
                weights[0].mul_(2).add_(0.5)
            weights[1].data.fill_(0.75)
    found, master = gathered(engine.module), masters(engine.module)
    names = "blocks.1.up.weight", "blocks.1.down.weight"
    agree = [torch.equal(found[n], master[n].to(found[n].dtype)) for n in names]
    filled = bool((found[names[1]] == 0.75).all())
    after = _train(engine, rank, 1)
    moved = [distance(after[n], found[n].float()) for n in names]
    return {"agree": agree, "filled": filled, "moved": moved, "digest": digest(gathered(engine.module))}


def edits_in_passing(rank: int, world: int, *, stage: int, dtype: str) -> dict[str, Any]:
    """Weights clamped between steps as a script does it, without a context; and a gathering that changes nothing."""
    engine = stack_engine(stage, dtype=dtype)
    _train(engine, rank, 3)
    before = masters(engine.module)
    with zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        pass
    found = {"kept": all(torch.equal(before[name], value) for name, value in masters(engine.module).items())}
    if stage < 3:
        weight = engine.module.blocks[0].up.weight
        with torch.no_grad():
            weight.clamp_(-0.01, 0.01)
        after = {name: value.float() for name, value in gathered(engine.module).items()}
        _train(engine, rank, 1)
        master = masters(engine.module)
        found["clamped"] = float(master["blocks.0.up.weight"].abs().max())
        found["others"] = distance(master["blocks.1.up.weight"], before["blocks.1.up.weight"])
        found["near"] = distance(master["blocks.0.up.weight"], after["blocks.0.up.weight"])
    return found


# ---- single states


def states(rank: int, world: int, *, stage: int, dtype: str) -> dict[str, Any]:
    """Every getter gives back what its setter took, whole and in parts; norm and step use what was set."""
    engine = stack_engine(stage, dtype=dtype)
    name, result = "blocks.1.up.weight", {}
    weight, frozen = engine.module.get_parameter(name), nn.Parameter(torch.ones(3))
    result["nobody's"] = [zero.safe_get_full_fp32_param(frozen), zero.safe_get_local_grad(frozen)]
    result["too early"] = [
        zero.safe_get_full_grad(weight),
        zero.safe_get_full_optimizer_state(weight, "momentum_buffer"),
    ]
    result["no state"] = _said(lambda: zero.safe_set_full_optimizer_state(weight, torch.ones(24, WIDTH), "exp_avg"))
    _train(engine, rank, 1)
    value = torch.arange(24.0 * WIDTH).view(24, WIDTH) / 512
    zero.safe_set_full_fp32_param(weight, value)
    zero.safe_set_full_optimizer_state(weight, value + 1, "momentum_buffer")
    result["master"] = torch.equal(zero.safe_get_full_fp32_param(weight), value)
    result["state"] = torch.equal(zero.safe_get_full_optimizer_state(weight, "momentum_buffer"), value + 1)
    shown = gathered(engine.module)[name]
    result["shown"] = torch.equal(shown, value.to(shown.dtype))
    part = zero.safe_get_local_fp32_param(weight)
    result["parts"] = part.numel()
    zero.safe_set_local_fp32_param(weight, part + 1)
    zero.safe_set_local_optimizer_state(weight, torch.zeros_like(part), "momentum_buffer")
    result["local master"] = torch.equal(zero.safe_get_full_fp32_param(weight), value + 1)
    result["local state"] = bool((zero.safe_get_full_optimizer_state(weight, "momentum_buffer") == 0).all())
    engine.backward(loss_of(engine, Spot(3, rank, 0)))
    for other in engine.module.parameters():
        if other is not weight:
            zero.safe_set_local_grad(other, torch.zeros_like(zero.safe_get_local_grad(other)))
    zero.safe_update_full_grad_vectorized([weight], lambda grad, p: torch.full_like(grad, 0.5))
    grads = full_grads(engine.module)
    result["grad"] = [float(grads[name].min()), float(grads[name].max()), float(flat(grads).norm())]
    engine.step()
    result["norm"] = engine.get_global_grad_norm()
    result["step"] = distance(masters(engine.module)[name], value + 1 - SGD["lr"] * 0.5)
    result["shape"] = _said(lambda: zero.safe_set_full_fp32_param(weight, value.T))
    return result


class Backwards(nn.Module):
    """Uses its layers in the order in which they are not registered, so groups are formed again at the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(300, 300) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


def set_before_the_first_step(rank: int, world: int, *, stage: int, dtype: str) -> tuple[bool, bool]:
    """(groups are formed again at the first step otherwise, master values that were set keep all their digits)."""
    config = {**make_config(stage, Recipe(), {"lr": 0.0}), dtype: {"enabled": True}}
    labels, kept = [], False
    for sets in (False, True):
        torch.manual_seed(0)
        engine = zrun_runtime.initialize(model=Backwards(), config=config)[0]
        weight = engine.module.layers[1].weight
        value = torch.linspace(0.1, 0.3, 300 * 300).view(300, 300)
        if sets:
            zero.safe_set_full_fp32_param(weight, value)
        before = [group.spec.label for group in engine.zero.groups]
        engine.backward(engine(torch.ones(1, 300, dtype=weight.dtype)).float().sum() / 300)
        engine.step()
        labels.append(before == [group.spec.label for group in engine.zero.groups])
        kept = torch.equal(zero.safe_get_full_fp32_param(weight), value)
    return labels == [False, True], kept


def generating(rank: int, world: int, *, stage: int) -> dict[str, Any]:
    """Calls of single parts of the model between steps, by our name for it and as TRL does it at stage 3."""
    engine = stack_engine(stage)
    features = torch.ones(2, WIDTH)
    results, wanted = [], []
    for step in range(2):
        engine.backward(loss_of(engine, Spot(step, rank, 0)))
        engine.step()
        with zero.GatheredParameters(list(engine.module.parameters())):
            whole = copy.deepcopy(engine.module)
        wanted.append(whole.blocks[1](whole.blocks[2](whole.stem(features))))
        with zero.unwrap_model_for_generation(engine) as model:
            results.append(model.blocks[1](model.blocks[2](model.stem(features))))
        if hasattr(engine.optimizer, "parameter_offload"):
            with zero.GatheredParameters(engine.parameters()):
                offload = engine.optimizer.parameter_offload
                assert not offload.module.ds_external_parameters()
                for hook in (*offload.forward_hooks, *offload.backward_hooks):
                    hook.remove()
                results[-1] = engine.module.blocks[1](engine.module.blocks[2](engine.module.stem(features)))
                offload._register_deepspeed_module(offload.module)
    same = all(torch.equal(one, other) for one, other in zip(results, wanted, strict=True))
    return {"same": same, "steps": engine.global_steps}


# ---- leaves


class Experts(nn.Module):
    """Routes everything to one expert, another one on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return x + self.experts[which](x)


class Mixture(nn.Module):
    """Two such layers, called by name so that no block holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Linear(WIDTH, WIDTH), Experts(), Experts()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.head(self.second(self.first(self.stem(x), which), 3 - which))


class Mixing(Scenario):
    def build(self) -> nn.Module:
        return Mixture()


def experts(rank: int, world: int, *, stage: int, how: str) -> dict[str, Tensor]:
    """Weights after three steps in which ranks used different experts. fp64 truth is made of stage 0."""
    model, config = build(Mixing()), _config(stage)
    zero_section = config["zero_optimization"]
    if how == "marked":
        assert len(zero.set_z3_leaf_modules(model, [Experts])) == 2
        assert zero.get_z3_leaf_modules(model) == [model.first, model.second]
    elif how == "config":
        zero_section["leaf_module"] = {"classes": "Experts"}
    engine = zrun_runtime.initialize(model=model, config=config)[0]
    for step in range(3):
        features, classes = Plain().batch(Spot(step, rank, 0))
        engine.backward(F.cross_entropy(engine(features, (rank + step) % 4), classes))
        engine.step()
    return gathered(engine.module)


def taken_over(rank: int, world: int, *, stage: int) -> tuple[str, bool]:
    """A second engine over a model whose first engine lives, and over one whose first engine was destroyed."""
    engine = stack_engine(stage)
    _train(engine, rank, 1)
    wanted = gathered(engine.module)
    said = _said(lambda: zrun_runtime.initialize(model=engine.module, config=_config(3))) if stage == 3 else ""
    engine.destroy()
    engine.destroy()
    again = zrun_runtime.initialize(model=engine.module, config=_config(stage))[0]
    found = gathered(again.module)
    same = all(torch.equal(found[name], wanted[name]) for name in wanted)
    return said, same and distance(flat(_train(again, rank)), flat(wanted)) > 0
