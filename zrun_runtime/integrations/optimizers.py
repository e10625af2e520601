"""DeepSpeed's optimizers by name, over torch's fused kernels and the runtime's own; and its wrappers, to ask about.

DeepSpeed wraps an optimizer in one of its own; the runtime keeps the torch optimizer. So that `isinstance` says of it
what it says of DeepSpeed's, the classes of the wrappers ask the engine that drives the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from zrun_runtime.engine import Engine
from zrun_runtime.errors import ConfigError
from zrun_runtime.optimizers import Lamb, Lion
from zrun_runtime.zero.homes import engine_of

Betas = tuple[float, float]


class FusedAdam(torch.optim.Adam):
    """Adam, or AdamW (the default), by torch's fused kernel. `set_grad_none` has no effect."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if not bias_correction:
            raise ConfigError(f"{type(self).__name__}: bias_correction=False is not supported", "leave it out")
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            fused=True,
            decoupled_weight_decay=adam_w_mode,
        )


class DeepSpeedCPUAdam(FusedAdam):
    """The same, for state in host memory. `fp32_optimizer_states` has no effect: state is always fp32."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad by torch's fused kernel. `amsgrad` and `fp32_optimizer_states` have no effect."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay, fused=True)


class FusedLion(Lion):
    """Lion. `set_grad_none` has no effect."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.99),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)


class DeepSpeedCPULion(Lion):
    """Lion, for state in host memory. `fp32_optimizer_states` has no effect: state is always fp32."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.99),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr=lr, betas=betas, weight_decay=weight_decay)


class FusedLamb(Lamb):
    """LAMB.

    Raises:
        ConfigError: eps_inside_sqrt, amsgrad or max_grad_norm is asked for.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        if eps_inside_sqrt or amsgrad or max_grad_norm:
            raise ConfigError(
                "FusedLamb: eps_inside_sqrt, amsgrad and max_grad_norm are not supported",
                "gradients are clipped by gradient_clipping of the config",
            )
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, max_coeff, min_coeff)


class ParameterOffload:
    """What TRL takes hooks off from before it generates with gathered weights, and puts them on again after that.

    There is nothing to take off: gathered weights stay gathered, whatever modules run.
    """

    class _NoModule:
        def named_parameters(self, recurse: bool = True) -> Iterator[Any]:
            return iter(())

        ds_external_parameters = named_parameters

    def __init__(self) -> None:
        self.module = self._NoModule()
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: Any) -> None:
        """Has no effect."""


class _Asks(type):
    """The class of classes whose instances are the optimizers of the engines that `drives` says yes to."""

    drives: Callable[[Engine], bool]

    def __instancecheck__(cls, instance: Any) -> bool:
        engine = engine_of(instance)
        return engine is not None and bool(cls.drives(engine))


class DeepSpeedOptimizer(metaclass=_Asks):
    """The optimizer of any engine."""

    drives = staticmethod(lambda engine: True)


class ZeROOptimizer(DeepSpeedOptimizer):
    """That of an engine that shards something."""

    drives = staticmethod(lambda engine: engine.zero_optimization())


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """That of an engine that shards, but not the parameters."""

    drives = staticmethod(
        lambda engine: engine.zero_optimization() and not engine.zero_optimization_partition_weights()
    )


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):
    """That of an engine that shards parameters too."""

    drives = staticmethod(lambda engine: engine.zero_optimization_partition_weights())


class FP16_Optimizer(DeepSpeedOptimizer):
    """That of an engine with fp16 parameters that shards nothing."""

    drives = staticmethod(lambda engine: engine.fp16_enabled() and not engine.zero_optimization())


class BF16_Optimizer(DeepSpeedOptimizer):
    """That of an engine with bf16 parameters that shards nothing."""

    drives = staticmethod(lambda engine: engine.bfloat16_enabled() and not engine.zero_optimization())
