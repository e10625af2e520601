"""What the ranks run for test_checkpoint_more.py: disks of hosts, loaders, schedules, parts of a checkpoint."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import zrun_runtime

from .checkpoint_harm import said_by
from .checkpoint_uses import TOKENS, Net, SmallNet, config_of, engine_of, loss_of, mark_of, train
from .training import digest, gathered


def hosts_with_disks(rank: int, world: int, *, directory: str) -> dict[str, Any]:
    """Two hosts of two ranks, each with a disk: one loses its newest checkpoint, then an older one is damaged."""
    host, before, local = rank // 2, os.getcwd(), os.environ["LOCAL_RANK"]
    home = Path(directory, f"host{host}")
    home.mkdir(parents=True, exist_ok=True)
    os.chdir(home)
    os.environ["LOCAL_RANK"] = str(rank % 2)
    try:
        engine = engine_of(config_of(1, checkpoint={"use_node_local_storage": True}), SmallNet)
        marks = []
        for step in range(3):
            train(engine, step, step + 1)
            engine.save_checkpoint("ck", client_state={"rank": rank})
            marks.append(mark_of(engine))
        found: dict[str, Any] = {"files": sorted(os.listdir("ck/global_step3"))}
        path, state = engine.load_checkpoint("ck")
        found["all"] = path, state, mark_of(engine) == marks[2]
        torch.distributed.barrier()
        if rank == 2:
            shutil.rmtree("ck/global_step3")
            Path("ck/latest").write_text("global_step2")
        torch.distributed.barrier()
        path, state = engine.load_checkpoint("ck")
        found["newest on all"] = path, state, mark_of(engine) == marks[1]
        torch.distributed.barrier()
        if rank == 3:
            next(Path("ck/global_step2").glob("optimizer-00003*")).unlink()
        torch.distributed.barrier()
        found["damaged"] = said_by(lambda: engine.load_checkpoint("ck"))
        path, _ = engine.load_checkpoint("ck", fallback=True)
        found["fallback"] = path, mark_of(engine) == marks[0]
        torch.distributed.barrier()
        if rank == 0:
            for other in sorted(Path(directory).glob("host*/ck/global_step1")):
                shutil.copytree(other, Path(directory, "together", "global_step1"), dirs_exist_ok=True)
        torch.distributed.barrier()
        return {**found, "mark": {key: marks[0][key] for key in ("masters", "moments", "weights")}}
    finally:
        os.chdir(before)
        os.environ["LOCAL_RANK"] = local


def together(rank: int, world: int, *, directory: str) -> dict[str, Any]:
    """The files of both hosts in one directory, loaded by another number of ranks."""
    engine = engine_of(config_of(3), SmallNet, seed=9)
    engine.load_checkpoint(f"{directory}/together", tag="global_step1")
    mark = mark_of(engine)
    return {key: mark[key] for key in ("masters", "moments", "weights")}


def loader_position(rank: int, world: int, *, directory: str, resume: bool) -> list[list[int]]:
    """Samples of two rounds of a shuffled loader; saved after three steps, or loaded first."""
    data = TensorDataset(torch.arange(64))
    torch.manual_seed(0)
    model = SmallNet()
    config = config_of(1)
    del config["scheduler"]
    engine, _, loader, _ = zrun_runtime.initialize(model=model, training_data=data, config=config)
    first = 0
    if resume:
        engine.load_checkpoint(directory)
        first = engine.global_steps
    seen = []
    for number in range(2):
        if not resume or number:
            loader.sampler.set_epoch(number)
        for batch in loader:
            seen.append(batch[0].tolist())
            if resume or engine.global_steps < 3:
                engine.backward(loss_of(engine, engine.global_steps, 0, rank))
                engine.step()
            if not resume and engine.global_steps == 3 and not first:
                first = 3
                engine.save_checkpoint(directory)
    return seen


def chance_goes_on(rank: int, world: int, *, directory: str, workers: int, resume: bool) -> tuple[list[float], Any]:
    """Steps 3 to 7 with dropout, data from a loader of the engine: their losses, and the weights and moments then."""
    engine = engine_of(config_of(1), Net, seed=6 if resume else 0)
    data = TensorDataset(torch.randint(TOKENS, (64, 5), generator=torch.Generator().manual_seed(3)))
    loader = engine.deepspeed_io(data, num_local_io_workers=workers)
    losses = []
    if resume:
        engine.load_checkpoint(directory)
    for (tokens,) in loader:
        loss = F.cross_entropy(engine(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if engine.global_steps == 3:
            engine.save_checkpoint(directory)
    return losses if resume else losses[3:], mark_of(engine)


def schedule_goes_on(rank: int, world: int, *, directory: str) -> Any:
    """A client's optimizer and cosine schedule: ten steps, and five, a save, a load and five."""

    def fresh() -> Any:
        torch.manual_seed(0)
        model = SmallNet()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        config = config_of(2)
        del config["optimizer"], config["scheduler"]
        return zrun_runtime.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)[0]

    def rates(engine: Any, first: int, last: int) -> list[float]:
        found = []
        for step in range(first, last):
            train(engine, step, step + 1)
            found.append(engine.get_lr()[0])
        return found

    straight = fresh()
    wanted = rates(straight, 0, 10)
    engine = fresh()
    found = rates(engine, 0, 5)
    engine.save_checkpoint(directory)
    engine = fresh()
    engine.load_checkpoint(directory)
    found += rates(engine, 5, 10)
    return found == wanted, mark_of(engine) == mark_of(straight), wanted[-1]


