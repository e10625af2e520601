"""How much memory model states need, by the formulas that DeepSpeed publishes. Bytes."""

from __future__ import annotations

from torch import nn

_SPARE = 1.5  # what the formulas multiply host memory by
_LIVE_LAYERS = 4  # bytes a parameter of the largest layer: two copies of it in 16 bits


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = _SPARE,
) -> tuple[int, int]:
    """(bytes of host memory a node, bytes of device memory a GPU) with gradients and optimizer state sharded."""
    gpus = num_gpus_per_node * num_nodes
    if cpu_offload:
        return int(total_params * max(4 * gpus, 16) * additional_buffer_factor), 2 * total_params
    host = int(total_params * 4 * num_gpus_per_node * additional_buffer_factor)
    return host, 2 * total_params + 18 * total_params // gpus


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
    """(bytes of host memory a node, of device memory a GPU, of the largest layer) with everything sharded."""
    gpus, per_node = num_gpus_per_node * num_nodes, 1 / num_nodes
    layer = _LIVE_LAYERS * largest_layer_params
    if cpu_offload:
        held = 18 if cpu_offload_params else 16
        factor = held * per_node if zero_init else max(4 * num_gpus_per_node, held * per_node)
        device = layer if cpu_offload_params else layer + 2 * total_params // gpus
        return int(total_params * factor * additional_buffer_factor), device, layer
    whole = largest_layer_params if zero_init else total_params
    host = int(whole * 4 * num_gpus_per_node * additional_buffer_factor)
    return host, layer + 18 * total_params // gpus, layer


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
