"""Our own optimizers by their published rules, and who is refused because slices are no matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from zrun_runtime.errors import ConfigError
from zrun_runtime.optimizers import Lamb, Lion, require_elementwise

GRADS = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]


def trained(kind: type[torch.optim.Optimizer], **options: Any) -> torch.Tensor:
    p = nn.Parameter(torch.ones(4, 3))
    optimizer = kind([p], **options)
    for grad in GRADS:
        p.grad = grad.clone()
        optimizer.step()
    return p.detach().double()


def test_lion_by_its_rule() -> None:
    p, m = torch.ones(4, 3, dtype=torch.float64), torch.zeros(4, 3, dtype=torch.float64)
    for g in GRADS:
        p = p - 0.1 * ((0.9 * m + 0.1 * g).sign() + 0.2 * p)
        m = 0.95 * m + 0.05 * g
    torch.testing.assert_close(trained(Lion, lr=0.1, betas=(0.9, 0.95), weight_decay=0.2), p, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("corrected", (True, False))
def test_lamb_by_its_rule(corrected: bool) -> None:
    p = torch.ones(4, 3, dtype=torch.float64)
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for t, grad in enumerate(GRADS, 1):
        g = grad.double()
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        first, second = (1 - 0.9**t, 1 - 0.99**t) if corrected else (1.0, 1.0)
        update = (m / first) / ((v / second).sqrt() + 1e-6) + 0.01 * p
        p = p - 0.05 * min(1.0, max(0.3, float(p.norm() / update.norm()))) * update
    options = {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.01, "max_coeff": 1.0, "min_coeff": 0.3}
    found = trained(Lamb, lr=0.05, bias_correction=corrected, **options)
    torch.testing.assert_close(found, p, rtol=1e-4, atol=1e-5)


class Signed(torch.optim.Optimizer):
    """Element-wise."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                p.add_(self.direction(p.grad), alpha=-group["lr"] / state["count"])

    def direction(self, grad: torch.Tensor) -> torch.Tensor:
        return grad.sign()


class Normed(Signed):
    """Needs the norm of the whole parameter."""

    def direction(self, grad: torch.Tensor) -> torch.Tensor:
        return grad / grad.norm()


class Orthogonal(Signed):
    """Needs a matrix."""

    def direction(self, grad: torch.Tensor) -> torch.Tensor:
        return torch.linalg.qr(grad)[0]


def test_an_unknown_class_is_tried_and_nothing_of_it_is_touched() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = Signed([p], lr=0.1)
    LambdaLR(optimizer, lambda step: 1.0)  # wraps optimizer.step
    require_elementwise(optimizer)
    assert torch.equal(p.detach(), torch.ones(3)) and not optimizer.state
    assert optimizer.param_groups[0]["params"] == [p]


@pytest.mark.parametrize("kind", (Normed, Orthogonal, torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.SparseAdam))
def test_what_needs_more_than_an_element_is_refused_by_name(kind: Any) -> None:
    with pytest.raises(ConfigError, match=f"{kind.__name__}.*(?s:.)*use AdamW"):
        require_elementwise(kind([nn.Parameter(torch.ones(8, 4))], lr=0.1))


@pytest.mark.parametrize("name", ("Muon", "AdamW8bit", "PagedLion4bit", "OneBitAdam", "DistributedMuonWithAuxAdam"))
def test_families_are_refused_without_a_trial(name: str) -> None:
    kind = type(name, (Signed,), {"direction": lambda self, grad: pytest.fail("it was tried")})
    with pytest.raises(ConfigError, match="cannot be sharded"):
        require_elementwise(kind([nn.Parameter(torch.ones(8, 4))], lr=0.1))


@pytest.mark.parametrize("name", ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Adadelta"))
def test_known_classes_pass_the_trial_too(name: str) -> None:
    kind = type(f"My{name}", (getattr(torch.optim, name),), {})
    require_elementwise(kind([nn.Parameter(torch.ones(2))], lr=0.1))
