"""Small helpers under DeepSpeed's names."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from zrun_runtime.distributed import wants_cuda
from zrun_runtime.errors import ConfigError
from zrun_runtime.integrations.logs import log_dist


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """The same nest of dicts, lists and tuples with its tensors cloned onto `device`, so a view saves itself alone.

    Tensors that are one (tied weights) stay one.
    """
    return _clone(item, device, {})


def _clone(item: Any, device: Any, done: dict[Any, Tensor]) -> Any:
    if isinstance(item, Tensor):
        place = (item.data_ptr(), item.dtype, item.shape, item.stride())
        if place not in done or not item.numel():
            done[place] = item.detach().to(device, copy=True)
        return done[place]
    if isinstance(item, (list, tuple)):
        return type(item)(_clone(value, device, done) for value in item)
    if isinstance(item, dict):
        return type(item)((key, _clone(value, device, done)) for key, value in item.items())
    return item


def move_to_device(item: Any, device: Any, criterion_func: Any = lambda _: True) -> Any:
    """The same nest of dicts, lists and tuples with those tensors on `device` of which `criterion_func` is true."""
    if isinstance(item, Tensor):
        return item.to(device) if criterion_func(item) else item
    if isinstance(item, (list, tuple)):
        return type(item)(move_to_device(value, device, criterion_func) for value in item)
    if isinstance(item, dict):
        return {key: move_to_device(value, device, criterion_func) for key, value in item.items()}
    return item


class RepeatingLoader:
    """A loader that starts again at its end, for ever."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class OnDevice:
    """Modules made inside have their parameters in this dtype on this device (`meta`: without values)."""

    def __init__(self, dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled

    def __enter__(self) -> None:
        if self.enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            self._on = torch.device(self.device)
            self._on.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.enabled:
            self._on.__exit__(*error)
            torch.set_default_dtype(self._before)


def see_memory_usage(message: str, force: bool = False, ranks: Sequence[int] = (0,)) -> None:
    """Log what memory is in use, if `force`."""
    if not force:
        return
    gib = 2**30
    used = psutil.Process().memory_info().rss / gib
    device = f"GPU {torch.cuda.memory_allocated() / gib:.2f} GiB, " if wants_cuda() else ""
    log_dist(f"{message}: {device}process {used:.2f} GiB, host {psutil.virtual_memory().percent:.0f} %", ranks)


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def required_torch_version(min_version: float | None = None, max_version: float | None = None) -> bool:
    """Torch is not older than the one and not newer than the other, as `major.minor`."""
    own = tuple(int(part) for part in torch.__version__.split(".")[:2])
    low, high = (tuple(int(p) for p in str(v).split(".")) for v in (min_version or "0.0", max_version or "999.0"))
    return low <= own <= high


def empty_cache() -> None:
    """Give unused memory of torch's back to the device."""
    if wants_cuda():
        torch.cuda.empty_cache()


def instrument_w_nvtx(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, under its name in torch's profiler."""

    @functools.wraps(function)
    def named(*arguments: Any, **keywords: Any) -> Any:
        with torch.profiler.record_function(function.__qualname__):
            return function(*arguments, **keywords)

    return named


# ---- ZeRO

ZeRORuntimeException = ConfigError


def is_zero_param(parameter: Any) -> bool:
    """It is a parameter that is sharded."""
    return torch.is_tensor(parameter) and hasattr(parameter, "ds_id")


def is_zero_supported_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Every optimizer is judged when it is used, by what it computes."""
    return True


# ---- lists of numbers


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """What all of them are.

    Raises:
        RuntimeError: they are not all the same.
    """
    different = set(items)
    if len(different) != 1:
        raise RuntimeError(f"expected there to be only one unique element in {items}")
    return different.pop()


def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """Sums of the first 1, 2, ... numbers."""
    return list(accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Where each part of a list begins, and its end; sizes differ by one at most."""
    size, more = divmod(num_items, num_parts)
    return [part * size + min(part, more) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Where each part of a list begins, and its end, so that the heaviest part is as light as can be.

    Exact, by dynamic programming: O(parts x items^2).
    """
    sums = [0.0, *accumulate(weights)]
    items = len(weights)
    best = [[float("inf")] * (items + 1) for _ in range(num_parts + 1)]
    cut = [[0] * (items + 1) for _ in range(num_parts + 1)]
    best[0][0] = 0.0
    for part in range(1, num_parts + 1):
        for end in range(items + 1):
            best[part][end], cut[part][end] = min(
                (max(best[part - 1][start], sums[end] - sums[start]), start) for start in range(end + 1)
            )
    bounds = [items]
    for part in range(num_parts, 0, -1):
        bounds.append(cut[part][bounds[-1]])
    return bounds[::-1]
