"""State that is moved to the host for a while, for a phase that needs the device's memory (generation, evaluation)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zrun_runtime.errors import EngineError
from zrun_runtime.flat_group import FlatGroup
from zrun_runtime.tiers.host import host_empty, is_host
from zrun_runtime.zero_model import ZeroModel

KINDS = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
Place = tuple[Callable[[], Tensor], Callable[[Tensor], None]]  # to read and to replace a tensor


class Parking:
    """What of one model is on the host now that lives on the device."""

    def __init__(self, zero: ZeroModel) -> None:
        self.zero = zero
        self._moved: list[tuple[Place, torch.device]] = []

    @property
    def occupied(self) -> bool:
        """Something is here."""
        return bool(self._moved)

    def park(self, include: Iterable[Any] | None, pin: bool) -> None:
        """Move these kinds of state to the host (None: all). What is there already stays, and so do weights that the
        model reads where they are; gradients do not exist between steps.

        Raises:
            EngineError: no such kind, or gradients wait for a step.
        """
        kinds = {str(getattr(kind, "name", kind)) for kind in include} if include is not None else set(KINDS)
        if unknown := sorted(kinds - set(KINDS)):
            raise EngineError(f"offload_states: no such state: {', '.join(unknown)}", f"there are {', '.join(KINDS)}")
        if any(grads.reduced is not None or grads.buffer is not None for grads in self.zero.reducer.order):
            raise EngineError("offload_states: gradients wait for a step", "call it after step()")
        for group in self.zero.groups:
            for read, put in self._places(group, kinds):
                tensor = read()
                if not is_host(tensor.device):
                    put(host_empty(tensor.numel(), tensor.dtype, pin).copy_(tensor))
                    self._moved.append(((read, put), tensor.device))

    def _places(self, group: FlatGroup, kinds: set[str]) -> Iterator[Place]:
        weights, updater = group.weights, self.zero.updater
        on_disk = group.shard.stride() == (0,)
        if "lp_params" in kinds and group.comes_and_goes and not on_disk and (weights is None or weights.apart):
            yield partial(getattr, group, "shard"), partial(_put_shard, group)
        if weights is None or weights.elsewhere or updater is None:
            return
        if "hp_params" in kinds and weights.apart:
            yield weights.parameter.detach, weights.put
        state = updater.optimizer.state.get(weights.parameter, {})
        for name, value in list(state.items()):
            if "optim_states" in kinds and isinstance(value, Tensor) and value.dim():
                yield partial(state.__getitem__, name), partial(state.__setitem__, name)

    def leave(self) -> None:
        """Move everything back."""
        for (read, put), device in self._moved:
            put(read().to(device, copy=True))
        self._moved.clear()


def _put_shard(group: FlatGroup, values: Tensor) -> None:
    group.home.values = values
    if group.weights is not None:
        group.weights.move(values)
