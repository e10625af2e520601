"""What holds between keys: combinations that contradict themselves, and defaults that surprise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zrun_runtime.config.notes import Ledger
from zrun_runtime.config.resolved import Precision
from zrun_runtime.config.schema import Document


def precision_of(document: Document) -> Precision:
    """The type of the parameters."""
    if document.bf16.enabled:
        return "bf16"
    return "fp16" if document.fp16.enabled else "fp32"


def autocast_dtype_of(document: Document) -> str | None:
    """What the forward runs under torch.autocast of; None if it does not."""
    if not document.torch_autocast.enabled:
        return None
    precision = precision_of(document)
    return document.torch_autocast.dtype or ("bf16" if precision == "fp32" else precision)


def tell_of_conditions(document: Document, data: dict[str, Any], ledger: Ledger) -> None:
    """A note for each key whose effect depends on another one that is not there.

    Args:
        data: what the user gave, in today's spelling.
    """
    written, zero = data.get("zero_optimization"), document.zero_optimization
    if isinstance(written, dict) and "sub_group_size" in written and zero.offload_optimizer.device == "none":
        text = "it bounds an update where the optimizer is offloaded; on the device one group is updated at a time"
        ledger.note("zero_optimization.sub_group_size", "no_effect", text, zero.sub_group_size)


def check_rules(document: Document, data: dict[str, Any], ledger: Ledger) -> None:
    """Add a problem for each contradiction between keys, a note for each default one may not expect.

    Args:
        data: what the user gave, in today's spelling.
    """
    if document.fp16.enabled and document.bf16.enabled:
        ledger.problem("bf16.enabled", "fp16 and bf16 cannot both be on: turn one off")
    fp16 = document.fp16
    if fp16.enabled and not fp16.loss_scale and fp16.min_loss_scale > 2.0**fp16.initial_scale_power:
        text = f"is more than the first scale, 2 ** initial_scale_power = {2**fp16.initial_scale_power}: make it less"
        ledger.problem("fp16.min_loss_scale", text)
    precision, wanted = precision_of(document), document.data_types.param_dtype
    if wanted is not None and wanted != precision:
        ledger.problem("data_types.param_dtype", f"is {wanted}, but fp16 and bf16 make the parameters {precision}")
    cast = autocast_dtype_of(document)
    if cast == "fp32":
        ledger.problem("torch_autocast.dtype", "fp32 is what runs without it: use bf16 or fp16, or turn it off")
    elif cast is not None and precision not in ("fp32", cast):
        ledger.problem("torch_autocast.dtype", f"is {cast}, but {precision}.enabled is on: make them the same")
    zero = document.zero_optimization
    for name, offload in (("offload_param", zero.offload_param), ("offload_optimizer", zero.offload_optimizer)):
        if offload.device == "nvme" and not offload.nvme_path:
            ledger.problem(f"zero_optimization.{name}.nvme_path", "is missing: device nvme needs a directory")
    for path in _switched_on(document.compression_training, "compression_training"):
        ledger.problem(path, "compression is not supported: set it to false, and use torchao")
    if "gradient_clipping" not in data and not ledger.has_note("gradient_clipping"):
        text = "not given: DeepSpeed's default; 0 turns clipping off"
        ledger.note("gradient_clipping", "assumed", text, document.gradient_clipping)


def _switched_on(section: dict[str, Any], path: str) -> Iterator[str]:
    for name, value in section.items():
        place = f"{path}.{name}"
        if isinstance(value, dict):
            yield from _switched_on(value, place)
        elif name == "enabled" and value is True:
            yield place
