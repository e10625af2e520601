"""Makes the fixtures beside this file, in an environment with DeepSpeed (benchmarks/peers.sh), on two ranks:
`make.py OUTPUT` with torch's environment variables. The universal one is made of zero2-fp32 by its ds_to_universal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F

from tests.distributed.checkpoint_foreign import Net, _batch

# Stage 3 replaces F.linear, for good: those with "bf16" after it round the product before they add the bias.
CASES = (
    *((0, "bf16"), (1, "bf16-fp32grads")),
    *((stage, "fp32") for stage in range(4)),
    *((stage, "bf16") for stage in (1, 3)),
)
SCHEDULE = {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 10, "warmup_type": "linear"}


def train(output: Path, stage: int, dtype: str) -> None:
    """Six steps, saved after three; the losses of all are written beside."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": SCHEDULE},
    }
    if dtype.startswith("bf16"):
        config["bf16"] = {"enabled": True}
    if dtype == "bf16-fp32grads":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    name = f"zero{stage}-{dtype}"
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    losses = []
    for step in range(6):
        if step == 3:
            engine.save_checkpoint(str(output / name), client_state={"note": f"rank {rank}", "epoch": 7})
        tokens, wanted = _batch(step, rank)
        loss = F.cross_entropy(engine(tokens).flatten(0, 1).float(), wanted.flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    (output / f"{name}.rank{rank}.json").write_text(json.dumps({"losses": losses, "lr": engine.get_lr()}))


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    for case in CASES:
        train(Path(sys.argv[1]), *case)
