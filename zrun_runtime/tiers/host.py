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
    """Copies between one device and page-locked host memory, beside the kernels of the device.

    Each direction has a stream of its own, as a link carries both at a time. Both begin after what was queued on the
    device before. Where the device is no GPU a copy is over when it was asked for.
    """

    _of: dict[torch.device, Courier] = {}

    def __init__(self, device: torch.device) -> None:
        self._inward, self._outward = (torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2))
        self._staging: Ring[Tensor] = Ring(lambda: host_empty(_PIECE_BYTES, torch.uint8, pin=True), _PIECES)

    @classmethod
    def of(cls, device: torch.device) -> Courier:
        """The one of this device."""
        if device not in cls._of:
            cls._of[device] = cls(device)
        return cls._of[device]

    def receive(self, source: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """A copy of `source` in host memory, and what waits until it is there."""
        target = host_empty(source.numel(), source.dtype, pin=True)
        if self._outward is None:
            target.copy_(source)
            return target, nothing
        self._outward.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(self._outward):
            target.copy_(source, non_blocking=True)
        arrived = self._outward.record_event()

        def wait() -> None:
            arrived.synchronize()
            _ = source  # held until here: its memory may not be given to others before it was read

        return target, wait

    def send(self, values: Tensor, target: Tensor) -> None:
        """Begin to copy host values, which may change at once, into a tensor of the device, in its dtype."""
        if self._inward is None:
            target.copy_(values)
            return
        self._inward.wait_stream(torch.cuda.current_stream(target.device))
        step = _PIECE_BYTES // target.element_size()
        for start in range(0, values.numel(), step):
            part, place = values[start : start + step], target[start : start + step]
            buffer = self._staging.take()
            staged = buffer[: part.numel() * target.element_size()].view(target.dtype).copy_(part)
            with torch.cuda.stream(self._inward):
                place.copy_(staged, non_blocking=True)
            self._staging.give_back(buffer, self._inward.record_event().synchronize)

    def send_lasting(self, values: Tensor, target: Tensor) -> Callable[[], None]:
        """The same with page-locked values of the target's dtype, without a copy in between. They must not change
        before what is returned has returned."""
        if self._inward is None:
            target.copy_(values)
            return nothing
        self._inward.wait_stream(torch.cuda.current_stream(target.device))
        with torch.cuda.stream(self._inward):
            target.copy_(values, non_blocking=True)
        return self._inward.record_event().synchronize

    def issuing(self, device: torch.device) -> AbstractContextManager[object]:
        """Inside, what is queued on the device comes after what was sent, and after what was queued before."""
        if self._inward is None:
            return nullcontext()
        self._inward.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self._inward)

    def join(self, device: torch.device) -> None:
        """What is queued on the device from now on comes after what was sent."""
        if self._inward is not None:
            torch.cuda.current_stream(device).wait_stream(self._inward)


def nothing() -> None:
    """What waits for what is there already."""
