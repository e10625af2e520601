"""The classic loop, Accelerate, and Lightning, case by case; started by test_loops.py, not imported.

python loop_cases.py --out FILE CASE...
"""

from __future__ import annotations

import os
from collections import OrderedDict
from types import SimpleNamespace

import torch
from driver import main
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 6
generator = torch.Generator().manual_seed(0)
FEATURES, CLASSES = torch.randn(64, 8, generator=generator), torch.randint(4, (64,), generator=generator)
DATA = TensorDataset(FEATURES, CLASSES)
RANK = int(os.environ["RANK"])


def make(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))


def rate(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def mean(loss):
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    return float(total) / torch.distributed.get_world_size()


# ---- references


def ddp(run, accumulation=1, clip=0.5):
    """Plain DDP. Ranks take turns batch by batch, as with Accelerate."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule, losses, norms = rate(optimizer), [], []
    for step, start in enumerate(range(4 * RANK, 64, 8)):
        loss = nn.functional.cross_entropy(model(FEATURES[start : start + 4]), CLASSES[start : start + 4])
        losses.append(mean(loss))
        (loss / accumulation).backward()
        if (step + 1) % accumulation == 0:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return {"losses": losses, "norms": norms}


# ---- deepspeed itself


def classic(run, stage):
    import deepspeed

    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.5, "zero_optimization": {"stage": stage}}
    args = SimpleNamespace(deepspeed_config=config, local_rank=RANK)
    engine, optimizer, _, _ = deepspeed.initialize(
        args=args, model=model, optimizer=optimizer, model_parameters=model.parameters(), lr_scheduler=rate
    )
    criterion, losses, norms = nn.CrossEntropyLoss(), [], []
    for start in range(4 * RANK, 64, 8):
        inputs, labels = FEATURES[start : start + 4].to(engine.device), CLASSES[start : start + 4].to(engine.device)
        loss = criterion(engine(inputs), labels)
        engine.backward(loss)
        engine.step()
        losses.append(mean(loss))
        norms.append(float(engine.get_global_grad_norm()))
    wrappers = deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3, deepspeed.DeepSpeedOptimizer
    return {
        "losses": losses,
        "norms": norms,
        "kinds": [isinstance(engine, deepspeed.DeepSpeedEngine), *(isinstance(optimizer, w) for w in wrappers)],
        "overflow": optimizer.overflow,
    }


def tested(run):
    """A trained model that is initialized once more, to be tested, as Lightning does: without any hook on it."""
    import deepspeed

    model = make()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[0]
    engine.backward(engine(FEATURES[:4]).sum())
    engine.step()
    engine.save_checkpoint(run.directory)
    trained = engine(FEATURES[:4]).sum()
    for module in model.modules():
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            setattr(module, kind, OrderedDict())
    again = deepspeed.initialize(model=model, model_parameters=[], config=config)[0]
    found = {"same": float(again(FEATURES[:4]).sum()) == float(trained)}
    try:
        again.load_checkpoint(run.directory)
    except RuntimeError as error:
        found["error"] = str(error)
    engine.load_checkpoint(run.directory)
    return {**found, "loaded": float(again(FEATURES[:4]).sum()) == float(trained)}


def optimizers(run):
    """DeepSpeed's optimizers by name take steps like torch's."""
    import deepspeed
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    made = {
        "FusedAdam": lambda p: FusedAdam(p, lr=1e-2, weight_decay=0.1),
        "DeepSpeedCPUAdam": lambda p: DeepSpeedCPUAdam(p, lr=1e-2, weight_decay=0.1),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
        "coupled": lambda p: FusedAdam(p, lr=1e-2, weight_decay=0.1, adam_w_mode=False),
        "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
        "DeepSpeedCPUAdagrad": lambda p: DeepSpeedCPUAdagrad(p),
        "Adagrad": lambda p: torch.optim.Adagrad(p),
        "DeepSpeedCPULion": lambda p: DeepSpeedCPULion(p),
        "FusedLion": lambda p: FusedLion(p),
        "FusedLamb": lambda p: FusedLamb(p),
    }
    found = {}
    for name, optimizer in made.items():
        model = make()
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}
        engine = deepspeed.initialize(model=model, optimizer=optimizer(model.parameters()), config=config)[0]
        losses = []
        for start in range(4 * RANK, 32, 8):
            loss = nn.functional.cross_entropy(engine(FEATURES[start : start + 4]), CLASSES[start : start + 4])
            engine.backward(loss)
            engine.step()
            losses.append(mean(loss))
        found[name] = losses
    return found


def asks(run, stage):
    """What LLaVA's scripts and TRL ask of parameters and of the optimizer, in their way."""
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    model = make()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW"},
    }
    engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)
    named = hasattr(model[0].weight, "ds_id")
    found = {"named": named, "whole": [], "numel": getattr(model[0].weight, "ds_numel", model[0].weight.numel())}
    for parameter, other in zip(model.parameters(), make().parameters(), strict=True):
        if hasattr(parameter, "ds_id") and parameter.ds_status != ZeroParamStatus.AVAILABLE:
            with deepspeed.zero.GatheredParameters([parameter]):
                whole = parameter.data.detach().cpu().clone()
                assert parameter.ds_status == ZeroParamStatus.AVAILABLE
        else:
            whole = parameter.detach().cpu().clone()
        found["whole"].append(torch.equal(whole, other))
    offload = getattr(optimizer, "parameter_offload", None)
    if offload is not None:
        with deepspeed.zero.GatheredParameters(engine.parameters()):
            for _, parameter in [*offload.module.named_parameters(), *offload.module.ds_external_parameters()]:
                parameter.ds_active_sub_modules.clear()
            for hook in offload.forward_hooks + offload.backward_hooks:
                hook.remove()
            offload.forward_hooks, offload.backward_hooks = [], []
            for _ in range(1 + RANK):  # ranks may do different things
                found["alone"] = list(model(FEATURES[:2]).shape)
            offload._register_deepspeed_module(offload.module)
    engine.backward(engine(FEATURES[:4]).sum())
    engine.step()
    return found


