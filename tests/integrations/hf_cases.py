"""What transformers' Trainer does with a DeepSpeed config, case by case; started by test_trainer.py, not imported.

    python hf_cases.py --out FILE [--plain] CASE...

Each case writes one JSON line to FILE on rank 0. --plain: without DeepSpeed, as the reference.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch
from driver import main, reset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

KEYS = ("loss", "grad_norm", "eval_loss", "learning_rate")
SHAPE = {
    "vocab_size": 97,
    "n_positions": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
generator = torch.Generator().manual_seed(0)
DATA = [{"input_ids": (x := torch.randint(97, (16,), generator=generator)), "labels": x} for _ in range(64)]
OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
SCHEDULER = {
    "type": "WarmupDecayLR",
    "params": {
        "total_num_steps": "auto",
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "warmup_type": "linear",
    },
}


def config(stage, *, optimizer=False, scheduler=False, **zero):
    """As people write it, with "auto" wherever that is possible."""
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
            **zero,
        },
        **({"optimizer": OPTIMIZER} if optimizer else {}),
        **({"scheduler": SCHEDULER} if scheduler else {}),
    }


class Run:
    """One case: a directory, and a Trainer made like everybody's."""

    def __init__(self, plain, directory):
        self.plain, self.directory = plain, directory
        self.rank = int(os.environ["RANK"])

    def arguments(self, ds, **changes):
        settings = {
            "output_dir": str(self.directory),
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "max_steps": 4,
            "logging_steps": 1,
            "report_to": [],
            "save_strategy": "no",
            "learning_rate": 1e-3,
            "warmup_steps": 2,
            "disable_tqdm": True,
            "seed": 1,
            "dataloader_pin_memory": False,
            **changes,
        }
        if self.plain:
            return TrainingArguments(**{**settings, "use_cpu": True})
        return TrainingArguments(deepspeed=ds, **settings)

    def trainer(self, ds, model=None, **changes):
        arguments = self.arguments(ds, **changes)  # first, as from_pretrained asks it for the config
        model = (
            make()
            if model is None
            else model()
            if callable(model) and not isinstance(model, torch.nn.Module)
            else model
        )
        return Trainer(model=model, args=arguments, train_dataset=DATA, eval_dataset=DATA[:8])

    def fit(self, ds, model=None, **changes):
        trainer = self.trainer(ds, model, **changes)
        trainer.train()
        return trainer


def make():
    torch.manual_seed(3)
    return GPT2LMHeadModel(GPT2Config(**SHAPE))


def history(trainer):
    logs = [{key: float(log[key]) for key in KEYS if key in log} for log in trainer.state.log_history]
    return [log for log in logs if log]


def share(trainer):
    """What this rank holds of each kind of state, in bytes; and bytes of the whole model."""
    held = trainer.model_wrapped.state_bytes()
    return {**held, "model": sum(p.numel() * p.element_size() for p in trainer.model.parameters())}


def train(run, stage=0, kind="none", offload="", **changes):
    zero = {}
    if offload:
        zero["offload_optimizer"] = {"device": offload}
        if stage == 3:
            zero["offload_param"] = {"device": offload}
    ds = config(stage, optimizer=kind in ("optimizer", "both"), scheduler=kind in ("scheduler", "both"), **zero)
    trainer = run.fit(ds, eval_strategy="steps", eval_steps=2, **changes)
    found = {"history": history(trainer), "world": trainer.args.world_size, "rank": trainer.args.process_index}
    if not run.plain:
        found["share"] = share(trainer)
    return found


def generate(run, stage):
    trainer = run.fit(config(stage), max_steps=2)
    prompt = torch.arange(1, 4)[None]
    mine = trainer.model.generate(prompt, max_new_tokens=3 + 2 * run.rank, do_sample=False)  # ranks end at other times
    wrapped = trainer.model_wrapped.generate(prompt, max_new_tokens=3, do_sample=False)
    return {
        "tokens": mine[0, :6].tolist(),
        "through the engine": wrapped[0].tolist(),
        "predicted": float(trainer.predict(DATA[:4]).metrics["test_loss"]),
    }


def save_model(run, stage):
    trainer = run.fit(config(stage))
    trainer.save_model()
    state = trainer.model_wrapped.state_dict()
    own = trainer.evaluate()["eval_loss"]
    torch.distributed.barrier()
    saved = load_file(run.directory / "model.safetensors")
    del trainer  # as long as it lives, transformers shards what it loads
    reset()
    again = GPT2LMHeadModel.from_pretrained(run.directory)
    if not state:  # another rank than the first, at stage 3
        return {}
    losses = [float(again(input_ids=r["input_ids"][None], labels=r["labels"][None]).loss) for r in DATA[:8]]
    return {
        "names": sorted(saved),
        "equal": all(torch.equal(value, state[name]) for name, value in saved.items()),
        "tied": again.lm_head.weight is again.transformer.wte.weight,
        "loss": sum(losses) / len(losses) * 15 / 16,  # the trainer divides by all tokens, not by those predicted
        "trainer's": own,
    }


