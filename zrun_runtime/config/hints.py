"""What the program knows and a config may leave to it ("auto")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AutoHints:
    """Facts from which "auto" is resolved; None where nothing is known.

    hidden_size: width of the model, from which bucket sizes follow. model_numel: parameters of the whole model.
    first_world_size: ranks that the job had when it was first started, before a restart.
    learning_rate: that of the client optimizer. total_steps: optimizer steps of the whole run.
    """

    world_size: int | None = None
    first_world_size: int | None = None
    micro_batch: int | None = None
    hidden_size: int | None = None
    model_numel: int | None = None
    device: Literal["cpu", "cuda"] | None = None
    bf16_supported: bool | None = None
    learning_rate: float | None = None
    total_steps: int | None = None
