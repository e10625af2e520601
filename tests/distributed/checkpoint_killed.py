"""A program that saves until it is killed: `checkpoint_killed DIRECTORY BACKGROUND`. It prints a line for each save."""

from __future__ import annotations

import os
import sys

import torch

from .checkpoint_uses import config_of, engine_of, train


def main(directory: str, background: bool) -> None:
    """Train and save for ever; the same tag now and then, old ones pruned."""
    config = config_of(2, checkpoint={"async": background, "keep_last": 2})
    engine = engine_of(config)
    filler = torch.arange(500_000)
    path, _ = engine.load_checkpoint(directory)
    print("loaded", path, engine.global_steps, flush=True)
    while True:
        train(engine, engine.global_steps, engine.global_steps + 1)
        tag = "again" if engine.global_steps % 3 == 0 else None
        engine.save_checkpoint(directory, tag=tag, client_state={"steps": engine.global_steps, "filler": filler})
        print("saved", engine.global_steps, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    main(sys.argv[1], sys.argv[2] == "async")
