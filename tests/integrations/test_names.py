"""`import deepspeed` under the facade: which names there are, what the others say, and what importing costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zrun_runtime.integrations.deepspeed import SITE
from zrun_runtime.integrations.table import names_tables

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "deepspeed-names.md"

# What transformers, accelerate, lightning, peft and DeepSpeed's own tests import, and can use.
USED = """
deepspeed: initialize init_distributed add_config_arguments DeepSpeedEngine DeepSpeedConfig DeepSpeedConfigError
    DeepSpeedOptimizer zero checkpointing comm ops runtime utils accelerator OnDevice log_dist logger get_accelerator
    __version__ __version_major__ __git_hash__
deepspeed.comm: init_distributed is_initialized get_rank get_world_size get_local_rank barrier all_reduce broadcast
    all_gather_into_tensor reduce_scatter_tensor all_to_all_single new_group ReduceOp destroy_process_group
deepspeed.zero: Init GatheredParameters register_external_parameter unregister_external_parameter
deepspeed.runtime.engine: DeepSpeedEngine
deepspeed.runtime.lr_schedules: VALID_LR_SCHEDULES WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest
deepspeed.runtime.config: DeepSpeedConfig DeepSpeedConfigError ADAM_OPTIMIZER get_gradient_clipping get_log_level
    ADAGRAD_OPTIMIZER LAMB_OPTIMIZER LION_OPTIMIZER
deepspeed.runtime.constants: TRAIN_BATCH_SIZE GRADIENT_CLIPPING ROUTE_TRAIN
deepspeed.runtime.zero.partition_parameters: ZeroParamStatus Init GatheredParameters
deepspeed.runtime.zero.stage3: DeepSpeedZeroOptimizer_Stage3 estimate_zero3_model_states_mem_needs_all_live
deepspeed.runtime.zero.stage_1_and_2: DeepSpeedZeroOptimizer
deepspeed.runtime.zero.config: DeepSpeedZeroConfig ZeroStageEnum
deepspeed.runtime.zero.offload_config: OffloadDeviceEnum OffloadStateTypeEnum
deepspeed.runtime.fp16.fused_optimizer: FP16_Optimizer
deepspeed.runtime.fp16.unfused_optimizer: FP16_UnfusedOptimizer
deepspeed.runtime.bf16_optimizer: BF16_Optimizer
deepspeed.runtime.base_optimizer: DeepSpeedOptimizer ZeROOptimizer
deepspeed.runtime.utils: see_memory_usage partition_uniform partition_balanced prefix_sum_inc move_to_device
deepspeed.runtime.dataloader: RepeatingLoader
deepspeed.ops: __compatible_ops__
deepspeed.ops.adam: FusedAdam DeepSpeedCPUAdam
deepspeed.ops.adagrad: DeepSpeedCPUAdagrad
deepspeed.ops.lion: DeepSpeedCPULion FusedLion
deepspeed.ops.lamb: FusedLamb
deepspeed.ops.aio: AsyncIOBuilder
deepspeed.ops.op_builder: CPUAdamBuilder FusedAdamBuilder FusedLambBuilder UtilsBuilder
deepspeed.utils: logger log_dist groups RepeatingLoader safe_get_full_fp32_param safe_get_full_grad
    safe_get_full_optimizer_state safe_set_full_fp32_param safe_get_local_grad set_z3_leaf_modules get_z3_leaf_modules
deepspeed.utils.logging: logger log_dist log_dist_once warning_once set_log_level_from_string get_current_level
    should_log_le get_log_level_from_string log_levels LoggerFactory print_json_dist
deepspeed.utils.nvtx: instrument_w_nvtx
deepspeed.constants: TORCH_DISTRIBUTED_DEFAULT_PORT default_pg_timeout
deepspeed.runtime.zero.utils: is_zero_param is_zero_supported_optimizer ZeRORuntimeException
deepspeed.ops.op_builder.builder: OpBuilder
deepspeed.ops.lion.fused_lion: FusedLion
deepspeed.utils.groups: _get_data_parallel_world_size _get_sequence_parallel_world_size _get_sequence_parallel_rank
deepspeed.utils.torch: required_torch_version
deepspeed.utils.zero_to_fp32: get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint
    convert_zero_checkpoint_to_fp32_state_dict
