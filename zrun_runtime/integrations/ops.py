"""`deepspeed.ops.op_builder`: nothing is ever compiled, so every builder is ready and builds nothing.

A builder's `is_compatible` says whether the runtime does what that extension is for. `load` gives no extension: scripts
that call the kernels of one by hand need another way.
"""

from __future__ import annotations

from typing import Any, NoReturn

from zrun_runtime.errors import ConfigError

# name of the builder class -> (name of the extension, the runtime does the same by its own means)
_BUILDERS = {
    "AsyncIOBuilder": ("async_io", False),
    "GDSBuilder": ("gds", False),
    "CPUAdamBuilder": ("cpu_adam", True),
    "CPUAdagradBuilder": ("cpu_adagrad", True),
    "CPULionBuilder": ("cpu_lion", True),
    "FusedAdamBuilder": ("fused_adam", True),
    "FusedLambBuilder": ("fused_lamb", True),
    "FusedLionBuilder": ("fused_lion", True),
    "UtilsBuilder": ("utils", True),
    "CCLCommBuilder": ("deepspeed_ccl_comm", False),
    "ShareMemCommBuilder": ("deepspeed_shm_comm", False),
    "QuantizerBuilder": ("quantizer", False),
    "FPQuantizerBuilder": ("fp_quantizer", False),
    "RandomLTDBuilder": ("random_ltd", False),
    "SparseAttnBuilder": ("sparse_attn", False),
    "SpatialInferenceBuilder": ("spatial_inference", False),
    "TransformerBuilder": ("transformer", False),
    "StochasticTransformerBuilder": ("stochastic_transformer", False),
    "InferenceBuilder": ("transformer_inference", False),
    "InferenceCoreBuilder": ("inference_core_ops", False),
    "InferenceCutlassBuilder": ("cutlass_ops", False),
    "RaggedOpsBuilder": ("ragged_device_ops", False),
    "RaggedUtilsBuilder": ("ragged_ops", False),
    "EvoformerAttnBuilder": ("evoformer_attn", False),
    "DeepCompileBuilder": ("dc", False),
}


class OpBuilder:
    """A builder of an extension that nobody builds."""

    NAME = ""
    compatible = False

    def is_compatible(self, verbose: bool = False) -> bool:
        """The runtime does what this extension is for."""
        return self.compatible

    def load(self, verbose: bool = True) -> NoReturn:
        """There is nothing to load.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"op_builder: there is no compiled extension {self.NAME}", "nothing is compiled here")

    builder = load

    def absolute_name(self) -> str:
        """Where DeepSpeed would have it."""
        return f"deepspeed.ops.{self.NAME}"


__compatible_ops__ = __installed_ops__ = dict(_BUILDERS.values())


def __getattr__(name: str) -> Any:
    if name in _BUILDERS:
        extension, compatible = _BUILDERS[name]
        return type(name, (OpBuilder,), {"NAME": extension, "compatible": compatible, "__doc__": OpBuilder.__doc__})
    raise AttributeError(f"zrun's deepspeed does not know deepspeed.ops.op_builder.{name}")
