"""What people do with Trainer beyond a plain run, case by case; started by test_habits.py, not imported."""

from __future__ import annotations

import json

import deepspeed
import torch
from driver import main, reset
from hf_cases import DATA, Run, config, history, make, saved
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)
from transformers.integrations import HfDeepSpeedConfig

WORDS = ["--per_device_train_batch_size", "2", "--max_steps", "2", "--bf16", "--use_cpu", "--report_to", "none"]
UNEVEN = [
    {"input_ids": row["input_ids"][: 6 + 2 * (n % 5)], "labels": row["labels"][: 6 + 2 * (n % 5)]}
    for n, row in enumerate(DATA[:23])
]


def padded(rows):
    """A batch of rows of different lengths."""
    longest = max(len(row["input_ids"]) for row in rows)

    def pad(key, value):
        return torch.stack([nn.functional.pad(row[key], (0, longest - len(row[key])), value=value) for row in rows])

    mask = torch.stack([torch.arange(longest) < len(row["input_ids"]) for row in rows]).long()
    return {"input_ids": pad("input_ids", 0), "labels": pad("labels", -100), "attention_mask": mask}


class Quantized(nn.Module):
    """A linear layer with frozen 8-bit weights, as QLoRA has it: a stand-in for bitsandbytes."""

    def __init__(self, of):
        super().__init__()
        scale = of.weight.abs().max() / 127
        self.weight = nn.Parameter((of.weight / scale).round().to(torch.int8), requires_grad=False)
        self.bias, self.nf = nn.Parameter(of.bias.detach().clone(), requires_grad=False), of.nf
        self.register_buffer("scale", scale.detach().clone())

    def forward(self, x):
        return x @ (self.weight.to(x.dtype) * self.scale.to(x.dtype)) + self.bias


def lora(quantized=False):
    model = make()
    if quantized:
        for block in model.transformer.h:
            block.mlp.c_fc, block.mlp.c_proj = Quantized(block.mlp.c_fc), Quantized(block.mlp.c_proj)
    wanted = LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    return get_peft_model(model, wanted)


def quantized_base(run, stage):
    trainer = run.fit(config(stage), model=lambda: lora(quantized=True))
    again = trainer.evaluate()
    return {"history": history(trainer), "loss": again["eval_loss"]}


def best_adapter(run, stage):
    """load_best_model_at_end, and going on, with an adapter: the checkpoints hold that alone."""
    saving = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer = run.fit(config(stage), model=lora, load_best_model_at_end=True, max_steps=4, **saving)
    loss = trainer.evaluate()["eval_loss"]
    evaluated = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log][:-1]
    whole = history(trainer)
    del trainer
    reset()
    second = run.trainer(config(stage), model=lora, max_steps=4, **saving)
    second.train(resume_from_checkpoint=str(run.directory / "checkpoint-2"))
    return {"loss": loss, "least": min(evaluated), "whole": whole[:-1], "resumed": history(second)}


def generate(run, stage):
    trainer = run.fit(config(stage), max_steps=2)
    trainer.model.eval()
    prompt = torch.arange(1, 4 + run.rank)[None]  # of another length on each rank
    torch.manual_seed(5)
    found = {
        "beams": trainer.model.generate(prompt, max_new_tokens=5, num_beams=3, do_sample=False),
        "sampled": trainer.model.generate(prompt, max_new_tokens=4 + 3 * run.rank, do_sample=True, top_k=20),
        "several": trainer.model.generate(prompt, max_new_tokens=4, do_sample=True, num_return_sequences=2),
    }
    return {name: tokens.tolist() for name, tokens in found.items()}


class Weighted(Trainer):
    """A loss of one's own."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**{key: value for key, value in inputs.items() if key != "labels"})
        ends = inputs["labels"][:, 1:]
        loss = nn.functional.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), ends, ignore_index=-100)
        return (loss * 1.5, outputs) if return_outputs else loss * 1.5


def uneven(run, stage, kind=Trainer, callbacks=(), predicting=True, **changes):
    """Rows of different lengths, and numbers of them that no world size divides."""
    made = run.arguments(config(stage), **{"max_steps": -1, "num_train_epochs": 2, "eval_strategy": "epoch", **changes})
    trainer = kind(
        model=make(),
        args=made,
        train_dataset=UNEVEN,
        eval_dataset=UNEVEN[:7],
        data_collator=padded,
        callbacks=list(callbacks),
        compute_metrics=lambda all: {"rows": len(all.predictions)},
    )
    trainer.train()
    predicted = trainer.predict(UNEVEN[:5]) if predicting else None
    return {
        "history": history(trainer),
        "steps": trainer.state.global_step,
        "rows": [log["eval_rows"] for log in trainer.state.log_history if "eval_rows" in log],
        "predicted": predicted and [len(predicted.predictions), predicted.metrics["test_loss"]],
        "kept": sorted(path.name for path in run.directory.glob("checkpoint-*")),
    }


def own_loss(run, stage, **changes):
    return uneven(run, stage, Weighted, **changes)


def stopped_early(run, stage):
    """Nothing is better than the first evaluation, so the second ends it."""
    stop = EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=100.0)
    saving = {"save_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    return uneven(run, stage, callbacks=[stop], num_train_epochs=5, save_total_limit=1, **saving)


def one_after_another(run, stage):
    """Trainers of one process that take turns, as a search does, without anything reset between."""
    losses = []
    for rate in (1e-3, 1e-2, 1e-3):
        trainer = run.fit(config(stage), learning_rate=rate, max_steps=3)
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    return {"losses": losses}


def elsewhere(run, stage, save=False, **changes):
    """Saved by one world, and gone on with by another."""
    common = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear", **changes}
    trainer = run.trainer(config(stage), **common)
    trainer.args.output_dir = trainer.state.output_dir = str(run.directory.parent / f"elsewhere-{stage}")
    trainer.train(resume_from_checkpoint=None if save else f"{trainer.args.output_dir}/checkpoint-4")
    return {"history": history(trainer), "world": trainer.args.world_size}


def arguments(run, stage):
    """--deepspeed FILE, as scripts with HfArgumentParser are started; and weights that lie in several files."""
    file = run.directory.parent / f"ds{run.rank}.json"
    file.write_text(json.dumps(config(stage)))
    base = saved(run, make(), max_shard_size="40KB")
    words = [*WORDS, "--output_dir", str(run.directory), *([] if run.plain else ["--deepspeed", str(file)])]
    (made,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    sharded = hasattr(model.transformer.h[0].attn.c_attn.weight, "ds_id")
    trainer = Trainer(model=model, args=made, train_dataset=DATA)
    loss = trainer.train().training_loss
    return {"files": len(list(base.glob("*.safetensors"))), "sharded": sharded, "loss": loss}


def alone(run):
    """HfDeepSpeedConfig before from_pretrained, without a Trainer: the loop is one's own."""
    base = saved(run, make())
    settings = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
    kept = HfDeepSpeedConfig(settings)
    model = GPT2LMHeadModel.from_pretrained(base)
    sharded = hasattr(model.transformer.wte.weight, "ds_id")
    model.resize_token_embeddings(101)
    engine = deepspeed.initialize(model=model, config=kept.config, model_parameters=model.parameters())[0]
    rows, losses = torch.stack([row["input_ids"] for row in DATA[:4]]), []
    for _ in range(3):
        loss = engine(input_ids=rows, labels=rows).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return {"sharded": sharded, "losses": losses, "first": float(make()(input_ids=rows, labels=rows).loss)}


if __name__ == "__main__":
    main(globals(), Run)
