"""What a model takes, before any run: the formula, and `zrun plan`."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zrun_runtime.commands.plan import plan as command
from zrun_runtime.config import load_config
from zrun_runtime.layout import lay_out
from zrun_runtime.memory import (
    Footprint,
    ModelSize,
    TierSettings,
    UnitSize,
    Widths,
    footprint,
    moment_bytes,
    sent_bytes,
)
from zrun_runtime.model_size import Transformer, activations_of, size_of
from zrun_runtime.plan import StatePlan, TierKind

ROOT = Path(__file__).resolve().parents[2]
STAGES = (0, 1, 2, 3)
BILLION = 10**9
ADAM_16 = Widths(weight=2, moments=8, grad=2, wire=2)
PLAIN = ModelSize(BILLION, (UnitSize(BILLION // 10),) * 10)


def held(stage: int, world: int, widths: Widths = ADAM_16, **tiers: TierKind) -> Footprint:
    return footprint(PLAIN, widths, StatePlan.of_stage(stage, **tiers), world)


# ---- the formula


@pytest.mark.parametrize("world", (1, 8, 64))
def test_bytes_between_steps_are_those_of_the_paper(world: int) -> None:
    """16 = 2 + 2 + 12 bytes a parameter, without the 2 of a gradient, which is not held between steps."""
    expected = (14, 2 + 12 / world, 2 + 12 / world, 14 / world)
    for stage in STAGES:
        assert held(stage, world).device.resident / BILLION == pytest.approx(expected[stage], rel=1e-3)


def test_fp32_needs_no_second_copy_and_sgd_no_moments() -> None:
    fp32 = Widths(weight=4, moments=8, grad=4, wire=4)
    assert held(0, 1, fp32).device.resident == 12 * BILLION
    assert moment_bytes("SGD", {}) == 0 and moment_bytes("SGD", {"momentum": 0.9}) == 4
    assert moment_bytes("Adam", {"amsgrad": True}) == 12 and moment_bytes("Lion", {}) == 4


@pytest.mark.parametrize(("stage", "gradients"), ((0, 4), (1, 4), (2, 4 / 8), (3, 4 / 8)))
def test_gradients_that_add_up_are_whole_or_a_share(stage: int, gradients: float) -> None:
    widths = Widths(weight=2, moments=8, grad=4, wire=4, accumulates=True)
    assert held(stage, 8, widths).device.grads / BILLION == pytest.approx(gradients, rel=1e-3)


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_offloaded_state_leaves_the_device(stage: int) -> None:
    weights = {1: 2.0, 2: 2.0, 3: 2 / 8}[stage]
    host = held(stage, 8, optimizer=TierKind.CPU)
    assert host.device.resident / BILLION == pytest.approx(weights, rel=1e-3)
    assert host.host.peak / BILLION == pytest.approx(14 / 8, rel=1e-2)  # 12, and the gradients
    disk = held(stage, 8, optimizer=TierKind.NVME)
    assert disk.disk.resident / BILLION == pytest.approx(12 / 8, rel=1e-3) and disk.host.resident == 0


def test_with_everything_offloaded_a_device_has_two_groups_and_their_gradients() -> None:
    found = held(3, 8, optimizer=TierKind.CPU, params=TierKind.NVME)
    assert found.device.resident == 0
    slices = 2 * 2 / 8  # of gradients: one that is being reduced, one on its way to the host
    assert found.device.working == pytest.approx((2 * 2 + 2 * 2 + slices) * BILLION / 10, rel=1e-6)
    assert found.host.params / BILLION == pytest.approx(2 / 8, rel=1e-3)  # max_in_cpu leaves as much in memory
    none = TierSettings(in_memory=0)
    plan = StatePlan.of_stage(3, optimizer=TierKind.CPU, params=TierKind.NVME)
    assert footprint(PLAIN, ADAM_16, plan, 8, tiers=none).disk.params / BILLION == pytest.approx(2 / 8, rel=1e-3)


@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=6), st.sampled_from((1, 2, 7, 64)))
def test_shares_are_those_of_the_layout(numels: list[int], world: int) -> None:
    model = ModelSize(sum(numels), tuple(UnitSize(n) for n in numels))
    found = footprint(model, Widths(4, 8, 4, 4), StatePlan.of_stage(3), world).device
    slices = sum(lay_out([n], 4, world).shard_numel for n in numels)
    whole = 4 * sum(numels) // 100 + len(numels) * 64 * world  # the smallest stay, each padded
    assert 4 * slices <= found.params <= 4 * slices + whole
    assert found.optimizer == 8 * slices


@given(st.integers(1, 11), st.sampled_from(STAGES))
def test_more_ranks_never_hold_more(power: int, stage: int) -> None:
    fewer, more = held(stage, 2 ** (power - 1)).device, held(stage, 2**power).device
    assert more.resident <= fewer.resident * 1.01


@pytest.mark.parametrize(("stage", "units"), ((0, 2), (1, 2), (2, 1 + 4), (3, 4 + 2 * 4)))
def test_bytes_sent_are_those_of_the_table(stage: int, units: int) -> None:
    sent = sum(sent_bytes(PLAIN, ADAM_16, StatePlan.of_stage(stage), 4, accumulation=4))
    assert sent / (2 * BILLION * 3 / 4) == pytest.approx(units, rel=1e-3)


@pytest.mark.slow
def test_the_engine_in_a_large_world_is_what_the_formula_says() -> None:
    """The real engine, one rank of it, on the meta device: live storages and counted traffic against the formula."""
    cases = [*((8, stage, 2) for stage in STAGES), (8, 3, 1), (1024, 2, 1), (1024, 3, 2)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("imagined.py")), json.dumps(cases)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    for (world, stage, steps), got in zip(cases, json.loads(done.stdout), strict=True):
        model = ModelSize(got["trained"], tuple(UnitSize(*unit) for unit in got["units"]), 0, tuple(got["apart"]))
        width = 4 if steps > 1 else 2
        widths, near = Widths(2, 8, width, width, steps > 1), 0.01 if world == 8 else 0.04  # small groups, padded
        found = footprint(model, widths, StatePlan.of_stage(stage), world).device
        sent = sent_bytes(model, widths, StatePlan.of_stage(stage), world, steps)
        assert got["held"] == pytest.approx(found.resident, rel=near), (world, stage, steps)
        assert got["with_grads"] == pytest.approx(found.resident + found.grads, rel=near), (world, stage, steps)
        assert got["sent"] == pytest.approx(sent, rel=near), (world, stage, steps)


# ---- how large a model is


class Block(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(x))


class Net(nn.Module):
    """Token ids in, logits out; a head that is larger than a block."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1000, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, 1000, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_model_is_counted_without_values() -> None:
    with torch.device("meta"):
        size = size_of(Net())
    assert size.numel == 64_000 + 3 * 2 * 33 * 32
    assert [unit.numel for unit in size.units] == [32_000, 32_000, 2112, 2112, 2112]
    assert [unit.twice for unit in size.units] == [False, False, True, True, True]  # embedding; the head ends it
    assert size.apart == (32_000,)


