"""The classic loop, Accelerate and Lightning, unchanged, against plain DDP."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.jobs import ROOT, job

from .running import CPU, QUIET, case, run_cases

pytestmark = pytest.mark.slow

STAGES = (0, 1, 2, 3)
CASES = [
    case("ddp"),
    case("ddp", accumulation=2),
    case("unwrapped"),
    *(case("classic", stage=stage) for stage in STAGES),
    case("tested"),
    case("optimizers"),
    *(case("asks", stage=stage) for stage in (2, 3)),
    *(case("accelerate", stage=stage) for stage in STAGES),
    *(case("accelerate", stage=stage, accumulation=2) for stage in (1, 2, 3)),
    case("accelerate", stage=2, offload="cpu"),
    case("several"),
    case("misled"),
]
LIGHTNING = [
    case("lightning"),
    case("lightning", accumulation=2),
    *(case("lightning", stage=stage) for stage in STAGES),
    case("lightning", stage=2, accumulation=2),
    case("lightning", stage=3, accumulation=2),
    *(case("fabric", stage=stage) for stage in (0, 2, 3)),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cases(tmp_path_factory.mktemp("loops"), "loop_cases.py", CASES)


@pytest.fixture(scope="module")
def lightning(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cases(tmp_path_factory.mktemp("lightning"), "loop_cases.py", LIGHTNING)


def same(mine: list[float], other: list[float], limit: float = 1e-5) -> bool:
    return len(mine) == len(other) and all(abs(a - b) <= limit for a, b in zip(mine, other, strict=True))


@pytest.mark.parametrize("stage", STAGES)
def test_the_classic_loop(stage: int, found: Any) -> None:
    mine, plain = found[case("classic", stage=stage)], found[case("ddp")]
    assert same(mine["losses"], plain["losses"])
    assert same(mine["norms"], plain["norms"])
    assert mine["kinds"] == [True, stage == 3, True]
    assert mine["overflow"] is False


def test_a_trained_model_is_initialized_once_more_to_be_tested(found: Any) -> None:
    mine = found[case("tested")]
    assert mine["same"] and mine["loaded"]
    assert "another engine has 0.weight sharded" in mine["error"] and "load with that engine" in mine["error"]


def test_optimizers_by_deepspeeds_names(found: Any) -> None:
    losses = found[case("optimizers")]
    assert same(losses["FusedAdam"], losses["AdamW"]) and same(losses["DeepSpeedCPUAdam"], losses["AdamW"])
    assert same(losses["coupled"], losses["Adam"]) and not same(losses["Adam"], losses["AdamW"])
    assert same(losses["DeepSpeedCPUAdagrad"], losses["Adagrad"])
    assert losses["DeepSpeedCPULion"] == losses["FusedLion"] != losses["FusedLamb"]


@pytest.mark.parametrize("stage", (2, 3))
def test_what_scripts_ask_of_parameters(stage: int, found: Any) -> None:
    mine = found[case("asks", stage=stage)]
    assert mine["named"] == (stage == 3) and mine["numel"] == 8 * 32
    assert all(mine["whole"])
    assert mine.get("alone", [2, 4]) == [2, 4] and ("alone" in mine) == (stage == 3)


@pytest.mark.parametrize(
    ("stage", "more"),
    (
        *((stage, {}) for stage in STAGES),
        *((stage, {"accumulation": 2}) for stage in (1, 2, 3)),
        (2, {"offload": "cpu"}),
    ),
    ids=str,
)
def test_accelerate(stage: int, more: dict[str, Any], found: Any) -> None:
    mine = found[case("accelerate", stage=stage, **more)]
    plain = found[case("ddp", **{key: value for key, value in more.items() if key == "accumulation"})]
    assert (mine["processes"], mine["type"]) == (2, "DEEPSPEED")
    assert same(mine["losses"], plain["losses"]) and same(mine["norms"], plain["norms"])
    assert mine["resumed"] and mine["unwrapped"]
    assert mine["weights"] == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert mine["saved"] == ["model.safetensors"]


def test_several_models_of_several_stages(found: Any) -> None:
    losses = found[case("several")]["losses"]
    assert losses[-1] < 0.5 * losses[0]


def test_plain_use_of_accelerate_is_left_alone(found: Any) -> None:
    assert found[case("unwrapped")] == {"same": True, "type": "MULTI_CPU"}


def test_a_wrong_count_of_processes_is_an_error(found: Any) -> None:
    error = found[case("misled")]["error"]
    assert "accelerate believes in 1 process(es), but there are 2" in error and "use_cpu=True" in error


@pytest.mark.parametrize("stage", STAGES)
def test_lightning(stage: int, lightning: Any) -> None:
    mine = lightning[case("lightning", stage=stage)]
    assert same(mine["losses"], lightning[case("lightning")]["losses"])
    assert mine["world"] == 2 and mine["steps"] == [8, 8, 0]
    assert abs(mine["validation"] - lightning[case("lightning")]["validation"]) <= 1e-5
    assert abs(mine["validation"] - mine["tested"]) <= 1e-5, "an engine over the same model, which trains nothing"


@pytest.mark.parametrize("stage", (2, 3))
def test_lightning_accumulates(stage: int, lightning: Any) -> None:
    mine = lightning[case("lightning", stage=stage, accumulation=2)]
    assert same(mine["losses"], lightning[case("lightning", accumulation=2)]["losses"])
    assert mine["steps"] == [4, 4, 0]


@pytest.mark.parametrize("stage", (2, 3))
def test_fabric(stage: int, lightning: Any) -> None:
    mine, plain = lightning[case("fabric", stage=stage)], lightning[case("fabric", stage=0)]
    assert same(mine["losses"], plain["losses"]) and len(set(mine["losses"])) == 8
    assert mine["note"] == 7


LAUNCHED = """
import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randint(4, (32,)))
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
for features, classes in loader:
    accelerator.backward(torch.nn.functional.cross_entropy(model(features), classes))
    optimizer.step()