# ---- accelerate


def accelerate(run, stage, accumulation=1, offload="none"):
    from accelerate import Accelerator, DeepSpeedPlugin

    plugin = DeepSpeedPlugin(
        zero_stage=stage,
        gradient_accumulation_steps=accumulation,
        gradient_clipping=0.5,
        offload_optimizer_device=offload,
        zero3_save_16bit_model=True,
    )
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=accumulation)
    model, loader = make(), DataLoader(DATA, batch_size=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 2))  # stepped on each process
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    losses, norms = [], []
    for features, classes in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(features), classes)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())

    def after_one_more():
        loss = nn.functional.cross_entropy(model(FEATURES[:4]), CLASSES[:4])
        for _ in range(accumulation):
            accelerator.backward(nn.functional.cross_entropy(model(FEATURES[:4]), CLASSES[:4]))
        return float(loss)

    accelerator.save_state(str(run.directory / "state"))
    first = [after_one_more(), after_one_more()]
    accelerator.load_state(str(run.directory / "state"))
    again = [after_one_more(), after_one_more()]
    accelerator.save_model(model, str(run.directory / "model"))
    weights = accelerator.get_state_dict(model)
    return {
        "losses": losses,
        "norms": norms,
        "processes": accelerator.num_processes,
        "type": accelerator.distributed_type.value,
        "resumed": first == again and first[0] != first[1],
        "weights": sorted(weights or []),
        "saved": sorted(path.name for path in (run.directory / "model").iterdir()) if RANK == 0 else [],
        "unwrapped": accelerator.unwrap_model(model) is model.module,
    }


def several(run):
    """A teacher at stage 3 and a student at stage 2 in one process, as Accelerate's guide has it."""
    from accelerate import Accelerator, DeepSpeedPlugin

    three = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0}
    plugins = {"student": DeepSpeedPlugin(zero_stage=2), "teacher": DeepSpeedPlugin(hf_ds_config=three)}
    accelerator = Accelerator(deepspeed_plugins=plugins)
    student, loader = make(1), DataLoader(DATA, batch_size=4)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    student, optimizer, loader = accelerator.prepare(student, optimizer, loader)
    accelerator.state.select_deepspeed_plugin("teacher")
    teacher = accelerator.prepare(make(2))
    teacher.eval()
    accelerator.state.select_deepspeed_plugin("student")
    losses = []
    for _ in range(3):
        for features, _ in loader:
            with torch.no_grad():
                wanted = teacher(features)
            loss = nn.functional.mse_loss(student(features), wanted)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    return {"losses": losses}


def misled(run):
    """Accelerate told wrongly how many processes there are."""
    import deepspeed
    from accelerate.state import PartialState

    PartialState()
    PartialState._shared_state["num_processes"] = 1
    try:
        deepspeed.initialize(model=make(), config={"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam"}})
    except RuntimeError as error:
        return {"error": str(error)}
    return {"error": ""}


def unwrapped(run):
    """Accelerate without DeepSpeed, but with its package there."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = make()
    wrapped = accelerator.prepare(model)
    return {"same": accelerator.unwrap_model(wrapped) is model, "type": accelerator.distributed_type.value}


# ---- lightning


def lightning(run, stage=None, accumulation=1):
    from lightning_cpu import fit

    return fit(run.directory, stage, accumulation, make, DATA, rate)


def fabric(run, stage):
    from lightning_cpu import fabric as use

    return use(run.directory, stage, make, DATA)


if __name__ == "__main__":
    main(globals(), lambda plain, directory: SimpleNamespace(directory=directory))
