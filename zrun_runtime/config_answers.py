"""What an engine answers about its config, one question a key, under the names of DeepSpeed's engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zrun_runtime.config import Config
from zrun_runtime.precision import DTYPES


def _asks(answer: Callable[[Config], Any], about: str) -> Callable[[Any], Any]:
    def question(self: ConfigAnswers) -> Any:
        return answer(self.settings)

    question.__doc__ = about
    return question


def _zero(key: str) -> Callable[[Any], Any]:
    """A question for one key of zero_optimization."""
    return _asks(lambda config: getattr(config.zero, key), f"The config's zero_optimization.{key}.")


def _key(key: str) -> Callable[[Any], Any]:
    """A question for one key at the top level."""
    return _asks(lambda config: getattr(config, key), f"The config's {key}.")


def _off(feature: str) -> Callable[[Any], Any]:
    """A question for what a config is refused for."""
    return _asks(lambda config: False, f"Never: {feature} is refused by the config.")


class ConfigAnswers(nn.Module):
    """Questions only. `Engine` sets the field."""

    settings: Config
    mpu = None  # nothing is model parallel
    has_moe_layers = False  # experts are parameters like any other
    sparse_tensor_module_names: frozenset[str] = frozenset()  # gradients of embeddings are dense

    zero_overlap_comm = _zero("overlap_comm")
    zero_reduce_bucket_size = _zero("reduce_bucket_size")
    zero_allgather_bucket_size = _zero("allgather_bucket_size")
    zero_allgather_partitions = _zero("allgather_partitions")
    zero_reduce_scatter = _zero("reduce_scatter")
    zero_contiguous_gradients = _zero("contiguous_gradients")
    zero_round_robin_gradients = _zero("round_robin_gradients")
    zero_sub_group_size = _zero("sub_group_size")
    zero_prefetch_bucket_size = _zero("prefetch_bucket_size")
    zero_param_persistence_threshold = _zero("param_persistence_threshold")
    zero_model_persistence_threshold = _zero("model_persistence_threshold")
    zero_max_live_parameters = _zero("max_live_parameters")
    zero_max_reuse_distance = _zero("max_reuse_distance")
    zero_load_from_fp32_weights = _zero("load_from_fp32_weights")
    zero_elastic_checkpoint = _zero("elastic_checkpoint")
    zero_ignore_unused_parameters = _zero("ignore_unused_parameters")
    zero_gather_16bit_weights_on_model_save = _zero("gather_16bit_weights_on_model_save")
    zero_hpz_partition_size = _zero("zero_hpz_partition_size")
    zero_quantized_weights = _zero("zero_quantized_weights")
    zero_quantized_gradients = _zero("zero_quantized_gradients")

    gradient_clipping = _key("gradient_clipping")
    gradient_predivide_factor = _key("gradient_predivide_factor")
    prescale_gradients = _key("prescale_gradients")
    dataloader_drop_last = _key("dataloader_drop_last")
    managed_gradient_accumulation = _key("managed_gradient_accumulation")
    steps_per_print = _key("steps_per_print")
    wall_clock_breakdown = _key("wall_clock_breakdown")

    amp_enabled = _off("Apex")
    autotuning_enabled = _off("trial runs")
    curriculum_enabled_legacy = _off("a curriculum")
    data_efficiency_enabled = _off("sampling of data")
    elasticity_enabled = _off("an elastic batch size")
    eigenvalue_enabled = _off("quantization by eigenvalues")
    pld_enabled = _off("progressive layer drop")
    random_ltd_enabled = _off("dropping of tokens")
    sparse_gradients_enabled = _off("sparse reduction")

    def torch_autocast_enabled(self) -> bool:
        """The forward runs under torch.autocast."""
        return self.settings.autocast_dtype is not None

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """What the forward runs under torch.autocast of."""
        name = self.settings.autocast_dtype
        return DTYPES[name] if name is not None else None

    def zero_cpu_offload(self) -> bool:
        """Optimizer state is asked to live in host memory."""
        return self.settings.zero.offload_optimizer.device == "cpu"

    def zero_has_nvme_offload(self) -> bool:
        """Something is asked to live on a disk."""
        zero = self.settings.zero
        return "nvme" in (zero.offload_optimizer.device, zero.offload_param.device)
