"""The configuration: DeepSpeed's JSON, read, checked and resolved.

    config = load_config("ds.json", world_size=8)
    config.train_batch_size, config.zero.stage, config.notes

Free of torch, so that `zrun config check` is quick.
"""

from zrun_runtime.config.hints import AutoHints
from zrun_runtime.config.load import load_config
from zrun_runtime.config.notes import InvalidConfig, Note, Problem
from zrun_runtime.config.resolved import Config, MonitorsConfig, OptimizerConfig, SchedulerConfig
from zrun_runtime.config.schema import Bf16Config, Fp16Config
from zrun_runtime.config.summary import short_report, summary
from zrun_runtime.config.zero_schema import LeafModuleConfig, ZeroConfig

__all__ = [
    "AutoHints",
    "Bf16Config",
    "Config",
    "Fp16Config",
    "InvalidConfig",
    "LeafModuleConfig",
    "MonitorsConfig",
    "Note",
    "OptimizerConfig",
    "Problem",
    "SchedulerConfig",
    "ZeroConfig",
    "load_config",
    "short_report",
    "summary",
]
