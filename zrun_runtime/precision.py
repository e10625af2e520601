"""What types numbers have: of parameters, of reductions, of added-up gradients; and the loss scale of fp16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from zrun_runtime.config import Config, Fp16Config
from zrun_runtime.errors import ZeroRuntimeError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class LossScaleError(ZeroRuntimeError):
    """Gradients overflow although the loss scale cannot fall any further."""


@dataclass(frozen=True)
class DtypePolicy:
    """The types a run computes, reduces and adds up in.

    param_dtype: floating point parameters are cast to it; None leaves them as they are (fp32 training).
    reduce_dtype: gradients are reduced in it; None is each gradient's own type.
    accum_dtype: gradients are added up in it between the micro-batches of a step; None is each gradient's own type.
    buffer_dtype: floating point buffers are cast to it; None leaves them as they are.
    """

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    accum_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None = None

    @classmethod
    def from_config(cls, config: Config) -> DtypePolicy:
        """Gradients are added up in fp32 wherever there is something to add up, unless grad_accum_dtype says otherwise:
        the sum of many small 16-bit numbers loses the small ones."""
        accum = config.grad_accum_dtype
        if accum is None and (config.accumulation_steps > 1 or not config.managed_gradient_accumulation):
            accum = "fp32"
        return cls(
            param_dtype=None if config.precision == "fp32" else DTYPES[config.precision],
            reduce_dtype=_dtype(config.communication_data_type),
            accum_dtype=_dtype(accum),
            buffer_dtype=_dtype(config.buffer_dtype),
        )


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else DTYPES[name]


@dataclass(frozen=True)
class LossScaleSettings:
    """How a loss scale behaves.

    static: the scale never changes. window: steps without overflow after which it doubles. hysteresis: overflows that
    are taken before it is halved. consecutive_hysteresis: a good step makes up for all overflows before it.
    minimum: an overflow at this scale is an error.
    """

    initial: float
    static: bool = False
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    minimum: float = 1.0

    @classmethod
    def from_config(cls, fp16: Fp16Config) -> LossScaleSettings:
        """The settings of the section fp16; loss_scale 0 means that the scale adapts."""
        static = fp16.loss_scale != 0
        return cls(
            initial=fp16.loss_scale if static else float(2**fp16.initial_scale_power),
            static=static,
            window=fp16.loss_scale_window,
            hysteresis=fp16.hysteresis,
            consecutive_hysteresis=fp16.consecutive_hysteresis,
            minimum=fp16.min_loss_scale,
        )


@dataclass(frozen=True)
class LossScaler:
    """The loss scale and what it remembers: a pure state machine. Each step leads to the next scaler, by `after`."""

    settings: LossScaleSettings
    scale: float
    hysteresis_left: int
    step: int = 0  # steps so far, skipped ones included
    last_overflow: int = -1  # the step of the last overflow

    @classmethod
    def start(cls, settings: LossScaleSettings) -> LossScaler:
        """The scaler before the first step."""
        return cls(settings, settings.initial, settings.hysteresis)

    def after(self, overflow: bool) -> LossScaler:
        """The scaler after one more step.

        Args:
            overflow: whether a gradient was not finite on any rank, so that the step was skipped.

        Raises:
            LossScaleError: overflow, and the scale is at its minimum.
        """
        if self.settings.static:
            changed = self
        elif overflow:
            changed = replace(self._after_overflow(), last_overflow=self.step)
        else:
            changed = self._after_good_step()
        return replace(changed, step=self.step + 1)

    def _after_overflow(self) -> LossScaler:
        if self.settings.hysteresis > 1 and self.hysteresis_left > 1:
            return replace(self, hysteresis_left=self.hysteresis_left - 1)
        minimum = self.settings.minimum
        if self.scale == minimum:
            raise LossScaleError(
                f"step {self.step}: gradients are not finite, and the loss scale is at its minimum {minimum:g}",
                "look for inf or NaN in the loss, lower the learning rate, or train in bf16",
            )
        return replace(self, scale=max(self.scale / 2, minimum))

    def _after_good_step(self) -> LossScaler:
        full, good = self.settings.hysteresis, self.step - self.last_overflow - 1
        left = full if self.settings.consecutive_hysteresis else self.hysteresis_left
        if good > 0 and good % self.settings.window == 0:
            return replace(self, scale=self.scale * 2, hysteresis_left=full)
        return replace(self, hysteresis_left=left)

    def change_since(self, before: LossScaler) -> str:
        """What an overflow changed, in words."""
        if self.scale != before.scale:
            return f"loss scale {before.scale:g} -> {self.scale:g}"
        if self.settings.static:
            return f"loss scale {self.scale:g} is fixed"
        return f"loss scale stays {self.scale:g}; hysteresis {before.hysteresis_left} -> {self.hysteresis_left}"

    def state_dict(self) -> dict[str, float | int]:
        """What a checkpoint has to hold; the settings come from the config."""
        return {
            "scale": self.scale,
            "hysteresis_left": self.hysteresis_left,
            "step": self.step,
            "last_overflow": self.last_overflow,
        }

    def restored(self, state: Mapping[str, float | int]) -> LossScaler:
        """The scaler that `state` came from, under these settings."""
        return replace(
            self,
            scale=float(state["scale"]),
            hysteresis_left=int(state["hysteresis_left"]),
            step=int(state["step"]),
            last_overflow=int(state["last_overflow"]),
        )