deepspeed.checkpoint.utils: clone_tensors_for_torch_save
deepspeed.checkpointing: configure checkpoint is_configured
deepspeed.accelerator: get_accelerator is_current_accelerator_supported
deepspeed.launcher.runner: DEEPSPEED_ENVIRONMENT_NAME main
deepspeed.git_version_info: torch_info version installed_ops compatible_ops
deepspeed.env_report: cli_main
"""
# Also imported, and not to be used here.
NOT_USED = """
deepspeed: tp_model_init init_inference PipelineModule PipelineEngine DeepSpeedHybridEngine
deepspeed.runtime.sequence_parallel.ulysses_sp: UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter
deepspeed.runtime.zero: TiledLinear
deepspeed.moe.layer: MoE
deepspeed.pipe: PipelineModule LayerSpec
deepspeed.runtime.pipe.topology: PipeDataParallelTopology
deepspeed.monitor.monitor: MonitorMaster
deepspeed.launcher.multinode_runner: PDSHRunner
deepspeed.profiling.flops_profiler: FlopsProfiler get_model_profile
deepspeed.utils.zero_to_fp32: get_optim_files
deepspeed.elasticity: compute_elastic_config
deepspeed.sequence.layer: DistributedAttention
deepspeed.runtime.config_utils: DeepSpeedConfigModel
deepspeed.utils.numa: get_numactl_cmd
deepspeed.module_inject.layers: GatherReplacedLayerParams
deepspeed.inference.v2.engine_v2: InferenceEngineV2
deepspeed.runtime.pipe.schedule: TrainSchedule
deepspeed.runtime.data_pipeline.data_routing.helper: remove_random_ltd_state_dict
deepspeed.runtime.zero.parameter_offload: DeepSpeedZeRoOffload
deepspeed.runtime.precision_config: get_float16_config
deepspeed.runtime.torch_autocast: init_autocast_params
deepspeed.accelerator.cuda_accelerator: CUDA_Accelerator
deepspeed.comm: log_summary
deepspeed.checkpoint: DeepSpeedCheckpoint
"""


def _rows(text: str) -> list[tuple[str, str]]:
    joined = text.strip().replace("\n    ", " ").splitlines()
    return [(row.partition(": ")[0], name) for row in joined for name in row.partition(": ")[2].split()]


def run(code: str, *, cwd: Path | None = None, options: tuple[str, ...] = ()) -> str:
    done = _python(SITE, ROOT, words=(*options, "-c", code), cwd=cwd)
    assert not done.stderr
    return done.stdout


def _python(*found: str | Path, words: tuple[str, ...], cwd: Path | None) -> subprocess.CompletedProcess[str]:
    """A program that ends well, with these folders first on its path."""
    path = os.pathsep.join([*map(str, found), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_names_that_others_use_are_there() -> None:
    code = f"""
import importlib
for module, name in {_rows(USED)!r}:
    value = getattr(importlib.import_module(module), name)
    assert type(value).__name__ != "_Absent", (module, name)
"""
    run(code, options=("-W", "error::DeprecationWarning"))


def test_every_listed_name_leads_somewhere() -> None:
    code = """
import importlib
from deepspeed._names import ABSENT, EVERYTHING, HERE
for tables in (HERE, ABSENT):
    for row, names in tables.items():
        module = importlib.import_module(f"deepspeed.{row}" if row else "deepspeed")
        for name in set(names) - {EVERYTHING}:
            getattr(module, name)
"""
    run(code)


def test_a_name_that_is_not_there_is_an_error_when_it_is_used_and_says_why() -> None:
    code = f"""
