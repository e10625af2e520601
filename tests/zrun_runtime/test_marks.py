"""Who may have written into memory: everything that writes is seen, whatever it writes through; reading is free."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zrun_runtime
from zrun_runtime import master
from zrun_runtime.marks import WriteMark


class Memory:
    """A buffer with two parameters in it, marked."""

    def __init__(self) -> None:
        self.whole = torch.arange(64.0)
        self.weight, self.other = (nn.Parameter(part.view(4, 8)) for part in self.whole.chunk(2))
        self.mark = WriteMark()

    def begin(self, in_vain: bool = False) -> bool:
        """Mark it; is it?"""
        self.mark.begin(self.whole, ours=3, in_vain=in_vain)
        return self.mark.untouched(self.whole)


def _no_grad(write: Callable[[Tensor], Any]) -> Callable[[Memory], Any]:
    def call(memory: Memory) -> None:
        with torch.no_grad():
            write(memory.weight)

    return call


def _steps(parameter: nn.Parameter) -> None:
    parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW([parameter], fused=True).step()


WRITES: dict[str, Callable[[Memory], Any]] = {
    "in place": _no_grad(lambda p: p.clamp_(0, 1)),
    "p.data": lambda memory: memory.other.data.mul_(2),
    "an element": _no_grad(lambda p: p.__setitem__((0, 0), 1.0)),
    "by index": lambda memory: memory.weight.data.index_fill_(0, torch.tensor([1]), 0.0),
    "random": lambda memory: nn.init.normal_(memory.weight),
    "many at once": lambda memory: torch._foreach_mul_([memory.weight.data, memory.other.data], 2.0),
    "out=": _no_grad(lambda p: torch.add(p, 1, out=p)),
    "the buffer": lambda memory: memory.whole.zero_(),
    "its storage": lambda memory: memory.weight.untyped_storage().fill_(1),
    "numpy": lambda memory: memory.weight.detach().numpy().fill(1),
    "another library": lambda memory: torch.from_dlpack(memory.weight.detach()).zero_(),
    "a fused optimizer": lambda memory: _steps(memory.weight),
}
READS: dict[str, Callable[[Memory], Any]] = {
    "linear": lambda memory: nn.functional.linear(torch.ones(2, 8), memory.weight).sum().backward(),
    "embedding": lambda memory: nn.functional.embedding(torch.tensor([1, 2]), memory.weight).sum().backward(),
    "norm": lambda memory: nn.functional.layer_norm(torch.ones(2, 8), (8,), memory.weight[0], memory.other[0]),
    "clone": lambda memory: (memory.weight.clone(), memory.weight.data, memory.whole.to(torch.bfloat16)),
    "compare": lambda memory: torch.equal(memory.weight, memory.other),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_whatever_writes_is_seen(write: Callable[[Memory], Any]) -> None:
    memory = Memory()
    for _ in range(2):
        address = memory.whole.data_ptr()
        assert memory.begin()
        write(memory)
        assert not memory.mark.untouched(memory.whole)
        assert memory.whole.data_ptr() == address, "the memory was copied"


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_is_not_writing(read: Callable[[Memory], Any]) -> None:
    memory = Memory()
    assert memory.begin()
    read(memory)
    assert memory.mark.untouched(memory.whole)


@pytest.mark.parametrize("alias", [lambda p: p.detach().numpy(), lambda p: torch.from_dlpack(p.detach())])
def test_memory_that_others_hold_is_not_marked(alias: Callable[[Tensor], Any]) -> None:
    memory = Memory()
    kept = alias(memory.weight)
    assert not memory.begin()
    del kept
    assert memory.begin()


def test_memory_of_several_processes_is_not_marked() -> None:
    memory = Memory()
    assert memory.begin()
    memory.whole.share_memory_()
    assert not memory.mark.untouched(memory.whole)
    assert not memory.begin()


def test_what_is_touched_again_and_again_in_vain_is_not_marked_any_more() -> None:
    memory = Memory()
    assert memory.begin()
    for in_vain, marked in ((True, True), (False, True), (True, True), (True, False), (False, False)):
        assert memory.begin(in_vain) is marked


@pytest.mark.parametrize("offload", [{}, {"offload_optimizer": {"device": "cpu"}}], ids=["resident", "offloaded"])
def test_weights_are_compared_only_where_somebody_may_have_written(
    offload: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2, **offload},
    }
    engine, *_ = zrun_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    compared = []
    rounds_to = master._rounds_to
    monkeypatch.setattr(master, "_rounds_to", lambda *given: compared.append(1) or rounds_to(*given))

    def step() -> int:
        compared.clear()
        engine.backward(engine(torch.ones(1, 8, dtype=torch.bfloat16)).float().square().mean())
        engine.step()
        return len(compared)

    step()
    assert [step() for _ in range(3)] == [0, 0, 0]
    model[0].weight.data.fill_(0.5)
    assert step()
    assert not step()
    assert float((zrun_runtime.safe_get_full_fp32_param(model[0].weight) - 0.5).abs().max()) < 0.01
    engine.destroy()


def test_a_torch_that_cannot_mark_compares_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_is_cow_tensor")
    monkeypatch.delitem(sys.modules, "zrun_runtime.marks")
    marks = importlib.import_module("zrun_runtime.marks")
    memory, mark = torch.arange(8.0), marks.WriteMark()
    mark.begin(memory, ours=1, in_vain=False)
    assert not mark.untouched(memory)
    assert marks.memory_of(memory[4:]) == memory.data_ptr()
