"""What can be wrong with a checkpoint."""

from __future__ import annotations

from zrun_runtime.errors import ZeroRuntimeError


class CheckpointError(ZeroRuntimeError):
    """A checkpoint cannot be written, or is not there, not whole, or not for this model."""


class TagsDifferError(CheckpointError, AssertionError):
    """Ranks gave a checkpoint different tags. (An AssertionError as well, as DeepSpeed raises.)"""
