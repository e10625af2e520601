"""Host memory as seen from the training device: the same, or apart from it; and what copies between the two."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from zrun_runtime.tiers.ring import Ring

_PIECES, _PIECE_BYTES = 4, 8 * 2**20  # on their way to the device at a time
_pinning = True  # page-lock memory that a device copies from


def is_host(device: torch.device) -> bool:
    """What is on this device is in host memory already, so that nothing has to be copied. Tests replace it, to see the
    other case where there is no other device."""
    return device.type in ("cpu", "meta")


def allow_pinning(allowed: bool) -> None:
    """Whether this process may page-lock memory, of which some machines have little. If not, copies do not overlap."""
    global _pinning
    _pinning = allowed


def host_empty(numel: int, dtype: torch.dtype, pin: bool) -> Tensor:
    """(numel,) in host memory; pin: page-locked, where there is a device that copies from it."""
    return torch.empty(numel, dtype=dtype, pin_memory=pin and _pinning and torch.cuda.is_available())


class Courier:
    """Copies between one device and page-locked host memory, on a stream of its own, so that kernels go on.

    Where the device is no GPU a copy is over when it was asked for.
    """

    _of: dict[torch.device, Courier] = {}

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._staging: Ring[Tensor] = Ring(lambda: host_empty(_PIECE_BYTES, torch.uint8, pin=True), _PIECES)

    @classmethod
    def of(cls, device: torch.device) -> Courier:
        """The one of this device."""
        return cls._of.setdefault(device, cls(device))

    def receive(self, source: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """A copy of `source` in host memory, and what waits until it is there."""
        target = host_empty(source.numel(), source.dtype, pin=True)
        if self._stream is None:
            target.copy_(source)
            return target, lambda: None
        self._stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        arrived = self._stream.record_event()

        def wait() -> None:
            arrived.synchronize()
            _ = source  # held until here

        return target, wait

    def send(self, values: Tensor, target: Tensor, stays: bool = False) -> None:
        """Begin to copy host values into a tensor of the device, in its dtype.

        stays: they do not change before the device has them; else they may at once.
        """
        if self._stream is None:
            target.copy_(values)
            return
        self._stream.wait_stream(torch.cuda.current_stream(target.device))
        if stays and values.dtype is target.dtype:
            with torch.cuda.stream(self._stream):
                target.copy_(values, non_blocking=True)
            return
        step = _PIECE_BYTES // target.element_size()
        for start in range(0, values.numel(), step):
            part, place = values[start : start + step], target[start : start + step]
            buffer = self._staging.take()
            staged = buffer[: part.numel() * target.element_size()].view(target.dtype).copy_(part)
            with torch.cuda.stream(self._stream):
                place.copy_(staged, non_blocking=True)
            self._staging.give_back(buffer, self._stream.record_event().synchronize)

    def issuing(self, device: torch.device) -> AbstractContextManager[object]:
        """Inside, what is queued on the device comes after what was sent, and after what was queued before."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self._stream)

    def join(self, device: torch.device) -> None:
        """What is queued on the device from now on comes after what was sent."""
        if self._stream is not None:
            torch.cuda.current_stream(device).wait_stream(self._stream)
