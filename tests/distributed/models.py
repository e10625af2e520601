"""All scenarios: importing this module fills SCENARIOS."""

from __future__ import annotations

from . import models_attention, models_extra, models_flow, models_plain
from .scenario import SCENARIOS

__all__ = ["SCENARIOS", "models_attention", "models_extra", "models_flow", "models_plain"]
