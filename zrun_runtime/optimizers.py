"""Optimizers: two that torch lacks, and the question whether one can work on slices of parameters at all.

[Note: element-wise or not]
A slice of a flat group is no parameter: it may begin in the middle of one matrix and end in the next. An optimizer
whose update of an element needs that element alone does not mind; one that looks at whole matrices would compute
something else, silently. Classes that are not known are therefore tried once: two steps on a small matrix, against the
same steps on its flat halves by optimizers of their own.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zrun_runtime.errors import ConfigError

_ELEMENTWISE = {
    getattr(torch.optim, name)
    for name in (
        *("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Adadelta", "Rprop", "ASGD"),
    )
}
_REFUSED = {
    "muon": "it needs whole matrices, which no rank has when they are sharded",
    "adafactor": "it needs whole matrices, which no rank has when they are sharded",
    "lbfgs": "it looks along one direction through the whole model",
    "sparseadam": "it needs sparse gradients, and they are reduced as dense ones",
    "8bit": "its state is quantized in blocks of a parameter, which slices cut elsewhere",
    "4bit": "its state is quantized in blocks of a parameter, which slices cut elsewhere",
    "onebit": "it compresses what ranks send, and they send gradients here",
    "zeroone": "it compresses what ranks send, and they send gradients here",
}
_USE = "use AdamW, or another optimizer that treats every element alike"
_LIMIT = 1e-5  # norm-relative


class Ratios(Protocol):
    """Multiplies each parameter's part of `update` by a function of the norms of parameter and update."""

    def __call__(self, values: Tensor, update: Tensor, ratio: Callable[[Tensor, Tensor], Tensor]) -> None: ...


def whole_parameter(values: Tensor, update: Tensor, ratio: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Ratios for an optimizer whose tensors are parameters."""
    update.mul_(ratio(values.norm(), update.norm()))


class Lion(Optimizer):
    """Lion (Chen et al. 2023, arXiv:2302.06675): the sign of an interpolated momentum, decay decoupled."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update."""
        loss = _evaluate(closure)
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                average = state.setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.lerp(p.grad, average, first).sign_(), alpha=-group["lr"])
                average.lerp_(p.grad, 1 - second)
        return loss


class Lamb(Optimizer):
    """LAMB (You et al. 2019, arXiv:1904.00962): Adam's direction, as long as the parameter times a clamped ratio.

    max_coeff, min_coeff: the ratio |parameter| / |update| is kept between them; it is 1 where either norm is 0.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": tuple(betas),
                "eps": eps,
                "weight_decay": weight_decay,
                "max_coeff": max_coeff,
                "min_coeff": min_coeff,
            },
        )
        self.ratios: dict[Tensor, Ratios] = {}  # of tensors that are not one parameter: how to take norms in them

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update."""
        loss = _evaluate(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        return loss

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        grad, (first, second), state = p.grad, group["betas"], self.state[p]
        if grad is None:
            return
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        mean = state["exp_avg"].lerp_(grad, 1 - first)
        square = state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
        mean_share, square_share = 1.0, 1.0
        if group["bias_correction"]:
            mean_share, square_share = 1 - first ** state["step"], 1 - second ** state["step"]
        update = (mean / mean_share).div_((square / square_share).sqrt_().add_(group["eps"]))
        update.add_(p, alpha=group["weight_decay"])

        def ratio(size: Tensor, length: Tensor) -> Tensor:
            clamped = (size / length).clamp(group["min_coeff"], group["max_coeff"])
            return torch.where((size > 0) & (length > 0), clamped, torch.ones_like(clamped))

        self.ratios.get(p, whole_parameter)(p, update, ratio)
        p.add_(update, alpha=-group["lr"])


def _evaluate(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


OWN: dict[str, type[Optimizer]] = {"Lion": Lion, "Lamb": Lamb}


def require_elementwise(optimizer: Optimizer) -> None:
    """See [Note: element-wise or not].

    Raises:
        ConfigError: the optimizer would compute something else on slices, or cannot be tried.
    """
    kind = type(optimizer)
    if kind in _ELEMENTWISE or any(_steps_as(kind, own) for own in OWN.values()):
        return
    name = kind.__name__.lower().replace("_", "")
    for part, why in _REFUSED.items():
        if part in name:
            raise ConfigError(f"optimizer {kind.__name__}: cannot be sharded: {why}", _USE)
    try:
        far = _distance_on_halves(optimizer)
    except Exception as error:
        raise ConfigError(f"optimizer {kind.__name__}: a trial step on a small matrix failed: {error}", _USE) from error
    if not far <= _LIMIT:
        raise ConfigError(
            f"optimizer {kind.__name__}: cannot be sharded: its step on a matrix differs from its steps on the halves",
            _USE,
        )


def _steps_as(kind: type[Optimizer], known: type[Optimizer]) -> bool:
    """A subclass with another constructor at most."""
    return issubclass(kind, known) and inspect.unwrap(kind.step) is inspect.unwrap(known.step)


def _distance_on_halves(optimizer: Optimizer) -> float:
    """How far a matrix and its halves end up from each other, relatively."""
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
    generator = torch.Generator().manual_seed(17)
    start = torch.randn(8, 6, generator=generator).to(device)
    grads = [
        torch.randn(8, 6, generator=generator).to(device) * torch.linspace(0.1, 3, 8, device=device)[:, None]
        for _ in "ab"
    ]
    whole = _train(optimizer, start, grads)
    halves = [
        _train(optimizer, start[rows].flatten(), [g[rows].flatten() for g in grads]) for rows in (slice(4), slice(4, 8))
    ]
    apart, moved = torch.cat(halves) - whole.flatten(), whole - start
    return float(apart.norm() / moved.norm().clamp_min(1e-30))


def _train(optimizer: Optimizer, start: Tensor, grads: list[Tensor]) -> Tensor:
    parameter = nn.Parameter(start.clone())
    twin = _twin(optimizer, parameter)
    for grad in grads:
        parameter.grad = grad.clone()
        twin.step()
    return parameter.detach()


def state_fields(optimizer: Optimizer, number: int, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The tensors of a parameter's size that the optimizer will keep for one in group `number`, and their dtypes.

    Found by two steps on a small one: most optimizers make their state at the first step, and some only then know what.
    """
    parameter = nn.Parameter(torch.ones(64, dtype=dtype))
    twin = _twin(optimizer, parameter, number)
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        twin.step()
    state = twin.state[parameter]
    return {k: v.dtype for k, v in state.items() if isinstance(v, Tensor) and v.shape == parameter.shape}


def _twin(optimizer: Optimizer, parameter: nn.Parameter, number: int = 0) -> Optimizer:
    """An optimizer of the same kind and the settings of a group over one other parameter."""
    twin: Optimizer = object.__new__(type(optimizer))  # copy.copy would leave out attributes of its own
    vars(twin).update(vars(optimizer))
    fields = vars(twin)
    fields.pop("step", None)  # a schedule may have wrapped it around the original
    for name, value in list(fields.items()):
        if name.endswith("_hooks"):
            fields[name] = OrderedDict()
        elif isinstance(value, (dict, list, set)):
            fields[name] = copy.copy(value)
    twin.state = defaultdict(dict)
    options = {key: value for key, value in optimizer.param_groups[number].items() if key != "params"}
    twin.param_groups = [{**copy.deepcopy(options), "params": [parameter]}]
    return twin
