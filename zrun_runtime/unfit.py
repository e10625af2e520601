"""Models that would train wrong without a word if their parameters moved into flat buffers: refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn

from zrun_runtime.errors import ParameterError
from zrun_runtime.sharded_parameter import ShardedParameter


def refuse_unfit(model: nn.Module, managed: Mapping[str, nn.Parameter], ranks: int) -> None:
    """Look at everything that is to be managed.

    Raises:
        ParameterError: an embedding has sparse gradients, or edits its weight in its forward; two parameters share
            memory, or one shares it with itself.
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            _refuse_embedding(name or "the model", module, ranks)
    _refuse_overlaps(managed)


def _refuse_embedding(name: str, module: nn.Embedding | nn.EmbeddingBag, ranks: int) -> None:
    if module.sparse and module.weight.requires_grad:
        raise ParameterError(
            f"{name}: sparse=True makes sparse gradients, and a flat shard has no place for those",
            "build the embedding with sparse=False, or freeze it",
        )
    if module.max_norm is not None and ranks > 1:
        raise ParameterError(
            f"{name}: max_norm={module.max_norm} edits the rows that a rank looks up in its forward, so that ranks "
            "would train different weights",
            "build the embedding without max_norm, and clamp its weight between steps inside GatheredParameters",
        )


def _refuse_overlaps(managed: Mapping[str, nn.Parameter]) -> None:
    places = sorted((*_extent(p), name) for name, p in managed.items() if type(p) is not ShardedParameter)
    for first, second in pairwise(places):
        if second[0] < first[1] and _share_elements(managed[first[2]], managed[second[2]]):
            raise ParameterError(
                f"{second[2]}: it shares memory with {first[2]}, and would have memory of its own in a flat buffer",
                "make them one nn.Parameter, or clone the values of one",
            )
    for name, parameter in managed.items():
        spread = [stride for stride, size in zip(parameter.stride(), parameter.size(), strict=True) if size > 1]
        if type(parameter) is not ShardedParameter and 0 in spread:
            raise ParameterError(
                f"{name}: it is expanded, so that its elements share memory; in a flat buffer each would have its own",
                "expand it in the forward, or clone its values",
            )


def _extent(parameter: Tensor) -> tuple[int, int]:
    """First byte and the one after the last, in the memory of the process."""
    last = sum((size - 1) * stride for size, stride in zip(parameter.size(), parameter.stride(), strict=True))
    start = parameter.data_ptr()
    return start, start + (last + 1) * parameter.element_size()


def _share_elements(first: Tensor, second: Tensor) -> bool:
    """Extents overlap; whether elements do (columns of one matrix do not)."""
    size = first.element_size()
    start = min(first.data_ptr(), second.data_ptr())
    stop = max(_extent(first)[1], _extent(second)[1])
    marks = torch.zeros((stop - start) // size + 1, dtype=torch.bool)
    marks.as_strided(first.size(), first.stride(), (first.data_ptr() - start) // size).fill_(True)
    return bool(marks.as_strided(second.size(), second.stride(), (second.data_ptr() - start) // size).any())