def parts(rank: int, world: int, *, directory: str) -> dict[str, Any]:
    """Loading parts of a checkpoint, without the files that hold the others; save and load in every order."""
    found: dict[str, Any] = {}
    engine = engine_of(config_of(3), SmallNet)
    engine.save_checkpoint(directory, tag="fresh")  # before any step
    train(engine, 0, 3)
    engine.save_checkpoint(directory)
    mark = mark_of(engine)
    train(engine, 3, 4)
    engine.load_checkpoint(directory)
    engine.save_checkpoint(directory, tag="again")
    other = engine_of(config_of(1), SmallNet, seed=1)
    other.load_checkpoint(directory, tag="again")
    found["again"] = {k: mark_of(other)[k] == mark[k] for k in mark if k != "buffers"}
    other.load_checkpoint(directory, tag="fresh")
    found["fresh"] = mark_of(other)["counters"], not any(other.optimizer.state.values())
    torch.manual_seed(5)
    bare = {key: value for key, value in config_of(3).items() if key not in ("optimizer", "scheduler")}
    reader = zrun_runtime.initialize(model=SmallNet(), config=bare)[0]
    reader.load_checkpoint(directory, tag="again")
    found["without optimizer"] = digest(gathered(reader.module)) == mark["weights"]
    torch.distributed.barrier()
    if rank == 0:
        for file in Path(directory, "global_step3").glob("optimizer-*"):
            file.unlink()
    torch.distributed.barrier()
    found["missing"] = said_by(lambda: other.load_checkpoint(directory, tag="global_step3"))
    weights = engine_of(config_of(2), SmallNet, seed=2)
    train(weights, 0, 1)
    weights.load_checkpoint(directory, tag="global_step3", load_optimizer_states=False)
    after = mark_of(weights)
    found["weights"] = {k: after[k] == mark[k] for k in ("weights", "masters", "counters", "rates")}
    module = engine_of(config_of(0, "bf16"), SmallNet, seed=3)
    module.load_checkpoint(directory, tag="global_step3", load_module_only=True)
    found["module"] = (
        mark_of(module)["masters"] == mark["masters"],
        module.global_steps,
        module.get_lr() != mark["rates"],
    )
    loss = loss_of(engine, 0, 0, rank)
    engine.load_checkpoint(directory, tag="again")
    found["between"] = said_by(lambda: (engine.backward(loss), engine.step()))
    engine.zero_grad()
    found["removed"] = _removed_by_rank_0(engine, rank, directory) == mark["masters"]
    return found


def _removed_by_rank_0(engine: Any, rank: int, directory: str) -> Any:
    """The masters after a load of a directory that rank 0 removes as soon as its own load is done; others are slow."""
    preadv = os.preadv
    if rank:
        os.preadv = lambda *arguments: (time.sleep(0.3), preadv(*arguments))[1]
    try:
        engine.load_checkpoint(directory, tag="again")
    finally:
        os.preadv = preadv
    if rank == 0:
        shutil.rmtree(directory)
    return mark_of(engine)["masters"]


class Other(SmallNet):
    """With a layer more and one of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = torch.nn.Linear(3, 3)


def misfit(rank: int, world: int, *, directory: str) -> dict[str, str]:
    """What is said about a model that is another one; what strict=False lets pass."""
    engine = engine_of(config_of(1), SmallNet)
    engine.save_checkpoint(directory)
    other = engine_of(config_of(1), Other)
    before = mark_of(other)
    said = said_by(lambda: other.load_checkpoint(directory))
    same = mark_of(other) == before
    return {"said": said, "same": str(same), "lax": said_by(lambda: other.load_checkpoint(directory, None, False))}
