"""Which backwards make a step: the engine's methods that decide it, and when gradients leave this rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from zrun_runtime.answers import EngineAnswers
from zrun_runtime.errors import ConfigError, EngineError
from zrun_runtime.precision import DtypePolicy


class AccumulationControl(EngineAnswers):
    """The part of the engine that moves its window."""

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide from outside what is a boundary; holds until it is called again."""
        self._needs_managed("set_gradient_accumulation_boundary")
        self.window.forced = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep their gradients on this rank, whole; the next one outside reduces the sum.

        At every stage. Costs one full gradient in the accumulation dtype, however the plan shards gradients.

        Raises:
            EngineError: inside another such context.
        """
        if self.window.held:
            raise EngineError("no_sync: already inside it", "leave the outer context first")
        self.window.hold()
        try:
            yield
        finally:
            self.window.held = False

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Several backwards inside, one reduction at the end of the context (where these backwards reduce at all)."""
        self._needs_managed("coalesce_grad_reduction")
        with self.no_sync():
            yield
        self.zero.reducer.finish_backward()

    def _needs_managed(self, name: str) -> None:
        if not self.window.managed:
            raise EngineError(
                f"{name}: managed_gradient_accumulation is false, so every step() is an update",
                "leave the key out of the config, or the call out of the script",
            )

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Samples of all ranks in one optimizer step from now on, by another number of backwards a step.

        Raises:
            ConfigError: it is not a multiple of what all ranks take in one forward.
        """
        self._resize(train_batch_size, self.settings.micro_batch_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Samples of one rank in one forward from now on; the number of backwards a step stays."""
        steps = self.settings.accumulation_steps
        self._resize(micro_batch_size * steps * self.world.size, micro_batch_size)

    def _resize(self, total: int, micro: int) -> None:
        each = micro * self.world.size
        if total < 1 or micro < 1 or total % each:
            raise ConfigError(
                f"train_batch_size {total} is not a multiple of {micro} (micro batch) x {self.world.size} (ranks)",
                f"the nearest that is: {max(1, round(total / max(each, 1))) * each}",
            )
        self.settings = replace(
            self.settings, train_batch_size=total, micro_batch_size=micro, accumulation_steps=total // each
        )
        self.window.steps = self.settings.accumulation_steps
        self.window.dtype = self.window.dtype or DtypePolicy.from_config(self.settings).accum_dtype
