"""Questions about the state of a model that is laid out: how large it is, and where a gradient went wrong."""

from __future__ import annotations

from torch import Tensor

from zrun_runtime.zero_model import ZeroModel


def first_nonfinite(zero: ZeroModel) -> str | None:
    """The first parameter, in the model's order, with a non-finite reduced gradient on some rank. A collective."""
    named = list(zero.model.named_parameters())
    number = {id(parameter): index for index, (_, parameter) in enumerate(named)}
    bad = [len(named)]
    for grads in zero.reducer.order:
        mine, layout = zero.reducer.own_slice(grads), grads.group.layout
        for part in layout.fragments(zero.collectives.world.rank):
            if not mine[part.shard_offset : part.shard_offset + part.numel].isfinite().all():
                bad.append(number.get(id(grads.group.spec.parameters[part.index]), len(named)))
    first = int(zero.collectives.exchange(zero.ticket, (min(bad),)).wait()[:, 0].min())
    return named[first][0] if first < len(named) else None


def state_bytes(zero: ZeroModel) -> dict[str, int]:
    """Bytes of model state that this rank holds now, by kind."""
    held = {"params": 0, "master": 0, "grads": 0, "optimizer": 0}
    for group in zero.groups:
        for kind, count in group.nbytes().items():
            held[kind] += count
    for grads in zero.reducer.order:
        held["grads"] += sum(t.nbytes for t in (grads.buffer, grads.reduced) if t is not None)
    if zero.updater is not None:
        for state in zero.updater.optimizer.state.values():
            held["optimizer"] += sum(v.nbytes for v in state.values() if isinstance(v, Tensor))
    return held