def resume(run, stage, kind="none"):
    both = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 2, "lr_scheduler_type": "linear"}
    ds = config(stage, optimizer=kind == "both", scheduler=kind == "both")
    saving = {**both, "save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
    first = run.fit(ds, **saving)
    consolidated = _consolidated(run)
    best, loss = first.state.best_model_checkpoint, first.evaluate()["eval_loss"]
    whole = history(first)[:-1]
    del first
    reset()
    second = run.trainer(ds, model=lambda: GPT2LMHeadModel(GPT2Config(**SHAPE)), **both)
    second.train(resume_from_checkpoint=str(run.directory / "checkpoint-4"))
    return {
        "whole": whole,
        "resumed": history(second),
        "checkpoints": sorted(path.name for path in run.directory.glob("checkpoint-*")),
        "best": Path(best).name,
        "best loss": loss,
        "consolidated": consolidated,
        "least": min(log["eval_loss"] for log in whole if "eval_loss" in log),
    }


def _consolidated(run):
    """The weights in a checkpoint are those that the model was saved with beside it."""
    from deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint

    directory = run.directory / "checkpoint-6"
    loaded = load_state_dict_from_zero_checkpoint(GPT2LMHeadModel(GPT2Config(**SHAPE)), str(directory)).state_dict()
    same = all(torch.equal(value, loaded[name]) for name, value in load_file(directory / "model.safetensors").items())
    if run.rank == 0:  # the script that lies there, as people start it
        script = directory / "zero_to_fp32.py"
        assert os.access(script, os.X_OK)
        words = [sys.executable, script, directory, run.directory / "whole", "--safe_serialization"]
        subprocess.run(words, check=True)
        whole = load_file(run.directory / "whole" / "model.safetensors")
        same = same and all(torch.equal(value, whole[name]) for name, value in loaded.items() if name in whole)
    return same


def saved(run, model, **options):
    """Where the first rank has saved a model, once it has."""
    base = run.directory / "base"
    if run.rank == 0:
        model.save_pretrained(base, **options)
        (base / "done").touch()
    while not (base / "done").exists():
        time.sleep(0.05)
    return base


def pretrained(run, stage, dtype=""):
    base = saved(run, make())
    arguments = run.arguments(config(stage), **({"bf16": True, "use_cpu": True} if dtype else {}))
    model = GPT2LMHeadModel.from_pretrained(base)
    found = {
        "sharded": hasattr(model.transformer.wte.weight, "ds_id"),
        "dtype": str(model.transformer.wte.weight.dtype),
        "tied": model.lm_head.weight is model.transformer.wte.weight,
        "names": len(model.state_dict()),
    }
    trainer = Trainer(model=model, args=arguments, train_dataset=DATA, eval_dataset=DATA[:8])
    trainer.train()
    return {**found, "history": history(trainer)}


def memory(run, stage):
    """Host memory of this rank alone that from_pretrained leaves in use, against the size of the model."""
    base = saved(run, GPT2LMHeadModel(GPT2Config(**{**SHAPE, "n_embd": 512, "n_layer": 6})))
    arguments = run.arguments(config(stage))
    gc.collect()
    before = psutil.Process().memory_full_info().uss
    model = GPT2LMHeadModel.from_pretrained(base)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free, and only kept for the next allocation, does not count
    used = psutil.Process().memory_full_info().uss - before
    kept = arguments, model  # transformers shards as long as the arguments live
    return {"used": used, "model": (base / "model.safetensors").stat().st_size, "objects": len(kept)}


def from_config(run, stage):
    arguments = run.arguments(config(stage))
    torch.manual_seed(run.rank)  # only the first rank's values count
    model = AutoModelForCausalLM.from_config(GPT2Config(**SHAPE))
    model.resize_token_embeddings(103, mean_resizing=False)
    trainer = Trainer(model=model, args=arguments, train_dataset=DATA, eval_dataset=DATA[:8])
    trainer.train()
    return {"history": history(trainer), "shape": list(model.lm_head.weight.shape)}


def adapter(run, stage):
    from peft import LoraConfig, get_peft_model

    def lora():
        wanted = LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
        return get_peft_model(make(), wanted)

    trainer = run.fit(config(stage), model=lora)
    trainer.save_model()
    if run.rank == 0:
        saved = load_file(run.directory / "adapter_model.safetensors")
        return {
            "history": history(trainer),
            "second matrices": [float(v.abs().sum()) for n, v in saved.items() if "lora_B" in n],
            "saved": len(saved),
        }
    return {}


def bad_gradient(run, stage):
    trainer = run.trainer(config(stage))
    trainer.model.lm_head.register_forward_hook(
        lambda module, args, out: out * float("nan") if run.rank == 1 and trainer.state.global_step == 1 else out
    )
    trainer.train()
    return {"history": history(trainer), "schedule": trainer.lr_scheduler.last_epoch}


def evaluate_only(run, stage):
    return {"loss": run.trainer(config(stage)).evaluate()["eval_loss"]}


if __name__ == "__main__":
    main(globals(), Run)
