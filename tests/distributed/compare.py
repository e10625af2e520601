"""How far a rank's outcome is from the reference's, as a list of complaints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .scenario import Outcome


def distance(got: Tensor, wanted: Tensor) -> float:
    """Norm-relative: |got - wanted| / |wanted|. Of two zero tensors: 0; infinite if shapes differ or NaN is met."""
    if got.shape != wanted.shape:
        return math.inf
    difference = float((got.double() - wanted.double()).norm())
    if difference == 0.0:
        return 0.0
    relative = difference / (float(wanted.double().norm()) or 1e-30)
    return relative if math.isfinite(relative) else math.inf


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    """All tensors as one fp64 vector, in the order of their names."""
    return torch.cat([torch.zeros(0, dtype=torch.float64)] + [tensors[k].double().flatten() for k in sorted(tensors)])


def each(
    what: str, got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], limit: float, floor: float = 0.0
) -> list[str]:
    """Complaints about every tensor that is farther away than `limit`, and by more than `floor` in absolute norm."""
    if set(got) != set(wanted):
        return [f"{what}: the names differ: {sorted(set(got) ^ set(wanted))}"]
    complaints = []
    for name in wanted:
        far = distance(got[name], wanted[name])
        if not far <= limit and not far * float(wanted[name].double().norm()) <= floor:
            complaints.append(f"{what} {name} {tuple(wanted[name].shape)}: {far:.1e} away (limit {limit:.0e})")
    return complaints


def numbers(what: str, got: Sequence[float], wanted: Sequence[float], limit: float) -> list[str]:
    """A complaint about the first number that is farther away than `limit`, relatively."""
    if len(got) != len(wanted):
        return [f"{what}: {len(got)} of them, not {len(wanted)}"]
    for index, (ours, true) in enumerate(zip(got, wanted, strict=True)):
        if not abs(ours - true) <= limit * max(abs(true), 1e-6):
            return [f"{what} {index}: {ours} instead of {true}"]
    return []


def gradients(got: Outcome, wanted: Outcome, limit: float) -> list[str]:
    """First-step gradients; one that is zero but for rounding cannot be right to more than the rounding of its sums."""
    floor = 1e-7 * float(flat(wanted.first_grads).norm())
    return each("first gradient of", got.first_grads, wanted.first_grads, limit, floor)


def published(outcome: Outcome) -> list[str]:
    """Every trained weight is its master, rounded to its own dtype, to the bit."""
    stale = [
        n for n, m in outcome.masters.items() if not torch.equal(m.to(outcome.weights[n].dtype), outcome.weights[n])
    ]
    return [f"weight {name} is not its master rounded" for name in stale]


def complaints(got: Outcome, wanted: Outcome, *, limit: float, whole: bool) -> list[str]:
    """Everything that is wrong with rank 0's outcome.

    Args:
        limit: norm-relative, for each tensor or the whole model, for gradients, norms and losses.
        whole: measure the weights of the whole model at once, as is right with Adam.
    """
    found = gradients(got, wanted, limit) + numbers("gradient norm of step", got.norms, wanted.norms, limit)
    frozen = {name: weight for name, weight in wanted.weights.items() if name not in wanted.masters}
    found += each("frozen weight", {name: got.weights[name] for name in frozen}, frozen, 0.0)
    found += published(got)
    if whole:
        far = distance(flat(got.masters), flat(wanted.masters))
        found += [] if far <= limit else [f"the whole model is {far:.1e} away (limit {limit:.0e})"]
    else:
        found += each("weight", got.masters, wanted.masters, limit)
    return found


def own_complaints(got: Outcome, wanted: Outcome, limit: float) -> list[str]:
    """What is wrong with what a rank has for itself: losses, evaluations, buffers."""
    found = numbers("loss", got.losses, wanted.losses, limit) + numbers("evaluation", got.evals, wanted.evals, limit)
    return found + each("buffer", got.buffers, wanted.buffers, limit)
