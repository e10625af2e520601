"""What number types the model's forward meets: inputs cast or not, autocast or not, and where types clash."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from zrun_runtime.config import Config
from zrun_runtime.errors import EngineError
from zrun_runtime.precision import DTYPES

# How torch's kernels say that a float32 tensor met a 16-bit one.
_CLASH = re.compile(r"same dtype|should be the same|expected scalar type|mixed dtype", re.IGNORECASE)


def cast_dtype(config: Config) -> torch.dtype | None:
    """The dtype that inputs are cast to, if the section of the configured precision says auto_cast."""
    asked = {"fp16": config.fp16.auto_cast, "bf16": config.bf16.auto_cast}.get(config.precision, False)
    return DTYPES[config.precision] if asked else None


def autocast(config: Config, device: torch.device, weights_stay: bool) -> AbstractContextManager[object]:
    """torch.autocast around the forward, if the config asks for it.

    weights_stay: weights are full between uses, so their casts may be kept until the forward is over.
    """
    if config.autocast_dtype is None:
        return nullcontext()
    return torch.autocast(device.type, DTYPES[config.autocast_dtype], cache_enabled=weights_stay)


def clash(error: RuntimeError, model: nn.Module, config: Config) -> EngineError | None:
    """What to say of an error that a forward raised, if float inputs met 16-bit weights in it."""
    if config.precision == "fp32" or not _CLASH.search(str(error)):
        return None
    names = {id(module): name or "the model" for name, module in model.named_modules()}
    where, frame = "the model", error.__traceback__
    while frame is not None:
        where = names.get(id(frame.tb_frame.f_locals.get("self")), where)
        frame = frame.tb_next
    return EngineError(
        f"{where}: tensors of different types meet in its forward, and its weights are {config.precision} ({error})",
        f'cast the batch to its type, or set "{config.precision}": {{"auto_cast": true}}, which casts what engine(...) '
        "is given" + (', or use "bf16" in place of "fp16"' if config.precision == "fp16" else ""),
    )
