"""A training loop by Accelerate with its DeepSpeed plugin (ZeRO 2), unchanged, with gradient accumulation.

    zrun --as_deepspeed --num_gpus 2 --backend gloo examples/accelerate_loop.py

A small GPT-2 learns the help text of Python. Exit status 1 if the loss has not fallen.
"""

from __future__ import annotations

import argparse
import sys
from itertools import islice

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import set_seed
from help_text import VOCABULARY, Blocks
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

ACCUMULATION = 2


def main() -> int:
    """Train; 0 if the loss of the last steps is clearly below that of the first ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the launcher")
    parser.add_argument("--zero_stage", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()

    set_seed(0)
    plugin = DeepSpeedPlugin(
        zero_stage=args.zero_stage, gradient_accumulation_steps=ACCUMULATION, gradient_clipping=1.0
    )
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=ACCUMULATION)
    shape = GPT2Config(
        vocab_size=VOCABULARY, n_positions=128, n_embd=96, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 5, 2 * args.steps)
    loader = DataLoader(Blocks(128, held_out=False), batch_size=8, shuffle=True)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)

    losses = []
    for batch in islice(loader, args.steps * ACCUMULATION):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    first, last = (sum(part) / len(part) for part in (losses[:4], losses[-4:]))
    accelerator.print(f"loss {first:.3f} -> {last:.3f} on {accelerator.num_processes} processes", flush=True)
    return 0 if last < first - 1 else 1


if __name__ == "__main__":
    sys.exit(main())