def test_activations_are_what_autograd_saves() -> None:
    with torch.device("meta"):
        found = activations_of(Net(), 2, 10)
    values, tokens = 4, 20
    logits = tokens * 1000 * values
    inside = 2 * tokens * 32 * values  # of a block: the inputs of its two layers
    assert found.plain == pytest.approx(3 * inside + tokens * 32 * values + logits, rel=0.02)
    assert found.plain - found.checkpointed == (2 * 2 - 3) * tokens * 32 * values  # but for a block, inputs alone


def test_attention_counts_as_a_fused_kernel() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(100, 64), layer).to("meta")
    short, long = (activations_of(model, 1, tokens).plain for tokens in (128, 256))
    assert long == pytest.approx(2 * short, rel=0.05)  # not four times, as scores would


@pytest.mark.parametrize("numel", (1, 1000, 33_000_000, 7 * BILLION, 10**12))
def test_a_guessed_model_has_as_many_parameters_as_asked(numel: int) -> None:
    size = Transformer.of(numel).size()
    assert sum(unit.numel for unit in size.units) == numel == size.numel
    assert all(unit.numel >= 0 for unit in size.units)


# ---- zrun plan


def run(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def answer(*arguments: object) -> dict:
    done = run(*arguments, "--json")
    assert done.exit_code in (0, 1), done.output
    return json.loads(done.stdout)


def test_the_recommended_layout_fits_and_can_be_pasted() -> None:
    found = answer("--params", "13b", "--num_gpus", 4, "--gpu_memory", "24GB")
    best = found["recommended"]
    assert best["fits"] and best["device"]["checkpointed"] <= 24e9
    config = load_config(
        {"train_batch_size": 4, "bf16": {"enabled": True}, "zero_optimization": best["zero_optimization"]}
    )
    assert config.zero.stage == 3 and config.zero.offload_optimizer.device != "none"
    faster = [o for o in found["layouts"] if o["seconds"]["step"] < best["seconds"]["step"]]
    assert not [o["name"] for o in faster if o["fits"]]


def test_what_fits_without_offload_needs_none() -> None:
    found = answer("--params", "1b", "--num_gpus", 8, "--gpu_memory", "80GB")
    assert "offload_optimizer" not in found["recommended"]["zero_optimization"]


def test_what_fits_nowhere_exits_with_one_and_says_on_how_many_nodes_it_would() -> None:
    done = run("--params", "70b", "--num_gpus", 2, "--gpu_memory", "16GB", "--host_memory", "64GB")
    assert done.exit_code == 1 and "nothing fits; it would on" in done.stdout
    nodes = int(done.stdout.partition("it would on ")[2].split()[0])
    again = run(
        "--params", "70b", "--num_gpus", 2, "--gpu_memory", "16GB", "--host_memory", "64GB", "--num_nodes", nodes
    )
    assert again.exit_code == 0


def test_a_slow_network_is_told_and_changes_the_choice() -> None:
    fast = answer("--params", "7b", "--num_nodes", 2, "--network", "1600Gbit", "--seq", 8192)
    slow = answer("--params", "7b", "--num_nodes", 2, "--network", "10Gbit", "--seq", 8192)
    assert fast["network"]["wanted"] == slow["network"]["wanted"]
    assert slow["network"]["given"] < slow["network"]["wanted"]["ZeRO 2"] < slow["network"]["wanted"]["ZeRO 3"]
    by_name = {o["name"]: o["seconds"]["step"] for o in slow["layouts"]}
    assert by_name["ZeRO 3"] > by_name["ZeRO 2"]
    assert "does not pay below" in run("--params", "7b", "--num_nodes", 2, "--network", "10Gbit").stdout


def test_a_config_decides_precision_optimizer_and_accumulation(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 2},
    }))  # fmt: skip
    found = answer(config, "--params", "1b", "--num_gpus", 2)
    assert (found["precision"], found["optimizer"], found["accumulation"]) == ("fp32", "SGD", 4)
    assert found["tokens_per_micro_batch"] == 2 * 2048
    assert found["layouts"][0]["device"]["params"] == pytest.approx(4e9, rel=1e-3)
    assert found["layouts"][0]["device"]["optimizer"] == 0