accelerator.print(f"type {type(model).__name__}, {accelerator.num_processes} processes", end=", ")
accelerator.print(f"stage {model.zero_optimization_stage()}, {model.global_steps} steps")
"""


def test_accelerates_own_launcher(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LAUNCHED)
    words = "-m accelerate.commands.launch --use_deepspeed --num_processes 2 --zero_stage 3 --main_process_port 0"
    done = subprocess.run(
        [sys.executable, "-m", "zrun_runtime.integrations.deepspeed", *words.split(), str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**_environment(), **QUIET},
    )
    assert done.returncode == 0, done.stderr
    assert "type Engine, 2 processes, stage 3, 4 steps" in done.stdout


def test_the_command_named_deepspeed(tmp_path: Path) -> None:
    script = """
    import argparse
    import deepspeed
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    parser.add_argument("--local_rank", type=int)
    given = parser.parse_args()
    print(f"local rank {given.local_rank}, config {given.deepspeed_config}, {deepspeed.__version__}")
    """
    (tmp_path / "script.py").write_text("\n".join(line[4:] for line in script.splitlines()))
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    code = "import sys; from zrun.alias import deepspeed; sys.argv[0] = 'deepspeed'; deepspeed()"
    words = (
        "--hostfile=hosts --num_nodes=1 --num_gpus=2 --backend gloo script.py --deepspeed --deepspeed_config ds.json"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words.split()],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**_environment(), **QUIET},
    )
    assert done.returncode == 0, done.stderr
    for rank in "01":
        assert f"local rank {rank}, config ds.json, " in done.stdout.replace("[0-1] ", "[0] ") and "zrun" in done.stdout


def test_a_job_that_leaves_deepspeed_out_says_so(tmp_path: Path) -> None:
    """Accelerate does not tell us that it was told to use the CPU, and trains by itself."""
    script = """
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
    print(type(accelerator.prepare(torch.nn.Linear(2, 2))).__name__, accelerator.num_processes)
    """
    text = "\n".join(line[4:] for line in script.splitlines())
    with job(tmp_path, text, "--as_deepspeed", *CPU, environ=QUIET) as run:
        assert run.wait(120) == 0, run.err
    assert "DistributedDataParallel 2" in run.out
    assert "warning: --as_deepspeed: no worker called deepspeed.initialize" in run.out and "cpu=True" in run.out


def test_a_local_rank_is_given_unless_it_is_not_wanted(tmp_path: Path) -> None:
    with job(tmp_path, "import sys; print(sys.argv[1:])", "--as_deepspeed", "--local_rank_arg", "off", *CPU) as run:
        assert run.wait(60) == 0, run.err
        assert "[]" in run.out


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
