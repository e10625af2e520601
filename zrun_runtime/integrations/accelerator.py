"""`deepspeed.accelerator`: the device this rank trains on, under one set of names."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import psutil
import torch

from zrun_runtime.distributed import local_rank, wants_cuda


class DeepSpeedAccelerator:
    """The kind of device. What is not defined here is torch.cuda's, or torch.cpu's, of the same name."""

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._torch: ModuleType = torch.cuda if kind == "cuda" else torch.cpu

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._torch, name)

    @property
    def _on_cuda(self) -> bool:
        return self._name == "cuda"

    # ---- devices

    def device_name(self, device_index: int | None = None) -> str:
        """cpu, cuda or cuda:N."""
        return self._name if device_index is None or not self._on_cuda else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        """The device of this number."""
        return torch.device(self.device_name(device_index))

    def device_count(self) -> int:
        """GPUs that are visible; on the CPU the ranks of this host."""
        return torch.cuda.device_count() if self._on_cuda else int(os.environ.get("LOCAL_SIZE", "1"))

    def current_device_name(self) -> str:
        """cpu, or cuda:N."""
        return self.device_name(torch.cuda.current_device()) if self._on_cuda else self._name

    def communication_backend_name(self) -> str:
        """nccl or gloo."""
        return "nccl" if self._on_cuda else "gloo"

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """The tensor is on such a device."""
        return tensor.device.type == self._name

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """The tensor in page-locked memory, where that helps."""
        return tensor.pin_memory() if self._on_cuda else tensor

    # ---- types

    def is_bf16_supported(self) -> bool:
        """Models can be bf16 on it."""
        return not self._on_cuda or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Models can be fp16 on it."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """What models can be."""
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    # ---- memory, random numbers, builders

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of tensors on the device; on the CPU of the whole process."""
        return torch.cuda.memory_allocated(device_index) if self._on_cuda else psutil.Process().memory_info().rss

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most that it was; on the CPU what it is."""
        return torch.cuda.max_memory_allocated(device_index) if self._on_cuda else self.memory_allocated()

    def empty_cache(self) -> None:
        """Give unused memory of torch's back to the device."""
        if self._on_cuda:
            torch.cuda.empty_cache()

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes that the device has."""
        if self._on_cuda:
            return torch.cuda.get_device_properties(local_rank() if device_index is None else device_index).total_memory
        return psutil.virtual_memory().total

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes that are free on it."""
        return torch.cuda.mem_get_info(device_index)[0] if self._on_cuda else psutil.virtual_memory().available

    def manual_seed(self, seed: int) -> None:
        """Seed every device."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed


_accelerator: DeepSpeedAccelerator | None = None


def get_accelerator() -> DeepSpeedAccelerator:
    """The kind of device that this process trains on."""
    global _accelerator
    if _accelerator is None:
        wanted = os.environ.get("DS_ACCELERATOR", "")
        _accelerator = DeepSpeedAccelerator(wanted if wanted in ("cpu", "cuda") else "cuda" if wants_cuda() else "cpu")
    return _accelerator


def is_current_accelerator_supported() -> bool:
    """There is no other kind than cpu and cuda."""
    return get_accelerator()._name in ("cpu", "cuda")
