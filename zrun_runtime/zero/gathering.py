"""GatheredParameters: whole values of sharded parameters for a while, to read and to edit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from zrun_runtime.engine import Engine
from zrun_runtime.errors import EngineError
from zrun_runtime.flat_group import FlatGroup
from zrun_runtime.zero.homes import Place, place_of


class GatheredParameters:
    """Full values of parameters inside the context; edits made inside reach shards and master weights.

    A collective: every rank enters and leaves with the same parameters, in any order. The values of `modifier_rank`
    become everybody's. Without one, rank 0's do if any rank edited one. What no engine and no `zero.Init` manages
    (buffers, plain parameters) is left alone.

    Raises:
        EngineError: `modifier_rank` is no rank, or a module was given in place of its parameters.
    """

    def __init__(
        self,
        params: Tensor | Iterable[Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        if isinstance(params, nn.Module):
            raise EngineError("GatheredParameters: a module is no list of parameters", "give its parameters()")
        wanted = [params] if isinstance(params, Tensor) else list(params)
        self.source = modifier_rank or 0
        self.forced = modifier_rank is not None
        found = [place_of(parameter) for parameter in wanted] if enabled else []
        # Callers pass sets, whose order differs between ranks; tickets are the same everywhere.
        self.places = sorted({p.group: p for p in found if p is not None}.values(), key=lambda p: p.group.ticket)
        self._versions: dict[FlatGroup, list[int]] = {}
        if self.places and not 0 <= self.source < self.places[0].collectives.world.size:
            size = self.places[0].collectives.world.size
            raise EngineError(
                f"GatheredParameters: modifier_rank {modifier_rank} is no rank: there are {size}",
                f"give one of 0 to {size - 1}, or None where nothing is changed",
            )

    def __enter__(self) -> None:
        for place in self.places:
            place.holder.pin([place.group])
            self._versions[place.group] = _versions(place)

    def __exit__(self, *error: Any) -> None:
        try:
            for place in self.places if error[0] is None else ():
                self._take_edits(place)
        finally:
            for place in self.places:
                place.holder.unpin([place.group])

    def _take_edits(self, place: Place) -> None:
        group = place.group
        moved = group.take_back()
        edited = moved or self.forced or _versions(place) != self._versions[group] or group.edited()
        heard = place.collectives.exchange(group.edit_ticket, (float(edited),)).wait()
        if bool(heard[:, 0].any()):
            group.store(self.source)


@contextmanager
def unwrap_model_for_generation(engine: Engine) -> Iterator[nn.Module]:
    """The model of an engine, all of its values full meanwhile: to generate with it, in the order one likes."""
    with GatheredParameters(list(engine.module.parameters())):
        yield engine.module


def _versions(place: Place) -> list[int]:
    return [p._version for p in place.group.spec.parameters]
