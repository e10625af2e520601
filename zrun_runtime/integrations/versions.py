"""`deepspeed.git_version_info`."""

from __future__ import annotations

from importlib import metadata

import torch

from zrun_runtime.integrations.ops import __compatible_ops__, __installed_ops__

version = metadata.version("deepspeed")
git_hash = git_branch = "zrun"
compatible_ops, installed_ops = __compatible_ops__, __installed_ops__
torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": True,
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": "0.0",
    "hip_version": torch.version.hip or "0.0",
}
