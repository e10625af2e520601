"""Master weights, gradients and optimizer state of single parameters: whole or this rank's part, to read and to set.

Gradients exist between an accumulation boundary's backward and its step. They are shown without the loss scale, mean
over ranks, before clipping. What is set is what the norm and the step use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from zrun_runtime.consolidate import full_value
from zrun_runtime.errors import ParameterError
from zrun_runtime.group_state import GroupState
from zrun_runtime.reducer import GroupGrads
from zrun_runtime.state_homes import MASTER
from zrun_runtime.zero.homes import Place, place_of


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The master values of a parameter, full, on every rank; None if no engine trains it. A collective."""
    place, master = _master(param)
    return _full(place, param, master)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set the master values, the same on every rank; the model sees them at once. A collective."""
    _set_master(param, value, _put)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The reduced gradient of a parameter; None when there is none (see the module). A collective."""
    place, grads = _grads(param)
    return _unscaled(place, _full(place, param, grads.reduced) if grads is not None else None)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set the reduced gradient, the same on every rank."""
    _set_grad(param, value, _put)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """One kind of optimizer state (`exp_avg`, `momentum_buffer`), full, on every rank; None before the first step.
    A collective."""
    place, state = _state(param, optim_state_key)
    return _full(place, param, state) if state is None or state.dim() else state


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set one kind of optimizer state, the same on every rank.

    Raises:
        ParameterError: there is no such state (yet).
    """
    _set_state(param, optim_state_key, value, _put)


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """This rank's part of the master values, flat: a view, which may be empty."""
    return _part(*_master(param))


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of the master values. A collective where parameters are full between uses."""
    _set_master(param, value, _put_part)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's part of the reduced gradient, flat."""
    place, grads = _grads(param)
    return _unscaled(place, _part(place, grads.reduced) if grads is not None else None)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of the reduced gradient."""
    _set_grad(param, value, _put_part)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """This rank's part of one kind of optimizer state, flat: a view."""
    return _part(*_state(param, optim_state_key))


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set this rank's part of one kind of optimizer state.

    Raises:
        ParameterError: there is no such state (yet).
    """
    _set_state(param, optim_state_key, value, _put_part)


def safe_update_full_grad_vectorized(
    params: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor | None]
) -> None:
    """Replace each gradient by `update_func(gradient, parameter)` (None: it was changed in place). A collective."""
    for param in params:
        grad = safe_get_full_grad(param)
        if grad is not None:
            changed = update_func(grad, param)
            safe_set_full_grad(param, grad if changed is None else changed)


# ---- where things are


def _state_of(param: nn.Parameter) -> tuple[Place | None, GroupState | None]:
    place = place_of(param)
    if place is None or place.engine is None or place.engine.updater is None or place.group.master is None:
        return place, None
    return place, place.engine.updater.read_state(place.group)


def _master(param: nn.Parameter) -> tuple[Place | None, Tensor | None]:
    place, state = _state_of(param)
    return place, state.master if state is not None else None


def _grads(param: nn.Parameter) -> tuple[Place | None, GroupGrads | None]:
    place = place_of(param)
    order = place.engine.zero.reducer.order if place is not None and place.engine is not None else []
    return place, next((g for g in order if place is not None and g.group is place.group), None)


def _state(param: nn.Parameter, key: str) -> tuple[Place | None, Tensor | None]:
    place, state = _state_of(param)
    if state is None:
        return place, None
    value = state.moments.get(key, state.scalars.get(key))
    return place, value if isinstance(value, Tensor) else None


def _keep(place: Place | None, kind: str, changed: Tensor | None) -> None:
    """Put back state that was read and changed, and let the model see it: a collective where that is the master."""
    updater = place.engine.updater if place is not None and place.engine is not None else None
    if place is None or updater is None or changed is None:
        return
    updater.homes.change(place.group, kind, changed)
    if kind == MASTER:
        place.group.publish().wait()


_Put = Callable[[Place | None, Tensor | None, Tensor], None]  # _put, or _put_part


def _set_master(param: nn.Parameter, value: Tensor, put: _Put) -> None:
    place, master = _master(param)
    put(place, master, value)
    _keep(place, MASTER, master)


def _set_grad(param: nn.Parameter, value: Tensor, put: _Put) -> None:
    place, grads = _grads(param)
    if grads is not None:
        if grads.reduced is not None and grads.group.master is not None:
            grads.reduced = grads.reduced.to(grads.group.master.dtype)  # as exact as what is set
        put(place, grads.reduced, value * _scale(place))
        grads.square_sum = None


def _set_state(param: nn.Parameter, key: str, value: Tensor, put: _Put) -> None:
    place, state = _state(param, key)
    put(place, _existing(state, key), value)
    _keep(place, key, state)


def _existing(state: Tensor | None, key: str) -> Tensor:
    if state is None:
        raise ParameterError(f"there is no optimizer state {key!r} of this parameter", "run a step first")
    return state


def _scale(place: Place | None) -> float:
    return place.engine.loss_scale() if place is not None and place.engine is not None else 1.0


def _unscaled(place: Place | None, grad: Tensor | None) -> Tensor | None:
    return grad / _scale(place) if grad is not None else None


def _full(place: Place | None, param: nn.Parameter, stored: Tensor | None) -> Tensor | None:
    if place is None or place.engine is None:
        return None
    return full_value(place.engine.zero, param, stored)


# ---- parts. stored: (shard_numel,), or (padded_numel,) where state is whole on every rank


def _span(place: Place, stored: Tensor) -> tuple[int, int, int]:
    """(first element in `stored`, first element in the flattened parameter, how many)."""
    layout = place.group.layout
    if stored.numel() == layout.padded_numel:
        return layout.offsets[place.index], 0, layout.numels[place.index]
    for fragment in layout.fragments(place.collectives.world.rank):
        if fragment.index == place.index:
            return fragment.shard_offset, fragment.param_offset, fragment.numel
    return 0, 0, 0


def _part(place: Place | None, stored: Tensor | None) -> Tensor | None:
    if place is None or stored is None:
        return None
    start, _, numel = _span(place, stored)
    return stored[start : start + numel]


def _put(place: Place | None, stored: Tensor | None, value: Tensor) -> None:
    if place is None or stored is None:
        return
    view = place.group.views[place.index]
    if value.shape != view.shape:
        raise ParameterError(
            f"{place.group.spec.names[place.index]}: a value of shape {tuple(value.shape)} for {tuple(view.shape)}"
        )
    flat = torch.empty(view.numel(), dtype=stored.dtype, device=stored.device)
    flat.as_strided(view.size(), view.stride()).copy_(value)
    start, first, numel = _span(place, stored)
    stored[start : start + numel] = flat[first : first + numel]


def _put_part(place: Place | None, stored: Tensor | None, value: Tensor) -> None:
    part = _part(place, stored)
    if part is None or place is None:
        return
    if value.numel() != part.numel():
        raise ParameterError(
            f"{place.group.spec.names[place.index]}: this rank has {part.numel()} elements of it, not {value.numel()}"
        )
    part.copy_(value.reshape(-1))
