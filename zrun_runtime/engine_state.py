"""Whole weights in and out of an engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from torch import nn

from zrun_runtime.accumulation import AccumulationControl
from zrun_runtime.consolidate import load_module_state_dict, module_state_dict
from zrun_runtime.errors import EngineError
from zrun_runtime.parking import Parking


class EngineState(AccumulationControl):
    """The part of the engine that gives and takes weights."""

    module: nn.Module
    training_dataloader: Any = None  # what `initialize` made of its training_data

    @cached_property
    def parking(self) -> Parking:
        """Where `offload_states` puts what it moves."""
        return Parking(self.zero)

    @contextmanager
    def gathered(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """The full values of these parameters inside; see zero.GatheredParameters, which also takes edits."""
        groups = [g for g in self.zero.groups if any(p is q for p in parameters for q in g.spec.parameters)]
        self.zero.holder.pin(groups)
        try:
            yield
        finally:
            self.zero.holder.unpin(groups)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The model's own state dict with full values on the CPU: on rank 0 where they are sharded, {} elsewhere.

        As part of another module the engine gives the model's names, without "module.". Arguments: those of
        `module_state_dict`.
        """
        return self.module_state_dict(*args, **kwargs)

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """As `state_dict`, with names prefixed, put into `destination`, frozen parameters left out. A collective.

        Raises:
            EngineError: `keep_vars`, for which there is nothing to keep: the values are copies.
        """
        if keep_vars:
            raise EngineError("module_state_dict: keep_vars is not possible", "the values are copies; leave it out")
        state = module_state_dict(self.module, self.zero)
        frozen = {name for name, p in self.module.named_parameters(remove_duplicate=False) if not p.requires_grad}
        found = destination if destination is not None else OrderedDict()
        found.update((prefix + k, v) for k, v in state.items() if not (exclude_frozen_parameters and k in frozen))
        for name, versions in getattr(state, "_metadata", {}).items():  # what torch keeps beside the values
            vars(found).setdefault("_metadata", OrderedDict())[(prefix + name).rstrip(".")] = versions
        return found

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """As `module_state_dict` on rank 0, None elsewhere; trainers call it by this name. A collective."""
        state = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        return state if self.world.rank == 0 else None

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Load full values by name into parameters (master weights too) and buffers; rank 0's count. A collective.

        Args:
            checkpoint: as `state_dict` gives it; ranks other than 0 may pass an empty one.
            custom_load_fn: called with src=checkpoint, dst=the model, whose parameters are full meanwhile.
            fetch_z3_params: has no effect: sharded parameters are always gathered, a group at a time.

        Raises:
            EngineError: names or shapes do not fit; on every rank.
        """
        load_module_state_dict(self.module, self.zero, checkpoint, strict, custom_load_fn)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As `load_module_state_dict`; returns nothing."""
        return self.load_module_state_dict(state_dict, strict)

    def offload_states(
        self,
        include: Iterable[Any] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move state from the device to the host until `reload_states`; forwards may run meanwhile, training may not.

        Args:
            include: of optim_states, hp_params (master weights), lp_params (shards), lp_grads, contiguous_grad_buffer;
                None: all. Gradients do not exist between steps; weights that are whole between uses stay.
            device: "cpu"; "none" does nothing. non_blocking has no effect.

        Raises:
            EngineError: another device, nothing is trained, or gradients wait for a step.
        """
        kind = str(getattr(device, "value", device))
        if kind == "none":
            return
        if kind != "cpu":
            raise EngineError(f"offload_states: device {kind!r} is not possible", 'use "cpu", or offload in the config')
        if self.updater is None:
            raise EngineError("offload_states: nothing is trained, so there is no such state")
        self.parking.park(include, pin_memory)

    def _needs_states(self, name: str) -> None:
        if self.zero.removed:
            raise EngineError(f"{name}: this engine was destroyed", "give its model to initialize() again")
        if self.parking.occupied:
            raise EngineError(
                f"{name}: state was moved to the host by offload_states()", "call reload_states() before it"
            )

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move back what `offload_states` has moved."""
        self.parking.leave()

    def empty_partition_cache(self) -> None:
        """Free full values of sharded parameters that nobody holds."""
        self.zero.holder.reset()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """As part of another module that loads: its state dict has the names that `state_dict` gave it."""
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[f"{prefix}module.{name[len(prefix) :]}"] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *rest)
