"""What a fresh process runs for test_far_device.py: one rank whose device is not its host.

The device is torch's meta device: shapes without values, in the fake world of which this is one rank. Host and disk
are real. So torch itself refuses an operation on tensors of both, every byte is counted where it would be on a GPU, and
only streams and values are missing.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zrun_runtime
from tests.zrun_runtime.imagined import Net
from zrun_runtime.config import load_config
from zrun_runtime.model_size import size_of
from zrun_runtime.savings import footprint_of, plan_of

aten = torch.ops.aten


class FarDevice(TorchDispatchMode):
    """Lets values leave a device that has none, and counts the storages of both at every operation."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[bool, dict[int, Any]] = {True: {}, False: {}}  # on the device?, storage -> weak reference
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            return args[0].zero_()
        if func is aten._to_copy.default and args[0].is_meta and getattr(kwargs.get("device"), "type", "") == "cpu":
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        found = func(*args, **kwargs)
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._alive[tensor.is_meta].setdefault(storage._cdata, storage._weak_ref())
        self.most = max(self.most, self.held(on_device=True))
        return found

    def held(self, on_device: bool) -> int:
        """Bytes of all storages that operations made and that are still there."""
        total, alive = 0, self._alive[on_device]
        for key, reference in list(alive.items()):
            if torch.UntypedStorage._expired(reference):
                del alive[key]
                continue
            storage = torch.UntypedStorage._new_with_weak_ptr(reference)
            total += storage.nbytes() if storage is not None else 0
        return total


@contextmanager
def host_apart() -> Iterator[None]:
    """Inside, the meta device is not the host, as it is otherwise for the runtime."""
    homes = [m for name, m in list(sys.modules.items()) if name.startswith("zrun_runtime") and hasattr(m, "is_host")]
    before = homes[0].is_host
    for module in homes:
        module.is_host = lambda device: device.type == "cpu"
    try:
        yield
    finally:
        for module in homes:
            module.is_host = before


def _config(case: dict[str, Any], path: str) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": case["stage"], **case.get("zero", {})}
    if case["optimizer"] != "none":
        ratio = {"ratio": case["ratio"]} if "ratio" in case else {}
        zero["offload_optimizer"] = {"device": case["optimizer"], "nvme_path": path, **ratio}
    if case["params"] != "none":
        zero["offload_param"] = {"device": case["params"], "nvme_path": path, "max_in_cpu": 0}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case["accumulation"],
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
        **({case["dtype"]: {"enabled": True}} if case["dtype"] != "fp32" else {}),
    }


def train(case: dict[str, Any], path: str) -> dict[str, Any]:
    """Train two steps as the last rank of such a world: bytes by place, as held and as planned."""
    world = case["world"]
    dist.init_process_group("cpu:fake,meta:fake", rank=world - 1, world_size=world, store=dist.HashStore())
    config = _config(case, path)
    with host_apart(), FarDevice() as device:
        with torch.device("meta"):
            model = Net(256, 2200)  # 3 million parameters; activations of two tokens are nothing beside them
            ids = torch.zeros(1, 2, dtype=torch.int64)
        settings = load_config(config, world_size=world)
        planned = footprint_of(settings, size_of(model), plan_of(settings))
        engine, *_ = zrun_runtime.initialize(model=model, config=config)
        grads, forward = {True: 0, False: 0}, 0
        for _ in range(2):
            most = 0
            for micro in range(case["accumulation"]):
                device.most = 0
                loss = engine(ids).float().logsumexp(-1).mean()
                forward, most = device.most, max(most, device.most)
                engine.backward(loss)
                grads = grads if micro else {place: device.held(place) for place in grads}
                engine.step()
                most = max(most, device.most)
        gc.collect()
        held = {place: device.held(place) for place in grads}
        disk = sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())
        engine.destroy()
    dist.destroy_process_group()
    return {
        "device": [held[True], planned.device.resident],
        "device_with_grads": [grads[True], planned.device.resident + planned.device.grads],
        "groups": sorted(group.layout.padded_numel for group in engine.zero.groups),
        "forward_most": forward,
        "device_most": [most, planned.device.resident + planned.device.grads + planned.device.working],
        "host": [held[False], planned.host.resident],
        "host_buffers": planned.host.working,
        "host_grads": [grads[False] - held[False], planned.host.grads],
        "disk": [disk, planned.disk.resident],
    }


def main() -> None:
    """Cases as JSON in, one result a case out."""
    gc.freeze()
    results = []
    for case in json.loads(sys.argv[1]):
        with tempfile.TemporaryDirectory() as path:
            results.append(train(case, path))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