import importlib
for module, name in {_rows(NOT_USED)!r}:
    stand_in = getattr(importlib.import_module(module), name)
    assert not isinstance(3, stand_in)
    for use in (stand_in, lambda: stand_in.register_with_transformers):
        try:
            use()
        except NotImplementedError as error:
            assert f"{{module}}.{{name}}" in str(error) and "lanned" in str(error), error
        else:
            raise SystemExit(f"{{module}}.{{name}} could be used")
"""
    run(code)


def test_log_helpers(tmp_path: Path) -> None:
    code = """
import json, logging
from deepspeed.utils import log_dist, logger, warning_once
from deepspeed.utils.logging import get_current_level, print_json_dist, set_log_level_from_string, should_log_le
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logger.addHandler(handler)
logger.propagate = False
set_log_level_from_string("info")
assert get_current_level() == logging.INFO and should_log_le("info") and not should_log_le("debug")
log_dist("all")
log_dist("another rank", ranks=[1])
warning_once("once"), warning_once("once")
assert said == ["[Rank 0] all", "once"], said
try:
    set_log_level_from_string("loud")
except ValueError as error:
    assert "debug, info, warning" in str(error)
print_json_dist({"a": 1}, ranks=[0], path="said.json")
assert json.load(open("said.json")) == {"a": 1, "rank": 0}
"""
    run(code, cwd=tmp_path)


def test_unknown_names_and_modules() -> None:
    code = """
import deepspeed
for statement in ("deepspeed.nothing", "deepspeed.runtime.utils.nothing", "deepspeed.runtime.constants.NOTHING"):
    try:
        eval(statement)
    except AttributeError as error:
        assert statement in str(error), error
    else:
        raise SystemExit(statement)
try:
    import deepspeed.nothing
except ModuleNotFoundError as error:
    assert error.name == "deepspeed.nothing"
else:
    raise SystemExit("a module of nothing")
"""
    run(code)


def test_importing_loads_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    """No timing: what could cost time is loading other modules, and there are none."""
    code = """
import sys
before = set(sys.modules)
import deepspeed
assert deepspeed.__version__.endswith("+zrun")
print(*sorted(set(sys.modules) - before))
"""
    loaded = run(code, cwd=tmp_path, options=("-W", "error")).split()
    heavy = {"torch", "numpy", "pydantic", "zrun_runtime"}
    assert not [name for name in loaded if name.partition(".")[0] in heavy]
    assert {name for name in loaded if name.startswith("deepspeed")} == {
        "deepspeed",
        "deepspeed._modules",
        "deepspeed._names",
    }
    assert not list(tmp_path.iterdir())


def test_libraries_find_it_and_find_it_new_enough() -> None:
    code = """
from importlib.metadata import metadata, version
from accelerate.utils import compare_versions, is_deepspeed_available
from lightning.fabric.strategies.deepspeed import _DEEPSPEED_AVAILABLE, _DEEPSPEED_GREATER_EQUAL_0_16
from transformers.integrations import is_deepspeed_available as found
assert metadata("deepspeed")["Name"] == "deepspeed" and version("deepspeed").endswith("+zrun")
assert is_deepspeed_available() and found() and _DEEPSPEED_AVAILABLE and _DEEPSPEED_GREATER_EQUAL_0_16
assert all(compare_versions("deepspeed", ">=", text) for text in ("0.9.3", "0.16.4", "0.18.2", "0.19.6"))
"""
    run(code, options=("-W", "ignore"))


def test_installed_for_a_notebook_and_for_what_it_starts() -> None:
    code = f"""
import subprocess, sys
from zrun_runtime.integrations.deepspeed import install
sys.path.remove({SITE!r})
install(), install()
import deepspeed
assert deepspeed.__file__.startswith({SITE!r}) and sys.path.count({SITE!r}) == 1
print(subprocess.check_output([sys.executable, "-c", "import deepspeed; print(deepspeed.__version__)"], text=True))
"""
    assert "zrun" in run(code)


@pytest.mark.parametrize("installed", ("before", "after"))
def test_where_deepspeed_itself_is_there(tmp_path: Path, installed: str) -> None:
    """It is left alone unless zrun is asked for, which is said; and never exchanged under a running program."""
    _install_theirs(tmp_path)
    code = f"""
