"""The section zero_optimization: every key, its default, and what it does here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from zrun_runtime.config.keys import (
    HONOURED,
    LARGEST,
    NO_EFFECT,
    UNSUPPORTED,
    Count,
    Fraction,
    Section,
    Size,
    SizeOrMinusOne,
    as_whole,
    key,
    section,
)


def _as_names(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_as_names)]
Device = Annotated[Literal["none", "cpu", "nvme"], BeforeValidator(lambda value: "none" if value is None else value)]


def _as_stage(value: Any) -> int:
    if isinstance(value, list):
        raise ValueError("must be 0, 1, 2 or 3 (a list is for trial runs, of which there are none here)")
    return as_whole(value)


Stage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_as_stage)]


class OffloadParamConfig(Section):
    """Where shards of the parameters live between uses."""

    device: Device = key("none", HONOURED, "shards of parameters live there between uses, and are fetched ahead")
    nvme_path: str | None = key(None, HONOURED, "an existing directory on the disk; nothing is left in it")
    buffer_count: Count = key(5, HONOURED, "shards that are in memory at once on their way to or from the disk")
    buffer_size: Count = key(100_000_000, NO_EFFECT, "a buffer is as large as the largest shard")
    max_in_cpu: Size = key(
        1_000_000_000,
        HONOURED,
        "device nvme: up to so many elements of a rank's shards stay in host memory all the same",
    )
    pin_memory: bool = key(True, HONOURED, "host memory is page-locked where a GPU copies from it")


class OffloadOptimizerConfig(Section):
    """Where master weights and moments live between steps."""

    device: Device = key("none", HONOURED, "master weights and moments live there, and the host updates them")
    nvme_path: str | None = key(None, HONOURED, "an existing directory on the disk; nothing is left in it")
    buffer_count: Count = key(4, HONOURED, "tiles that are in memory at once on their way to or from the disk")
    pin_memory: bool = key(True, HONOURED, "host memory is page-locked where a GPU copies from it")
    pipeline_read: bool = key(False, NO_EFFECT, "the next tile is always read while one is updated")
    pipeline_write: bool = key(False, NO_EFFECT, "the last tile is always written while one is updated")
    fast_init: bool = key(False, NO_EFFECT, "nothing is written before the first step")
    ratio: Fraction = key(
        1.0, HONOURED, "this share of the elements is offloaded, in whole groups; the rest stays on the device"
    )
    super_offload: bool = key(False, NO_EFFECT, "the update runs in this process, with fused kernels")
    cpuadam_cores_perc: Fraction = key(0.8, NO_EFFECT, "the update uses the threads that torch has (OMP_NUM_THREADS)")


class LeafModuleConfig(Section):
    """Modules whose parameters are gathered together, whatever runs inside them."""

    classes: Names = key(
        ("MixtralSparseMoeBlock", "Qwen2MoeSparseMoeBlock", "Qwen3MoeSparseMoeBlock"),
        HONOURED,
        "modules of these classes are gathered as a whole, so ranks may use different parts of them",
    )
    names: Names = key((), HONOURED, "the same, by path in the model")
    name_suffixes: Names = key((), HONOURED, "the same, by the end of the path")


class ZeroConfig(Section):
    """The section zero_optimization. Sizes are counts of elements, never bytes."""

    stage: Stage = key(0, HONOURED, "what is sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too")
    reduce_bucket_size: Count = key(
        500_000_000,
        HONOURED,
        "upper bound of what is reduced at once; less where that suits the model; at stage 3 it is a block",
        stages=(0, 1, 2),
    )
    allgather_bucket_size: Count = key(
        500_000_000, NO_EFFECT, "a group is gathered in place, without a buffer that this could bound"
    )
    overlap_comm: bool | None = key(None, NO_EFFECT, "communication always overlaps computation")
    sub_group_size: Size = key(
        1_000_000_000, HONOURED, "upper bound of what is updated at once where the optimizer is offloaded"
    )
    offload_param: OffloadParamConfig = section(OffloadParamConfig, stages=(3,))
    offload_optimizer: OffloadOptimizerConfig = section(OffloadOptimizerConfig, stages=(1, 2, 3))

    prefetch_bucket_size: Size = key(
        50_000_000,
        HONOURED,
        "upper bound of what is gathered ahead of its use",
        alias="stage3_prefetch_bucket_size",
        stages=(3,),
    )
    param_persistence_threshold: Size = key(
        100_000,
        HONOURED,
        "upper bound of groups that stay gathered: the smallest ones, up to a hundredth of the model",
        alias="stage3_param_persistence_threshold",
        stages=(3,),
    )
    model_persistence_threshold: Size = key(
        LARGEST,
        HONOURED,
        "upper bound of what stays gathered in all, beside a hundredth of the model",
        alias="stage3_model_persistence_threshold",
        stages=(3,),
    )
    max_live_parameters: Size = key(
        1_000_000_000,
        HONOURED,
        "upper bound of what is whole at once when the next block is gathered ahead; the two largest groups at most",
        alias="stage3_max_live_parameters",
        stages=(3,),
    )
    max_reuse_distance: Size = key(
        1_000_000_000,
        NO_EFFECT,
        "a block is released as soon as it was used",
        alias="stage3_max_reuse_distance",
        stages=(3,),
    )
    gather_16bit_weights_on_model_save: bool = key(
        False,
        NO_EFFECT,
        "saving weights always gathers them, and in bounded memory",
        alias="stage3_gather_16bit_weights_on_model_save",
        stages=(3,),
    )
    module_granularity_threshold: Size = key(
        0,
        NO_EFFECT,
        "groups are whole blocks already",
        alias="stage3_module_granularity_threshold",
        stages=(3,),
    )
    use_all_reduce_for_fetch_params: bool = key(
        False,
        NO_EFFECT,
        "parameters are gathered in place, which moves fewer bytes",
        alias="stage3_use_all_reduce_for_fetch_params",
        stages=(3,),
    )
    allgather_sequential: bool = key(
        False,
        NO_EFFECT,
        "a group's parameters lie side by side and are gathered at once",
        alias="stage3_allgather_sequential",
        stages=(3,),
    )
    leaf_module: LeafModuleConfig = section(LeafModuleConfig, HONOURED, "", stages=(3,))

    contiguous_gradients: bool = key(True, NO_EFFECT, "gradients always lie side by side")
    reduce_scatter: bool = key(True, NO_EFFECT, "the collective follows from how gradients are laid out")
    use_multi_rank_bucket_allreduce: bool = key(True, NO_EFFECT, "gradients are reduce-scattered, half the bytes")
    allgather_partitions: bool = key(True, NO_EFFECT, "shards are always gathered, in place")
    round_robin_gradients: bool = key(False, NO_EFFECT, "every rank owns an equal slice of every group already")
    load_from_fp32_weights: bool = key(True, NO_EFFECT, "checkpoints restore the fp32 master weights")
    elastic_checkpoint: bool = key(False, NO_EFFECT, "any checkpoint loads at any world size")
    ignore_unused_parameters: bool = key(True, NO_EFFECT, "unused parameters count as zero gradients")
    memory_efficient_linear: bool = key(True, NO_EFFECT, "torch's own linear layer is used and never patched")
    pipeline_loading_checkpoint: bool = key(False, NO_EFFECT, "loading reads only what a rank needs")
    override_module_apply: bool = key(True, NO_EFFECT, "the default way of Module.apply is kept")
    log_trace_cache_warnings: bool = key(False, NO_EFFECT, "there is no trace cache")
    enable_sanity_checks: bool = key(False, NO_EFFECT, "ranks that diverge are always found")
    save_muon_momentum_buffer_in_memory: bool = key(False, NO_EFFECT, "there is no Muon here")
    compute_grad_norm: bool = key(True, NO_EFFECT, "the norm is taken anyway: it costs one small reduction a step")
    parameter_alignment: bool = key(False, NO_EFFECT, "every parameter starts on 16 bytes")
    grad_hooks: bool = key(True, NO_EFFECT, "gradients are always taken by hooks")

    legacy_stage1: bool = key(False, UNSUPPORTED, "the old stage 1 is gone: remove the key")
    zero_hpz_partition_size: Count = key(
        1, UNSUPPORTED, "a second set of shards within a node is not supported: remove the key", stages=(3,)
    )
    zero_quantized_weights: bool = key(
        False, UNSUPPORTED, "quantized gathering is not supported: set it to false", stages=(3,)
    )
    zero_quantized_nontrainable_weights: bool = key(
        False, UNSUPPORTED, "quantized storage of frozen weights is not supported: set it to false", stages=(3,)
    )
    zero_quantized_gradients: bool = key(
        False, UNSUPPORTED, "quantized reduction is not supported: set it to false", stages=(3,)
    )
    zeropp_loco_param: Any = key(None, UNSUPPORTED, "quantized reduction is not supported: remove the key", stages=(3,))
    mics_shard_size: SizeOrMinusOne = key(
        -1, UNSUPPORTED, "shards smaller than the world (MiCS) are not supported: remove the key", stages=(3,)
    )
    mics_hierarchical_params_gather: bool = key(False, NO_EFFECT, "there is no MiCS here")
    zenflow: Any = key(None, UNSUPPORTED, "late updates (ZenFlow) change the result and are not supported: remove it")
