"""zrun plan: what a model will take under every stage and offload, what fits, and which to choose; before any run."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from zrun_runtime.commands.models import Subject, subject
from zrun_runtime.commands.options import SETTINGS
from zrun_runtime.commands.plan_text import report, report_data
from zrun_runtime.commands.quantities import COUNT, MEMORY, RATE
from zrun_runtime.config import AutoHints, Config, load_config
from zrun_runtime.errors import ConfigError
from zrun_runtime.memory import Keep, TierSettings, Widths
from zrun_runtime.planner import Question
from zrun_runtime.precision import DTYPES
from zrun_runtime.step_cost import Machines, Work

_EXAMPLES = """\b
Examples:
  zrun plan --params 7b --num_nodes 2 --num_gpus 8 --gpu_memory 80GB --network 100Gbit
  zrun plan ds.json --params 13b --num_gpus 4 --gpu_memory 24GB --host_memory 256GB
  zrun plan --model my_package.model:build --num_gpus 8 --seq 4096 --batch 2
  zrun plan --hf_config config.json --num_gpus 8 --json

\b
Exit code: 0 something fits, 1 nothing does, 2 wrong usage.
Bytes are those of this runtime, by docs/memory.md; times are lower bounds, to compare by.

"""
_NETWORK_INSIDE, _NETWORK_BETWEEN = 25e9, 12.5e9  # PCIe 4 x16; 100 Gbit/s


@click.command(
    epilog=_EXAMPLES,
    context_settings=SETTINGS,
)
@click.argument("config", required=False)
@click.option("--params", type=COUNT, metavar="N", help="So many parameters: 7b, 110M.")
@click.option("--model", metavar="MODULE:CALLABLE", help="What this returns, built without values.")
@click.option("--hf_config", metavar="FILE", help="A Hugging Face config.json, read without network.")
@click.option("--num_nodes", type=click.IntRange(1, 1_000_000), default=1, help="Machines.", show_default=True)
@click.option("--num_gpus", type=click.IntRange(1, 1024), default=8, help="Devices of each.", show_default=True)
@click.option("--gpu_memory", type=MEMORY, default="80GB", help="Of one device.", show_default=True)
@click.option("--host_memory", type=MEMORY, default="512GB", help="Of one machine.", show_default=True)
@click.option("--network", type=RATE, help="Of the narrowest link. Default: 100Gbit between nodes, 25GB/s inside one.")
@click.option("--seq", type=click.IntRange(1, 10**9), default=2048, help="Tokens of a sample.", show_default=True)
@click.option("--batch", type=click.IntRange(1, 10**9), help="Samples of a micro-batch. Default: the config's, else 1.")
@click.option("--tflops", type=click.FloatRange(min=0, min_open=True), default=150.0, show_default=True,
              help="What one device reaches, not its peak.")  # fmt: skip
@click.option("--nvme_path", default="/local_nvme", help="For the JSON to paste.", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def plan(config: str | None, as_json: bool, nvme_path: str, **options: Any) -> None:
    """Say what training a model takes, before any run: bytes of device, host and disk under every ZeRO stage and
    offload; what fits, the fastest of it, and how much network it needs.

    CONFIG: the JSON config of the run: precision, optimizer, batch and accumulation are taken from it.
    """
    about = subject(options["params"], options["model"], options["hf_config"])
    settings = _settings(config, about, options)
    question, how = _question(settings, about, options)
    assumed = options["network"] is None
    data = report_data(question, about.name, how, settings, nvme_path)
    if as_json:
        click.echo(json.dumps(data, indent=2))
    else:
        report(question, data, assumed, config)
    sys.exit(0 if data["recommended"] is not None else 1)


def _settings(config: str | None, about: Subject, options: dict[str, Any]) -> Config:
    """The config, or bf16 with AdamW."""
    world = options["num_nodes"] * options["num_gpus"]
    hints = AutoHints(model_numel=about.size.numel, device="cuda", bf16_supported=True, micro_batch=options["batch"])
    usual = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    try:
        return load_config(config if config is not None else usual, world_size=world, auto=hints, defer=True)
    except ConfigError as error:
        raise click.UsageError(error.message + (f"\n  -> {error.hint}" if error.hint else "")) from error


def _question(settings: Config, about: Subject, options: dict[str, Any]) -> tuple[Question, str]:
    batch, zero = options["batch"] or settings.micro_batch_size, settings.zero
    kept, how = about.activations(batch, options["seq"], DTYPES[settings.precision])
    between = options["num_nodes"] > 1
    network = options["network"] or (_NETWORK_BETWEEN if between else _NETWORK_INSIDE)
    question = Question(
        model=about.size,
        widths=Widths.of(settings),
        machines=Machines(
            options["num_nodes"],
            options["num_gpus"],
            int(options["gpu_memory"]),
            int(options["host_memory"]),
            network,
            options["tflops"] * 1e12,
        ),
        work=Work(batch * options["seq"], settings.accumulation_steps),
        activations=(kept.plain, kept.checkpointed),
        keep=Keep(zero.param_persistence_threshold, zero.model_persistence_threshold),
        tiers=TierSettings.of(settings),
    )
    return question, how
