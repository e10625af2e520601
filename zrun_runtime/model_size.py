"""How large a model is, counted on a module without values or guessed from a number of parameters; its activations.

[Note: activations]
What a forward keeps for its backward is counted by running it on the meta device, where nothing is computed: every
tensor that autograd saves, each storage once, parameters left out. With activation checkpointing a block keeps its
inputs alone, and one block at a time has all of its own. Attention is counted as fused kernels keep it (inputs, output
and one number a row), as on a GPU, not with the scores that the plain kernel on meta would save.

Of a model that is only a number of parameters, the estimate is 34 bytes a token, layer and unit of width in 16 bits
(Korthikanti et al. 2022, arXiv:2205.05198, equation 1, without the scores), and the logits with their gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

from zrun_runtime.config import LeafModuleConfig
from zrun_runtime.errors import ZeroRuntimeError
from zrun_runtime.grouping import find_units, manageable
from zrun_runtime.leaves import leaves_of
from zrun_runtime.memory import ModelSize, UnitSize
from zrun_runtime.tree import tensors_in

_ASPECT = 128  # width over depth of the usual transformer
_VOCABULARY = 32_000
_PER_TOKEN = 17  # values of the weights' type a token, layer and unit of width: 34 bytes in 16 bits
_LOGITS = 8  # bytes of a logit beside its own: the fp32 copy, and its gradient


@dataclass(frozen=True)
class Activations:
    """Bytes of one rank's micro-batch at the end of its forward."""

    plain: int
    checkpointed: int


@dataclass(frozen=True)
class Transformer:
    """The sizes of a decoder, from which the rest is estimated."""

    width: int
    layers: int
    vocabulary: int
    numel: int

    @classmethod
    def of(cls, numel: int) -> Transformer:
        """The usual shape of a model with so many parameters: 12 width^2 a layer, an embedding and a head."""
        width = (numel * _ASPECT / 12) ** (1 / 3)
        width = round(width / 64) * 64 if width > 64 else max(1, round(width))
        vocabulary = min(_VOCABULARY, numel // (6 * width))
        layers = max(1, round((numel - 2 * vocabulary * width) / (12 * width * width)))
        return cls(width, layers, vocabulary, numel)

    def size(self) -> ModelSize:
        """Its units: embedding, blocks, and a head that is held with the model unless it is larger than a block."""
        table = self.vocabulary * self.width
        block, rest = divmod(self.numel - 2 * table, self.layers)
        root = rest + (table if table <= block else 0)
        last = [] if table <= block else [UnitSize(table, twice=False)]
        blocks = [UnitSize(block)] * (self.layers - 1) + [UnitSize(block, twice=bool(last))]
        units = [UnitSize(root), UnitSize(table, twice=False), *blocks, *last]
        return ModelSize(self.numel, tuple(unit for unit in units if unit.numel), 0, (table, table) if table else ())

    def activations(self, tokens: int, weight: int) -> Activations:
        """See [Note: activations]. tokens: of a micro-batch; weight: bytes of an activation."""
        layer = _PER_TOKEN * weight * tokens * self.width
        logits = tokens * self.vocabulary * (weight + _LOGITS)
        kept = weight * tokens * self.width * self.layers
        return Activations(self.layers * layer + logits, kept + layer + logits)


def size_of(model: nn.Module) -> ModelSize:
    """Count a model; its parameters need no values."""
    managed = manageable(model.named_parameters(), imagined=True)
    claimed: set[int] = set()
    found: list[tuple[nn.Module, int]] = []
    for unit in find_units(model, managed, leaves_of(model, LeafModuleConfig())):
        mine = [p for p in unit.parameters.values() if id(p) not in claimed]
        claimed.update(id(p) for p in mine)
        if mine:
            found.append((unit.module, sum(p.numel() for p in mine)))
    last = _last([module for module, _ in found if module is not model], model)
    trained = [p for p in managed.values() if p.requires_grad]
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return ModelSize(
        trained=sum(p.numel() for p in trained),
        units=tuple(UnitSize(n, twice=not isinstance(m, nn.Embedding) and m is not last) for m, n in found),
        frozen=sum(p.numel() for p in managed.values() if not p.requires_grad),
        apart=tuple(p.numel() for p in trained if id(p) in tables),
    )


def _last(modules: Sequence[nn.Module], model: nn.Module) -> nn.Module | None:
    """The unit whose forward ends last, as far as registration tells: a head of its own, else the last block."""
    place = {id(module): number for number, module in enumerate(model.modules())}
    rest = [module for module in modules if not isinstance(module, nn.Embedding)]
    return max(rest, key=lambda module: place[id(module)], default=None)


# ---- activations of a module


def _fused(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """Attention that keeps what a fused kernel keeps."""
    return _Attention.apply(query, key, value)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        rows = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, out, rows)
        return out


def activations_of(model: nn.Module, batch: int, tokens: int) -> Activations:
    """Count what a forward of token ids (batch, tokens) keeps; the model is on the meta device.

    Raises:
        ZeroRuntimeError: the model's forward does not take token ids, or does not run without values.
    """
    watch = _Watch(model)
    ids = torch.zeros(batch, tokens, dtype=torch.int64, device="meta")
    two_sided = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    more = {"decoder_input_ids": ids} if two_sided else {}
    try:
        with (
            patch.object(functional, "scaled_dot_product_attention", _fused),
            torch.autograd.graph.saved_tensors_hooks(watch.pack, lambda tensor: tensor),
        ):
            _loss(model(ids, **more), ids)
    except Exception as error:  # whatever a stranger's forward raises
        raise ZeroRuntimeError(f"its forward does not run on token ids without values: {error}") from error
    finally:
        watch.remove()
    return watch.activations()


def _loss(output: Any, ids: Tensor) -> Tensor:
    logits = next((t for t in tensors_in(output) if t.dim() == 3 and t.is_floating_point()), None)
    if logits is None:
        return next(t for t in tensors_in(output) if t.is_floating_point()).sum()
    return functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())


