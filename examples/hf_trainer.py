"""Hugging Face's Trainer with a DeepSpeed config (ZeRO 3), unchanged: train, evaluate, save, generate.

    zrun --as_deepspeed --num_gpus 2 --backend gloo examples/hf_trainer.py

A small GPT-2 learns the help text of Python, byte by byte. Exit status 1 if it does worse than guessing by frequency.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from help_text import VOCABULARY, Blocks
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

BY_FREQUENCY = 3.3  # nats a byte: the entropy of single bytes of this text


def main() -> int:
    """Train; 0 if the evaluation loss is clearly below that of guessing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the launcher")
    parser.add_argument("--deepspeed", default=str(Path(__file__).parent / "configs" / "hf_auto.json"))
    parser.add_argument("--output_dir", help="where checkpoints go; default: a temporary directory")
    parser.add_argument("--max_steps", type=int, default=60)
    args = parser.parse_args()

    set_seed(0)
    with TemporaryDirectory() as temporary:
        arguments = TrainingArguments(
            output_dir=args.output_dir or temporary,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=8,
            max_steps=args.max_steps,
            learning_rate=3e-3,
            warmup_steps=10,
            logging_steps=20,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            deepspeed=args.deepspeed,
        )
        shape = GPT2Config(
            vocab_size=VOCABULARY, n_positions=128, n_embd=96, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0
        )
        trainer = Trainer(
            model=GPT2LMHeadModel(shape),
            args=arguments,
            train_dataset=Blocks(128, held_out=False),
            eval_dataset=torch.utils.data.Subset(Blocks(128, held_out=True), range(64)),
        )
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        trainer.save_model()
        prompt = torch.tensor([list(b"The ")], device=trainer.args.device)
        ids = trainer.model.generate(prompt, max_new_tokens=40, do_sample=False, pad_token_id=0)
        if trainer.is_world_process_zero():
            print(f"evaluation loss {loss:.3f}; saved as plain safetensors, which any program loads", flush=True)
            print(repr(bytes(ids[0].tolist()).decode(errors="replace")), flush=True)
    return 0 if loss < BY_FREQUENCY else 1


if __name__ == "__main__":
    sys.exit(main())
