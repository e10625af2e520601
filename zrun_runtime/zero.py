"""Names of the `deepspeed.zero` and `deepspeed.utils` kind: whole values of sharded parameters, to read and to edit."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zrun_runtime.consolidate import find, full_value
from zrun_runtime.engine import Engine
from zrun_runtime.flat_group import FlatGroup
from zrun_runtime.zero_model import ZeroModel

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def remember(engine: Engine) -> None:
    """Let the functions below find the engine of a parameter."""
    _engines.add(engine)


def _zero_of(parameter: nn.Parameter) -> ZeroModel | None:
    return next((e.zero for e in _engines if find(e.zero, parameter) is not None), None)


class GatheredParameters:
    """Full values of parameters inside the context; edits made inside reach shards and master weights.

    A collective: every rank enters and leaves with the same parameters. If any rank edited one (its version changed),
    the values of `modifier_rank` (None: rank 0) become everybody's. Parameters that no engine manages are left alone.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        wanted = [params] if isinstance(params, nn.Parameter) else list(params)
        self.source = modifier_rank or 0
        self.forced = modifier_rank is not None
        self.groups: dict[FlatGroup, ZeroModel] = {}
        for parameter in wanted if enabled else ():
            zero = _zero_of(parameter)
            found = find(zero, parameter) if zero is not None else None
            if zero is not None and found is not None:
                self.groups[found[0]] = zero
        self._versions: dict[FlatGroup, list[int]] = {}

    def __enter__(self) -> None:
        for group, zero in self.groups.items():
            zero.holder.pin([group])
            self._versions[group] = [p._version for p in group.spec.parameters]

    def __exit__(self, *error: Any) -> None:
        for group, zero in self.groups.items():
            edited = [p._version for p in group.spec.parameters] != self._versions[group]
            if error[0] is None:
                heard = zero.collectives.exchange(group.ticket, (float(edited),)).wait()
                if bool(heard[:, 0].any()):
                    group.store(self.source)
            zero.holder.unpin([group])


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The fp32 master values of a parameter, full, on every rank; None if no engine trains it. A collective."""
    zero = _zero_of(param)
    group = find(zero, param) if zero is not None else None
    if zero is None or group is None or group[0].master is None:
        return None
    return full_value(zero, param, group[0].master.detach())


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The reduced gradient of a parameter between a boundary backward and `step`; None at other times. A collective."""
    zero = _zero_of(param)
    for grads in zero.reducer.order if zero is not None else ():
        if zero is not None and any(p is param for p in grads.group.spec.parameters):
            return full_value(zero, param, grads.reduced)
    return None


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """One kind of optimizer state of a parameter (`exp_avg`, `momentum_buffer`), full, on every rank. A collective."""
    zero = _zero_of(param)
    group = find(zero, param) if zero is not None else None
    if zero is None or group is None or zero.updater is None or group[0].master is None:
        return None
    value = zero.updater.optimizer.state.get(group[0].master, {}).get(optim_state_key)
    return full_value(zero, param, value) if isinstance(value, torch.Tensor) and value.dim() else value
