"""What a fresh process runs for test_memory_plan.py: the engine as one rank of worlds that are not there."""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch import Tensor, nn

import zrun_runtime
from zrun_runtime.model_size import size_of


class Block(nn.Module):
    """A feed-forward block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    """An embedding, four blocks and a head."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def live_bytes() -> int:
    """Bytes of all storages that some Python object made since `gc.freeze()` refers to."""
    gc.collect()
    storages: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor):
                storages[thing.untyped_storage()._cdata] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def rank_of(world: int, stage: int, accumulation: int) -> dict[str, Any]:
    """Train two steps as the last rank of such a world."""
    dist.init_process_group("cpu:fake,meta:fake", rank=world - 1, world_size=world, store=dist.HashStore())
    before = live_bytes()
    with torch.device("meta"):
        model = Net(384, 2000)  # 6 million parameters
    units = [[unit.numel, unit.twice] for unit in size_of(model).units]
    apart = list(size_of(model).apart)
    trained = size_of(model).trained
    engine, *_ = zrun_runtime.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage},
        },
    )
    ids = torch.zeros(2, 16, dtype=torch.int64, device="meta")
    between = within = 0
    for _ in range(2):
        engine.traffic()
        for micro in range(accumulation):
            engine.backward(engine(ids).float().logsumexp(-1).mean())
            within = within if micro else live_bytes() - before
            engine.step()
        between = live_bytes() - before
    sent = engine.traffic()
    engine.destroy()
    dist.destroy_process_group()
    return {
        "held": between, "with_grads": within, "sent": [sent["reduce_scatter"], sent["all_gather"]],
        "trained": trained, "units": units, "apart": apart,
    }  # fmt: skip


if __name__ == "__main__":
    gc.freeze()
    print(json.dumps([rank_of(*case) for case in json.loads(sys.argv[1])]))