import sys
from zrun_runtime.integrations import deepspeed as facade
from zrun_runtime.errors import ConfigError
sys.path[:] = [{str(tmp_path)!r}, *(p for p in sys.path if p != {SITE!r})]
facade.notice = lambda level, text: print(text)
if {installed == "before"}:
    import deepspeed
    try:
        facade.install()
    except ConfigError as error:
        print(error)
else:
    facade.install()
    import deepspeed
print(deepspeed.__version__)
"""
    said = run(code)
    if installed == "before":
        assert "imported already" in said and said.endswith("0.18.0\n")
    else:
        assert "DeepSpeed 0.18.0 is not used" in said and said.endswith("+zrun\n")


def _install_theirs(site: Path) -> None:
    """A distribution named deepspeed, with what its commands call."""
    (site / "deepspeed" / "launcher").mkdir(parents=True)
    (site / "deepspeed" / "__init__.py").write_text("__version__ = '0.18.0'\n")
    (site / "deepspeed" / "env_report.py").write_text("def cli_main():\n    print('their report')\n")
    (site / "deepspeed" / "launcher" / "__init__.py").touch()
    main = "import sys\ndef main(args=None):\n    print('their launcher', *sys.argv[1:])\n"
    (site / "deepspeed" / "launcher" / "runner.py").write_text(main)
    (site / "deepspeed-0.18.0.dist-info").mkdir()
    (site / "deepspeed-0.18.0.dist-info" / "METADATA").write_text("Name: deepspeed\nVersion: 0.18.0\n")


@pytest.mark.parametrize(
    ("command", "theirs"), (("deepspeed", "their launcher --num_gpus 1 x.py"), ("ds_report", "their report"))
)
def test_commands_are_theirs_where_deepspeed_is_installed(tmp_path: Path, command: str, theirs: str) -> None:
    _install_theirs(tmp_path)
    code = f"import sys; from zrun.alias import {command}; sys.argv[0] = {command!r}; {command}()"
    done = _without_facade(tmp_path, "-c", code, *(["--num_gpus", "1", "x.py"] if command == "deepspeed" else []))
    assert done.stdout == f"{theirs}\n"
    assert "DeepSpeed 0.18.0 is installed and runs; for zrun type `zrun --as_deepspeed`" in done.stderr


def test_a_job_that_asks_for_zrun_gets_it_and_hears_of_the_other(tmp_path: Path) -> None:
    _install_theirs(tmp_path)
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "script.py").write_text("import deepspeed; print(deepspeed.__version__)")
    words = ("-m", "zrun", "--plain", "--num_gpus", "1", "--backend", "gloo")
    said = _without_facade(tmp_path, *words, "--as_deepspeed", "job/script.py").stdout
    assert "the installed DeepSpeed 0.18.0 is not used" in said and "+zrun" in said
    said = _without_facade(tmp_path, *words, "job/script.py").stdout
    assert "0.18.0" in said and "+zrun" not in said and "not used" not in said


def test_the_report_is_the_doctors() -> None:
    code = "import sys; from zrun.alias import ds_report; sys.argv[:] = ['ds_report', '--json']; ds_report()"
    done = _without_facade(ROOT, "-c", code)
    assert json.loads(done.stdout)["hosts"]


def _without_facade(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return _python(ROOT, site, words=words, cwd=site)


def test_the_page_has_the_tables_of_today() -> None:
    written = PAGE.read_text().partition("<!-- tables -->\n")[2]
    advice = "replace what follows the marker by what `python -m zrun_runtime.integrations.table` prints"
    assert written == names_tables(), advice
