"""Sections beside training itself: checkpoint, monitors and profilers, and features that are not supported.

A key declared without `key(...)` is spoken for by its section (see Document).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from zrun_runtime.config.keys import (
    HONOURED,
    NO_EFFECT,
    UNSUPPORTED,
    Count,
    DtypeName,
    Number,
    Positive,
    Section,
    Size,
    SizeOrMinusOne,
    key,
    section,
)


class OpenConfig(Section):
    """A section of which nothing is read."""

    open_ended: ClassVar[bool] = True


class AioConfig(Section):
    """How files on NVMe are read and written."""

    block_size: Count = key(1_048_576, HONOURED, "bytes: a tile is split between threads in parts of this, or of 8 MiB")
    queue_depth: Count = key(8, HONOURED, "upper bound of requests under way")
    intra_op_parallelism: Count = key(1, HONOURED, "threads that read and write; one reaches most disks' bandwidth")
    thread_count: Count = key(1, HONOURED, "the same")
    single_submit: bool = key(False, NO_EFFECT, "requests are large, so how they are submitted does not matter")
    overlap_events: bool = key(True, NO_EFFECT, "reading, computing and writing always overlap")
    use_gds: bool = key(False, NO_EFFECT, "data go through page-locked host memory")


class ActivationCheckpointingConfig(Section):
    """For `zrun_runtime.checkpointing.checkpoint`, which the model calls; nothing is checkpointed by itself."""

    cpu_checkpointing: bool = key(False, HONOURED, "checkpointing.checkpoint() keeps its inputs in host memory")
    partition_activations: bool = key(False, NO_EFFECT, "there is no model parallelism to share them out over")
    contiguous_memory_optimization: bool = key(False, NO_EFFECT, "torch's allocator does not need it")
    number_checkpoints: Count | None = key(None, NO_EFFECT, "there may be any number of them")
    synchronize_checkpoint_boundary: bool = key(False, NO_EFFECT, "nothing waits for the device there")
    profile: bool = key(False, NO_EFFECT, "use torch.profiler")


def _as_mode(value: Any) -> Any:
    return value.capitalize() if isinstance(value, str) else value


class CheckpointConfig(Section):
    """For `engine.save_checkpoint` and `engine.load_checkpoint`; see docs/checkpoints.md."""

    asynchronous: bool = key(
        False, HONOURED, "checkpoints are copied to host memory and written while training goes on", alias="async"
    )
    keep_last: Count | None = key(
        None, HONOURED, "of checkpoints named global_step..., only the newest so many are kept; null: all"
    )
    timeout: Positive = key(300.0, HONOURED, "seconds that ranks wait for one another before they save or load")
    tag_validation: Annotated[Literal["Warn", "Ignore", "Fail"], BeforeValidator(_as_mode)] = key(
        "Fail", HONOURED, "what happens where ranks give different tags: an error, or rank 0's tag is taken"
    )
    use_node_local_storage: bool = key(False, HONOURED, "every host has a disk of its own for its ranks' files")
    load_universal: bool = key(False, NO_EFFECT, "every checkpoint loads at any world size and stage")
    parallel_write: dict[str, Any] = key({}, NO_EFFECT, "all ranks write at the same time")
    checkpoint_serialization: bool = key(True, NO_EFFECT, "there is one checkpoint format")
    writer: dict[str, Any] | None = key(None, NO_EFFECT, "there is one writer, which goes past the page cache")


class TensorboardConfig(Section):
    """Loss, learning rate, gradient norm and loss scale of every step, over samples, as event files of rank 0."""

    enabled: bool = key(False, HONOURED, "rank 0 writes every step's numbers; the package tensorboard is needed")
    output_path: str = key("", HONOURED, "the directory that holds job_name; without it the working directory")
    job_name: str = key("DeepSpeedJobName", HONOURED, "the directory that the files are in")


class CsvMonitorConfig(TensorboardConfig):
    """The same as text: one file for each kind of number."""

    enabled: bool = key(False, HONOURED, "rank 0 writes every step's numbers, a file for each kind")


class WandbConfig(Section):
    """The same as a run of Weights & Biases."""

    enabled: bool = key(False, HONOURED, "rank 0 logs every step's numbers; the package wandb is needed")
    group: str | None = key(None, HONOURED, "wandb's group of the run")
    team: str | None = key(None, HONOURED, "wandb's entity")
    project: str = key("deepspeed", HONOURED, "wandb's project")


class CometConfig(Section):
    """The same as an experiment of Comet."""

    enabled: bool = key(False, HONOURED, "rank 0 logs numbers; the package comet_ml is needed")
    samples_log_interval: Count = key(100, HONOURED, "samples between two logs")
    project: str | None = key(None, HONOURED, "comet's project")
    workspace: str | None = key(None, HONOURED, "comet's workspace")
    api_key: str | None = key(None, HONOURED, "comet's key of the user; better in its environment variable")
    experiment_name: str | None = key(None, HONOURED, "comet's name of the experiment")
    experiment_key: str | None = key(None, HONOURED, "comet's key of the experiment")
    online: bool | None = key(None, HONOURED, "false: logged to a file, to be uploaded later")
    mode: str | None = key(None, HONOURED, "get, create or get_or_create")


class FlopsProfilerConfig(Section):
    enabled: bool = False
    recompute_fwd_factor: Number = 0.0
    profile_step: Size = 1
    module_depth: SizeOrMinusOne = -1
    top_modules: Size = 1
    detailed: bool = True
    output_file: str | None = None


class CommsLoggerConfig(Section):
    enabled: bool = False
    prof_all: bool = True
    prof_ops: list[str] = []
    verbose: bool = False
    debug: bool = False


class TimersConfig(Section):
    throughput: dict[str, Any] = {}


class CompileConfig(Section):
    open_ended: ClassVar[bool] = True
    deepcompile: bool = False


# ---- not supported: `enabled` is refused, the rest is not read -----------------------------------------------------


class AmpConfig(OpenConfig):
    enabled: bool = key(False, UNSUPPORTED, 'Apex is not supported: use "bf16": {"enabled": true} instead')


class TorchAutocastConfig(Section):
    enabled: bool = key(
        False, HONOURED, "the forward runs under torch.autocast; parameters are fp32, or what fp16 or bf16 says"
    )
    dtype: DtypeName | None = key(
        None, HONOURED, "bf16, or fp16, which scales the loss as the section fp16 says; without it as the parameters"
    )
    lower_precision_safe_modules: Any = key(None, NO_EFFECT, "gradients travel as communication_data_type says")


NO_TENSOR_PARALLELISM = "tensor parallelism is not supported: use ZeRO stage 3"


class TensorSizesConfig(OpenConfig):
    tp_size: Size = key(1, UNSUPPORTED, NO_TENSOR_PARALLELISM, harmless=(0,))


class TensorParallelConfig(OpenConfig):
    autotp_size: Size = key(0, UNSUPPORTED, NO_TENSOR_PARALLELISM, harmless=(1,))
    tp: TensorSizesConfig = section(TensorSizesConfig)


class ExpertParallelConfig(OpenConfig):
    enabled: bool = key(False, UNSUPPORTED, "expert parallelism is not supported: use ZeRO stage 3")


class HybridEngineConfig(OpenConfig):
    enabled: bool = key(False, UNSUPPORTED, "the hybrid engine is not supported: call generate on the engine's module")


class ElasticityConfig(OpenConfig):
    enabled: bool = key(
        False, UNSUPPORTED, "elastic batch sizes are not supported: set the three batch keys and remove this"
    )


class DataEfficiencyConfig(OpenConfig):
    enabled: bool = key(False, UNSUPPORTED, "data sampling and routing are not supported: do it in the data loader")


class CurriculumConfig(OpenConfig):
    enabled: bool = key(False, UNSUPPORTED, "a curriculum is not supported: do it in the data loader")


class LayerDropConfig(OpenConfig):
    enabled: bool = key(False, UNSUPPORTED, "progressive layer drop is not supported: do it in the model")


class EigenvalueConfig(OpenConfig):
    enabled: bool = key(False, UNSUPPORTED, "eigenvalues for quantization are not supported: remove it")


class QuantizeTrainingConfig(OpenConfig):
    enabled: bool = key(False, UNSUPPORTED, "quantized training is not supported: use torchao")
