"""Supervised fine-tuning of a frozen model by LoRA (peft, Hugging Face's Trainer, ZeRO 3), unchanged.

    zrun --as_deepspeed --num_gpus 2 --backend gloo examples/lora_sft.py

First a small GPT-2 learns to copy words; that is the base. Then an adapter, and nothing else, learns to answer with the
next letter for each one; the loss counts the answers alone. Exit status 1 if it does not.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

LENGTH = 6  # letters of a word
LETTERS = "abcdefgh"
NEXT = str.maketrans(LETTERS, LETTERS[1:] + LETTERS[0])
CONFIG = Path(__file__).parent / "configs" / "hf_auto.json"


def examples(count: int, shifted: bool, seed: int) -> list[dict[str, Tensor]]:
    """`bad>cbe`, or `bad>bad`, as bytes; the labels of the prompt are -100, which the loss leaves out."""
    source = random.Random(seed)
    found = []
    for _ in range(count):
        word = "".join(source.choices(LETTERS, k=LENGTH))
        ids = torch.tensor(list(f"{word}>{word.translate(NEXT) if shifted else word}".encode()))
        found.append({"input_ids": ids, "labels": torch.where(torch.arange(len(ids)) > LENGTH, ids, -100)})
    return found


def train(model: nn.Module, shifted: bool, steps: int, rate: float) -> tuple[Trainer, float]:
    """The trainer, and its loss on words that it has not seen."""
    with TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=32,
            max_steps=steps,
            learning_rate=rate,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=10,
            logging_steps=50,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            deepspeed=str(CONFIG),
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=examples(8192, shifted, seed=1),
            eval_dataset=examples(64, shifted, seed=2),
        )
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        trainer.save_model()  # of an adapter, only the adapter
        return trainer, loss


def main() -> int:
    """Train base and adapter; 0 if the adapter answers as it should."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the launcher")
    parser.parse_args()

    set_seed(0)
    shape = GPT2Config(vocab_size=128, n_positions=16, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    shape.resid_pdrop = shape.embd_pdrop = shape.attn_pdrop = 0.0
    base, copying = train(GPT2LMHeadModel(shape), shifted=False, steps=150, rate=3e-3)
    weights = base.model_wrapped.state_dict()  # gathered to the first rank, whose values are everybody's
    model = GPT2LMHeadModel(shape)
    model.load_state_dict(weights, strict=bool(weights))
    adapter = LoraConfig(r=8, target_modules=["c_attn", "c_proj", "c_fc"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    tuned, answering = train(get_peft_model(model, adapter), shifted=True, steps=100, rate=1e-2)
    if tuned.is_world_process_zero():
        trained = sum(p.numel() for p in tuned.model.parameters() if p.requires_grad)
        print(
            f"base copies with loss {copying:.3f}; {trained:,} adapter weights answer with {answering:.3f}", flush=True
        )
    return 0 if answering < 0.5 else 1


if __name__ == "__main__":
    sys.exit(main())
