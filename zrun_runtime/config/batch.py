"""The batch trio: train_batch_size == micro batch * accumulation steps * world size."""

from __future__ import annotations

from dataclasses import dataclass

from zrun_runtime.config.notes import Ledger

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


@dataclass(frozen=True)
class BatchSizes:
    """Samples a step over all ranks, samples a forward on one rank, forwards a step on one rank, ranks."""

    total: int
    micro: int
    steps: int
    world_size: int


def resolve_batch(
    total: int | None, micro: int | None, steps: int | None, world_size: int | None, ledger: Ledger
) -> BatchSizes:
    """Fill in what is not given.

    Args:
        total, micro, steps: None where not given. Without total and micro, a micro batch of 1 is assumed.
        world_size: None if not known: the one that fits if all three are given, else 1.
        ledger: gets a note for each size that was not given, and a problem if the three cannot agree.
    """
    given = {TOTAL: total, MICRO: micro, STEPS: steps}
    if world_size is None:
        world_size = _fitting_world(total, micro, steps)
    if total is None:
        if micro is None:
            micro = 1
        steps = steps or 1
        total = micro * steps * world_size
    elif micro is None:
        steps = steps or 1
        micro = total // world_size // steps
    elif steps is None:
        steps = total // micro // world_size
    sizes = BatchSizes(total, micro, steps, world_size)
    if total != micro * steps * world_size:
        _disagree(given, sizes, ledger)
        return sizes
    for path, value in ((TOTAL, total), (MICRO, micro), (STEPS, steps)):
        if given[path] is None:
            ledger.note(path, "assumed", _why(path, given), value)
    return sizes


def _fitting_world(total: int | None, micro: int | None, steps: int | None) -> int:
    if total and micro and steps and total % (micro * steps) == 0:
        return total // (micro * steps)
    return 1


def _why(path: str, given: dict[str, int | None]) -> str:
    if path == STEPS and (given[TOTAL] is None or given[MICRO] is None):
        return "not given: every forward is a step"
    if path == MICRO and given[TOTAL] is None:
        return "not given: one sample a forward; set it to what your loader yields"
    return "follows from the other sizes and the world size"


def _disagree(given: dict[str, int | None], sizes: BatchSizes, ledger: Ledger) -> None:
    """Say which numbers cannot hold together, and the nearest that can."""
    said = ", ".join(f"{path} {value}" for path, value in given.items() if value is not None)
    micro, steps = given[MICRO] or 1, given[STEPS] or 1
    unit = micro * steps * sizes.world_size
    fits = max(1, round(sizes.total / unit)) * unit
    if all(value is not None for value in given.values()):
        wrong = f"{micro} * {steps} * {sizes.world_size} is {unit}, not {sizes.total}"
        fix = f"set {TOTAL} to {unit}, or leave one of the three out"
    else:
        wrong = f"{sizes.total} is not a multiple of {unit}"
        fix = f"set {TOTAL} to a multiple of {unit}, such as {fits}"
    ledger.problem(TOTAL, f"{said} and world size {sizes.world_size} do not agree: {wrong}; {fix}")