class _Watch:
    """Attributes what autograd saves to the blocks of a model."""

    def __init__(self, model: nn.Module) -> None:
        managed = manageable(model.named_parameters(), imagined=True)
        self._parameters = {p.untyped_storage()._cdata for p in model.parameters()}
        self._kept: dict[int, tuple[Tensor, int]] = {}  # storage -> a tensor that keeps it alive, block (-1: none)
        self._inputs: dict[int, Tensor] = {}
        self._block = -1
        self._handles: list[Any] = []
        loose = (nn.Embedding, nn.Linear)
        blocks = [u for u in find_units(model, managed) if u.module is not model and not isinstance(u.module, loose)]
        for number, unit in enumerate(blocks):
            before = unit.module.register_forward_pre_hook(self._enter(number), with_kwargs=True)
            self._handles += [before, unit.module.register_forward_hook(self._leave)]

    def _enter(self, number: int) -> Callable[[nn.Module, Any, Any], None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._block = number
            for tensor in tensors_in((args, kwargs)):
                if tensor.requires_grad:
                    self._inputs[tensor.untyped_storage()._cdata] = tensor

        return enter

    def _leave(self, *_: Any) -> None:
        self._block = -1

    def pack(self, tensor: Tensor) -> Tensor:
        """A hook of autograd: something is kept."""
        key = tensor.untyped_storage()._cdata
        if key not in self._parameters:
            self._kept.setdefault(key, (tensor, self._block))
        return tensor

    def activations(self) -> Activations:
        """The sums."""
        by_block: dict[int, int] = {}
        for tensor, block in self._kept.values():
            by_block[block] = by_block.get(block, 0) + tensor.untyped_storage().nbytes()
        outside = by_block.pop(-1, 0)
        inputs = sum(t.untyped_storage().nbytes() for t in self._inputs.values())
        largest = max(by_block.values(), default=0)
        return Activations(sum(by_block.values()) + outside, outside + inputs + largest if by_block else outside)

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
