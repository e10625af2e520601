"""The classic DeepSpeed loop, as it stands in countless scripts: nothing here knows of zrun.

    C=examples/configs/zero2.json
    zrun --as_deepspeed --num_gpus 2 --backend gloo examples/deepspeed_loop.py --deepspeed_config $C

It learns which of two interleaved spirals a point lies on. Exit status 1 if it has not learned it.
"""

from __future__ import annotations

import argparse
import math
import sys

import deepspeed
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def spirals(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points (count, 2) and the spiral of each, 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    which = torch.randint(2, (count,), generator=generator)
    turn = torch.rand(count, generator=generator).sqrt() * 2 * math.pi
    angle = turn + which * math.pi
    points = torch.stack([angle.cos(), angle.sin()], 1) * turn[:, None] / (2 * math.pi)
    return points + 0.02 * torch.randn(points.shape, generator=generator), which


def main() -> int:
    """Train and test; 0 if nearly all of the test points are told apart."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the launcher")
    parser.add_argument("--epochs", type=int, default=5)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 2))
    engine, _, loader, _ = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=model.parameters(),
        training_data=TensorDataset(*spirals(4096, seed=1)),
    )
    criterion = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        for points, which in loader:
            loss = criterion(engine(points.to(engine.device)), which.to(engine.device))
            engine.backward(loss)
            engine.step()

    engine.eval()
    points, which = spirals(1024, seed=2)
    with torch.no_grad():
        right = (engine(points.to(engine.device)).argmax(1).cpu() == which).float().mean().item()
    if deepspeed.comm.get_rank() == 0:
        print(f"{right:.1%} of the test points are told apart", flush=True)
    return 0 if right > 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
