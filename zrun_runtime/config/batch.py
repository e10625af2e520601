"""The batch trio: train_batch_size == micro batch * accumulation steps * world size.

[Note: fewer ranks than at first]
A job that goes on with fewer hosts trains the same only if a step sees as many samples as before. So train_batch_size
stays what it was at first, whether it was given or followed from the others, and so does the micro batch, which has to
fit in memory; the accumulation steps grow.
"""

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

    @property
    def agree(self) -> bool:
        return self.total == self.micro * self.steps * self.world_size


def resolve_batch(
    total: int | None,
    micro: int | None,
    steps: int | None,
    world_size: int | None,
    ledger: Ledger,
    first_world_size: int | None = None,
) -> BatchSizes:
    """Fill in what is not given.

    Args:
        total, micro, steps: None where not given. Without total and micro, a micro batch of 1 is assumed.
        world_size: None if not known: the one that fits if all three are given, else 1.
        ledger: gets a note for each size that was not given or does not hold, and a problem if they cannot agree.
        first_world_size: that of the job before it was started again. See [Note: fewer ranks than at first].
    """
    given = {TOTAL: total, MICRO: micro, STEPS: steps}
    if world_size is None:
        world_size = _fitting_world(total, micro, steps)
    sizes = _fill(given, world_size)
    if first_world_size is not None and first_world_size > world_size and any(given.values()):
        first = _fill(given, first_world_size)
        kept = _keep(first, world_size)
        if first.agree and kept.agree:
            sizes = kept
        elif first.agree and (total is None or not sizes.agree):
            _cannot_keep(first, world_size, ledger)
            return sizes
    if not sizes.agree:
        _disagree(given, sizes, ledger)
        return sizes
    for path, value in ((TOTAL, sizes.total), (MICRO, sizes.micro), (STEPS, sizes.steps)):
        if given[path] is None:
            ledger.note(path, "assumed", _why(path, given), value)
        elif given[path] != value:
            before = f"{given[path]} as the job was first started, with world size {first_world_size}"
            text = f"{value} keeps {TOTAL} {sizes.total} at world size {world_size}; {before}"
            ledger.note(path, "changed", text, value)
    return sizes


def _fill(given: dict[str, int | None], world_size: int) -> BatchSizes:
    """The sizes at a world size; they may disagree."""
    total, micro, steps = given[TOTAL], given[MICRO], given[STEPS]
    if total is None:
        micro = micro or 1
        steps = steps or 1
        total = micro * steps * world_size
    elif micro is None:
        steps = steps or 1
        micro = total // world_size // steps
    elif steps is None:
        steps = total // micro // world_size
    return BatchSizes(total, micro, steps, world_size)


def _keep(first: BatchSizes, world_size: int) -> BatchSizes:
    """As many samples a step and a forward at another world size; they disagree where that cannot be."""
    return BatchSizes(first.total, first.micro, first.total // (max(1, first.micro) * world_size), world_size)


def _cannot_keep(first: BatchSizes, world_size: int, ledger: Ledger) -> None:
    able = [str(n) for n in range(1, first.world_size + 1) if _keep(first, n).agree]
    ledger.problem(
        TOTAL,
        f"the job was first started with world size {first.world_size}: {TOTAL} {first.total}, {MICRO} {first.micro}; "
        f"at world size {world_size} no number of {STEPS} keeps them; "
        f"world sizes that do: {', '.join(able)}; start with one of them, or set other batch sizes",
    )


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