def test_output_that_is_no_terminal_is_plain() -> None:
    done = run("--params", "7b", "--num-gpus", "8")
    lines = done.stdout.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("ZeRO  optimizer"))
    rows = [line.split() for line in lines[header + 1 : header + 14]]
    assert len(rows) == 13 and all(row[0] in "0123" for row in rows)
    assert "\x1b" not in done.stdout and sum("fastest" in line for line in lines[header:-1]) >= 1
    assert json.loads(done.stdout[done.stdout.index("{") :])["zero_optimization"]["stage"] in STAGES


def test_a_model_of_the_program_and_of_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("from torch import nn\ndef build():\n    return nn.Linear(1000, 1000)\n")
    monkeypatch.chdir(tmp_path)
    assert answer("--model", "mine:build")["parameters"] == 1_001_000
    config = tmp_path / "config.json"
    config.write_text(json.dumps({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 100,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }))  # fmt: skip
    pytest.importorskip("transformers", reason="reads other libraries' configs")
    found = answer("--hf_config", config, "--seq", 16)
    assert found["parameters"] == 86_848 and "counted" in found["activations"]["how"]
    missing = importlib.import_module

    def absent(name: str, *more: object) -> object:
        if name == "transformers":
            raise ImportError(name)
        return missing(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    done = run("--hf_config", config)
    assert done.exit_code == 2 and "pip install transformers" in done.stderr


# Parameters of published models, which the defaults of these configs describe.
PUBLISHED = {
    ("gpt2", "GPT2LMHeadModel"): 124_439_808,
    ("llama", "LlamaForCausalLM"): 6_738_415_616,
    ("mistral", "MistralForCausalLM"): 7_241_732_096,
    ("mixtral", "MixtralForCausalLM"): 46_702_792_704,
    ("gpt_neox", "GPTNeoXForCausalLM"): 20_554_567_680,
    ("falcon", "FalconForCausalLM"): 6_921_720_704,
    ("opt", "OPTForCausalLM"): 125_239_296,
    ("t5", "T5ForConditionalGeneration"): 60_506_624,
    ("bert", "BertForMaskedLM"): 109_514_298,
    ("vit", "ViTForImageClassification"): 85_800_194,
    ("phi", "PhiForCausalLM"): 1_418_270_720,
    ("qwen2", "Qwen2ForCausalLM"): 494_032_768,
}
QWEN2 = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(("kind", "architecture"), PUBLISHED, ids=[kind for kind, _ in PUBLISHED])
def test_models_of_hugging_face_have_their_parameters(kind: str, architecture: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="reads other libraries' configs")
    sizes = QWEN2 if kind == "qwen2" else {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "architectures": [architecture], **sizes}))
    found = answer("--hf_config", tmp_path, "--seq", 16)
    assert found["parameters"] == PUBLISHED[kind, architecture]
    assert found["model"].startswith(architecture)
    assert ("counted" in found["activations"]["how"]) == (kind != "vit")  # which sees no tokens


def test_a_number_beyond_all_models_is_answered() -> None:
    done = run("--params", "1000t")
    assert done.exit_code == 1 and "nothing fits" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "--params, --model and --hf_config"),
        (("--params", "7b", "--model", "a:b"), "--params, --model and --hf_config"),
        (("--params", "7q"), "write it as 7b"),
        (("--params", "0"), "write it as 7b"),
        (("--params", "7b", "--gpu_memory", "lots"), "write it as 80GB"),
        (("--params", "7b", "--network", "fast"), "100Gbit"),
        (("--params", "7b", "--num_gpus", "0"), "num_gpus"),
        (("--model", "torch.nn"), "MODULE:CALLABLE"),
        (("--model", "no_such_module:f"), "No module named"),
        (("--model", "torch.nn:Linear"), "missing"),
        (("--model", "builtins:dict"), "not a torch.nn.Module"),
        (("--hf_config", "/nowhere/config.json"), "No such file"),
        (("nowhere.json", "--params", "7b"), "nowhere.json"),
    ],
)
def test_mistakes_are_named(arguments: tuple[str, ...], says: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2 and says in done.output and "Traceback" not in done.output
