"""How much memory model states need under ZeRO 2 and 3, by the field's names for the question. Bytes, from memory.py.

Training is in 16 bits with Adam and without accumulation. Device figures are the states between steps and the gradients
of a step; where the optimizer or parameters are offloaded also what passes through: the buffers, or the two largest
layers. Host figures are those of a node, times a factor for all else that lives there.
"""

from __future__ import annotations

from torch import nn

from zrun_runtime.memory import Footprint, ModelSize, UnitSize, Widths, footprint
from zrun_runtime.plan import StatePlan, TierKind

_SPARE = 1.5
_ADAM = Widths(weight=2, moments=8, grad=2, wire=2)
_BUILT = 4  # bytes a parameter of a model that is built on the host: fp32


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = _SPARE,
) -> tuple[int, int]:
    """(bytes of host memory a node, bytes of device memory a GPU) with gradients and optimizer state sharded."""
    plan = StatePlan.of_stage(2, optimizer=_tier(cpu_offload))
    held = _held(ModelSize(total_params, (UnitSize(total_params),)), plan, num_gpus_per_node * num_nodes)
    built = _BUILT * total_params * num_gpus_per_node
    host = max(held.host.peak * num_gpus_per_node, built)
    return int(host * additional_buffer_factor), held.device.resident + held.device.grads


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = _SPARE,
) -> tuple[int, int, int]:
    """(bytes of host memory a node, of device memory a GPU, of the largest layer) with everything sharded.

    zero_init: the model is built in slices (zero.Init); else every rank builds all of it on the host first.
    """
    layers = (largest_layer_params, total_params - largest_layer_params)
    model = ModelSize(total_params, tuple(UnitSize(numel) for numel in layers if numel))
    plan = StatePlan.of_stage(3, _tier(cpu_offload and cpu_offload_params), _tier(cpu_offload))
    held = _held(model, plan, num_gpus_per_node * num_nodes)
    layer = 2 * _ADAM.weight * largest_layer_params  # two are whole at a time
    built = _BUILT * num_gpus_per_node * (largest_layer_params if zero_init else total_params)
    host = max(held.host.peak * num_gpus_per_node, built)
    return int(host * additional_buffer_factor), layer + held.device.resident + held.device.grads, layer


def _held(model: ModelSize, plan: StatePlan, world: int) -> Footprint:
    return footprint(model, _ADAM, plan, world)


def _tier(offloaded: bool) -> TierKind:
    return TierKind.CPU if offloaded else TierKind.DEVICE


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = _SPARE
) -> None:
    """Print the needs with and without offload."""
    print(f"{total_params:,} parameters, {num_nodes} node(s) x {num_gpus_per_node} GPU(s), ZeRO 2")
    for offload in (True, False):
        host, device = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        print(f"  {_gib(host)} a node | {_gib(device)} a GPU | offload_optimizer={'cpu' if offload else 'none'}")


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = _SPARE
) -> None:
    """Print the needs of this model."""
    total, _ = _sizes(model)
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = _SPARE,
) -> None:
    """Print the needs with every combination of offload and zero.Init."""
    print(
        f"{total_params:,} parameters, the largest layer {largest_layer_params:,}, "
        f"{num_nodes} node(s) x {num_gpus_per_node} GPU(s), ZeRO 3"
    )
    for optimizer, params in ((True, True), (True, False), (False, False)):
        for init in (True, False):
            host, device, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                optimizer,
                params,
                init,
                additional_buffer_factor,
            )
            words = [
                f"offload_param={'cpu' if params else 'none'}",
                f"offload_optimizer={'cpu' if optimizer else 'none'}",
            ]
            print(f"  {_gib(host)} a node | {_gib(device)} a GPU | {', '.join(words)}, zero.Init={init}")


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = _SPARE
) -> None:
    """Print the needs of this model."""
    total, largest = _sizes(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def _sizes(model: nn.Module) -> tuple[int, int]:
    """(parameters of the model, parameters that one module of it has for itself, at most)."""
    total = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    return total, max((sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()), default=0)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:9.2f} GiB"
