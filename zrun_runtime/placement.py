"""Which group's state goes to which tier, where a config splits a kind of state between two."""

from __future__ import annotations

from collections.abc import Sequence

from zrun_runtime.flat_group import GroupSpec
from zrun_runtime.plan import StatePlan, TierKind


def place(
    specs: Sequence[GroupSpec], plan: StatePlan, last_first: bool, share: float, in_memory: int
) -> list[StatePlan]:
    """A plan for each group, in their order.

    last_first: gradients come in the reverse order. share: of the elements that are trained, this much of the
    optimizer's state is offloaded; what stays are the groups whose gradients come last, for they would be waited for.
    in_memory: elements of a rank's shards that stay in host memory although the others go to a disk.
    """
    optimizer = dict.fromkeys(range(len(specs)), plan.optimizer.tier)
    trained = [number for number, spec in enumerate(specs) if spec.optimizer_group is not None]
    left = round(share * sum(_numel(specs[number]) for number in trained))
    for number in reversed(trained) if last_first else trained:
        if left >= _numel(specs[number]) / 2:
            left -= _numel(specs[number])
        else:
            optimizer[number] = TierKind.DEVICE
    params = dict.fromkeys(range(len(specs)), plan.params.tier)
    if plan.params.tier is TierKind.NVME:
        for number, spec in enumerate(specs):
            in_memory -= _numel(spec)
            if in_memory >= 0:
                params[number] = TierKind.CPU
    return [plan.with_tiers(params[number], optimizer[number]) for number in range(len(specs))]


def _numel(spec: GroupSpec) -> int:
    return sum(parameter.numel() for parameter in spec.parameters)
