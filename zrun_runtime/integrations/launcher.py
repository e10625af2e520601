"""Names of DeepSpeed's launcher that other programs read."""

from __future__ import annotations

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"  # zrun reads a file of this name, too
