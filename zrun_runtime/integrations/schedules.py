"""`deepspeed.runtime.lr_schedules`."""

from __future__ import annotations

from zrun_runtime.schedules import SCHEDULES

VALID_LR_SCHEDULES = list(SCHEDULES)
