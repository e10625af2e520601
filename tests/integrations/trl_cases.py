"""TRL's trainers, case by case; started by trl_checks.py, not imported."""

from __future__ import annotations

import torch
from datasets import Dataset
from driver import main
from hf_cases import Run, config, history, make
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

WORDS = [f"w{number}" for number in range(95)]


def tokenizer():
    table = {word: number for number, word in enumerate(["<pad>", "<end>", *WORDS])}
    made = Tokenizer(models.WordLevel(table, unk_token="<end>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>", unk_token="<end>")


def rows(count, **lengths):
    """Texts of so many words: always the same ones."""
    generator = torch.Generator().manual_seed(0)

    def text(length):
        return " ".join(WORDS[number] for number in torch.randint(95, (length,), generator=generator))

    return Dataset.from_list([{name: " " + text(length) for name, length in lengths.items()} for _ in range(count)])


def settings(run, kind, ds, **changes):
    """Arguments as `Run` has them, of another class."""
    made = run.arguments(ds).to_dict()
    names = "output_dir per_device_train_batch_size per_device_eval_batch_size max_steps logging_steps report_to "
    names += "save_strategy learning_rate warmup_steps disable_tqdm seed dataloader_pin_memory use_cpu"
    kept = {name: made[name] for name in names.split()}
    return kind(**{**kept, "bf16": False, **({} if run.plain else {"deepspeed": ds}), **changes})


def sft(run, stage, adapter=False):
    wanted = LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    trainer = SFTTrainer(
        model=make(),
        args=settings(run, SFTConfig, config(stage), max_length=16, dataset_text_field="text"),
        train_dataset=rows(32, text=10),
        processing_class=tokenizer(),
        peft_config=wanted if adapter else None,
    )
    trainer.train()
    trainer.save_model()
    return {"history": history(trainer), "saved": sorted(path.name for path in run.directory.glob("*.safetensors"))}


def dpo(run, stage):
    trainer = DPOTrainer(
        model=make(),
        ref_model=make(),
        args=settings(run, DPOConfig, config(stage), max_length=16),
        train_dataset=rows(32, prompt=3, chosen=4, rejected=4),
        processing_class=tokenizer(),
    )
    trainer.train()
    return {"history": history(trainer)}


def grpo(run, stage):
    """Generates with whole weights between steps."""
    trainer = GRPOTrainer(
        model=make(),
        reward_funcs=lambda completions, **more: [float(len(set(words.split()))) for words in completions],
        args=settings(run, GRPOConfig, config(stage), num_generations=2, max_completion_length=6, max_steps=2),
        train_dataset=rows(16, prompt=3),
        processing_class=tokenizer(),
    )
    trainer.train()
    return {"history": history(trainer)}


if __name__ == "__main__":
    main(globals(), Run)
