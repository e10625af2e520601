"""The whole JSON: every documented top-level key and section, its default, and what it does here."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

import zrun_runtime.config.extras_schema as extras
from zrun_runtime.config.keys import (
    HONOURED,
    NO_EFFECT,
    UNSUPPORTED,
    Count,
    DtypeName,
    Number,
    Positive,
    Section,
    as_number,
    as_whole,
    key,
    section,
)
from zrun_runtime.config.zero_schema import ZeroConfig

ScalePower = Annotated[int, Field(ge=0, le=1023), BeforeValidator(as_whole)]


class Fp16Config(Section):
    """fp16 training: parameters in fp16, the loss multiplied by a scale that adapts (loss_scale 0) or not."""

    enabled: bool = key(False, HONOURED, "parameters are fp16, master weights fp32, the loss is scaled")
    auto_cast: bool = key(False, HONOURED, "inputs of the model are cast to fp16")
    loss_scale: Number = key(0.0, HONOURED, "a fixed loss scale; 0 adapts it")
    initial_scale_power: ScalePower = key(16, HONOURED, "the loss scale starts at two to this power")
    loss_scale_window: Count = key(1000, HONOURED, "steps without overflow after which the scale doubles")
    hysteresis: Count = key(2, HONOURED, "overflows that are forgiven before the scale is halved")
    consecutive_hysteresis: bool = key(False, HONOURED, "a good step restores the whole hysteresis")
    min_loss_scale: Positive = key(1.0, HONOURED, "an overflow at this scale ends the run")
    fp16_master_weights_and_grads: bool = key(
        False, UNSUPPORTED, "fp16 master weights lose small updates and are not supported: set it to false"
    )


class Bf16Config(Section):
    """bf16 training: parameters in bf16, fp32 master weights, no loss scale."""

    enabled: bool = key(False, HONOURED, "parameters are bf16, master weights fp32")
    auto_cast: bool = key(False, HONOURED, "inputs of the model are cast to bf16")
    immediate_grad_update: bool = key(False, NO_EFFECT, "gradients are taken as soon as they exist")
    check_grad_overflow: bool = key(True, NO_EFFECT, "a step with a non-finite gradient is always skipped")
    bf16_master_weights_and_grads: bool = key(
        False, UNSUPPORTED, "bf16 master weights lose small updates and are not supported: set it to false"
    )
    bf16_optimizer_states: bool = key(
        False, UNSUPPORTED, "bf16 moments lose small updates and are not supported: set it to false"
    )
    loss_scale: Any = key(None, NO_EFFECT, "bf16 needs no loss scale")
    loss_scale_window: Any = key(None, NO_EFFECT, "bf16 needs no loss scale")
    initial_scale_power: Any = key(None, NO_EFFECT, "bf16 needs no loss scale")
    hysteresis: Any = key(None, NO_EFFECT, "bf16 needs no loss scale")
    min_loss_scale: Any = key(None, NO_EFFECT, "bf16 needs no loss scale")


KeptModules = Annotated[
    Literal["auto"] | tuple[str, ...] | None,
    BeforeValidator(lambda value: (value,) if isinstance(value, str) and value != "auto" else value),
]


class DataTypesConfig(Section):
    grad_accum_dtype: DtypeName | None = key(
        None, HONOURED, "gradients are added up in this; without it in fp32 where accumulation is above 1"
    )
    param_dtype: DtypeName | None = key(None, HONOURED, "must be what fp16 or bf16 says")
    buffer_dtype: DtypeName | None = key(
        None, HONOURED, "floating-point buffers are cast to it; without it they keep their own type"
    )
    keep_in_fp32_modules: KeptModules = key(
        None,
        HONOURED,
        'parameters of modules whose path has one of these names stay fp32; "auto": what a model of transformers names',
    )


class OptimizerSection(Section):
    """type: its name. params: its arguments. Both are checked by `optimizers`, which also tells of them."""

    type: str
    params: dict[str, Any] = {}
    legacy_fusion: bool = key(False, NO_EFFECT, "there is one fused optimizer")


class SchedulerSection(Section):
    """type: its name. params: its arguments. Both are checked by `optimizers`, which also tells of them."""

    type: str
    params: dict[str, Any] = {}


def _as_steps(value: Any) -> Any:
    """null, 0 and infinity: never. Absent is 10."""
    if value is None:
        return None
    number = as_number(value)
    return None if number in (0, math.inf) else number


class Document(Section):
    """A config as written, after old spellings were renamed and "auto" was resolved."""

    train_batch_size: Count | None = key(None, HONOURED, "samples a step, over all ranks")
    train_micro_batch_size_per_gpu: Count | None = key(None, HONOURED, "samples a forward, on one rank")
    gradient_accumulation_steps: Count | None = key(None, HONOURED, "forwards a step, on one rank")
    steps_per_print: Annotated[Count | None, BeforeValidator(_as_steps)] = key(
        10, HONOURED, "a line is printed every so many steps; null, 0 or Infinity: never"
    )
    gradient_clipping: Number = key(
        1.0,
        HONOURED,
        "a gradient with a larger L2 norm over the whole model is scaled down to it; 0 turns it off",
    )
    gradient_allreduce_op: Literal["mean", "sum"] = key(
        "mean", HONOURED, "a gradient is the mean over ranks, or their sum, which clipping and the norm then see"
    )
    prescale_gradients: bool = key(False, NO_EFFECT, "gradients are divided once, where it loses nothing")
    gradient_predivide_factor: Positive = key(1.0, NO_EFFECT, "gradients are divided once, where it loses nothing")
    communication_data_type: DtypeName | None = key(None, HONOURED, "gradients are reduced in this type")
    seq_parallel_communication_data_type: DtypeName | None = key(
        None, NO_EFFECT, "there is no sequence parallelism here"
    )
    dataloader_drop_last: bool = key(False, HONOURED, "the loader made by initialize() drops an incomplete last batch")
    managed_gradient_accumulation: bool = key(
        True, HONOURED, "false: every step() is an update, however many backwards came before it"
    )
    optimizer: OptimizerSection | None = key(None, HONOURED, "")
    scheduler: SchedulerSection | None = key(None, HONOURED, "")
    fp16: Fp16Config = section(Fp16Config)
    bf16: Bf16Config = section(Bf16Config)
    data_types: DataTypesConfig = section(DataTypesConfig)
    zero_optimization: ZeroConfig = section(ZeroConfig)
    zero_allow_untested_optimizer: bool = key(False, NO_EFFECT, "an optimizer is judged by what it computes")
    zero_force_ds_cpu_optimizer: bool = key(True, NO_EFFECT, "torch's fused optimizers run on the CPU too")

    wall_clock_breakdown: bool = key(
        False, HONOURED, "rank 0's times of forward, backward and step are told with every line that is printed"
    )
    memory_breakdown: bool = key(False, NO_EFFECT, "the memory of every rank is always told")
    dump_state: bool = key(False, NO_EFFECT, "`zrun config explain` shows the whole config")
    log_level: str | None = key(None, NO_EFFECT, "`zrun -v` decides how much is said")
    disable_allgather: bool = key(False, NO_EFFECT, "it never did anything")
    sparse_gradients: bool = key(False, NO_EFFECT, "embedding gradients are reduced as dense ones, which is exact")
    vocabulary_size: Count | None = key(None, NO_EFFECT, "it only ever gave advice")
    disable_python_gc: bool = key(False, NO_EFFECT, "Python's garbage collector is left alone")
    graph_harvesting: bool = key(False, NO_EFFECT, "it only tunes")
    use_data_before_expert_parallelism: bool = key(False, NO_EFFECT, "there is no expert parallelism here")
    use_node_local_storage: bool = key(False, NO_EFFECT, "it is read in the section checkpoint")
    data_parallel_size: Count | None = key(None, NO_EFFECT, "all ranks are data parallel")
    sequence_parallel_size: Count = key(
        1, UNSUPPORTED, "sequence parallelism is not supported: set it to 1 and use more ranks or checkpointing"
    )

    aio: extras.AioConfig = section(extras.AioConfig)
    activation_checkpointing: extras.ActivationCheckpointingConfig = section(extras.ActivationCheckpointingConfig)
    checkpoint: extras.CheckpointConfig = section(extras.CheckpointConfig)
    tensorboard: extras.TensorboardConfig = section(extras.TensorboardConfig)
    csv_monitor: extras.CsvMonitorConfig = section(extras.CsvMonitorConfig)
    wandb: extras.WandbConfig = section(extras.WandbConfig)
    comet: extras.CometConfig = section(extras.CometConfig)
    flops_profiler: extras.FlopsProfilerConfig = section(
        extras.FlopsProfilerConfig, NO_EFFECT, "use torch.utils.flop_counter or torch.profiler"
    )
    comms_logger: extras.CommsLoggerConfig = section(
        extras.CommsLoggerConfig, NO_EFFECT, "what is sent is always counted, and told by engine.traffic()"
    )
    timers: extras.TimersConfig = section(extras.TimersConfig, NO_EFFECT, "steps are always timed, without a barrier")
    compile: extras.CompileConfig = section(extras.CompileConfig, NO_EFFECT, "call torch.compile on the model yourself")
    pipeline: extras.OpenConfig = section(
        extras.OpenConfig, NO_EFFECT, "it is read for a PipelineModule only, and there is no pipeline parallelism here"
    )
    nebula: extras.OpenConfig = section(extras.OpenConfig, NO_EFFECT, "it is a checkpoint service of one cloud")
    datastates: extras.OpenConfig = section(extras.OpenConfig, NO_EFFECT, "there is one checkpoint format")
    datastates_ckpt: extras.OpenConfig = section(extras.OpenConfig, NO_EFFECT, "there is one checkpoint format")
    autotuning: extras.OpenConfig = section(extras.OpenConfig, NO_EFFECT, "nothing is tuned by trial runs")
    weight_quantization: extras.OpenConfig = section(extras.OpenConfig, NO_EFFECT, "it is for inference only")

    amp: extras.AmpConfig = section(extras.AmpConfig)
    torch_autocast: extras.TorchAutocastConfig = section(extras.TorchAutocastConfig)
    tensor_parallel: extras.TensorParallelConfig = section(extras.TensorParallelConfig)
    expert_parallel: extras.ExpertParallelConfig = section(extras.ExpertParallelConfig)
    hybrid_engine: extras.HybridEngineConfig = section(extras.HybridEngineConfig)
    elasticity: extras.ElasticityConfig = section(extras.ElasticityConfig)
    data_efficiency: extras.DataEfficiencyConfig = section(extras.DataEfficiencyConfig)
    curriculum_learning: extras.CurriculumConfig = section(extras.CurriculumConfig)
    progressive_layer_drop: extras.LayerDropConfig = section(extras.LayerDropConfig)
    eigenvalue: extras.EigenvalueConfig = section(extras.EigenvalueConfig)
    quantize_training: extras.QuantizeTrainingConfig = section(extras.QuantizeTrainingConfig)
    compression_training: dict[str, Any] = key({}, NO_EFFECT, "every method in it is off")
    sparse_attention: dict[str, Any] = key(
        {}, UNSUPPORTED, "sparse attention is not supported: use torch's scaled_dot_product_attention with a mask"
    )
