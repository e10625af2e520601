"""The figures of the newest step as labelled cells, and how they fit in a narrow place. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import zrun.console.figures as figures
from zrun.console.progress import Progress

GAP = 2  # blanks between two cells


@dataclass(frozen=True)
class Cell:
    """One figure. `brief` is a shorter value for a line that is too narrow for `value`."""

    label: str
    value: str
    importance: int  # the least important goes first
    brief: str = ""
    alarm: bool = False  # worth a second look

    @property
    def width(self) -> int:
        return len(self.label) + 1 + len(self.value)


def step_label(progress: Progress) -> str:
    """20/200, or 20 where the whole is unknown."""
    step = progress.newest.step if progress.newest else 0
    return f"{step}/{progress.total}" if progress.total else str(step)


def cells(progress: Progress, name_rank: bool) -> list[Cell]:
    """The figures of the newest step, in the order to show them.

    Args:
        name_rank: say which rank holds the most memory.
    """
    step = progress.newest
    if step is None:
        return []
    rate = progress.samples_per_second
    lost_norm = step.grad_norm is None and progress.skips_in_a_row > 0
    norm = figures.NOT_FINITE if lost_norm else figures.short(step.grad_norm)
    row = [Cell("loss", figures.decimal(progress.loss), 9, alarm=figures.decimal(progress.loss) == figures.NOT_FINITE)]
    if step.learning_rate is not None:
        row.append(Cell("lr", figures.exponent(step.learning_rate), 7))
    if step.loss_scale is not None:
        row.append(Cell("scale", figures.scale(step.loss_scale), 1))
    row.append(Cell("norm", norm, 3, alarm=lost_norm))
    row.append(Cell("samples/s", figures.short(rate), 8))
    row.append(Cell("step time", figures.step_time(progress.step_seconds), 5))
    most = progress.most_memory
    if most is not None:
        used = figures.size(most[0])
        row.append(Cell("mem", f"{used} (rank {most[1]})", 4, brief=used) if name_rank else Cell("mem", used, 4))
    if step.skipped_steps:
        row.append(Cell("skipped", str(step.skipped_steps), 6, alarm=True))
    return row


def flow(row: list[Cell], width: int, lines: int) -> list[list[Cell]]:
    """`row` in at most `lines` lines of `width` columns, in as few as it takes.

    Where it does not fit, values become brief first, then the least important cells go. A last cell always stays.
    """
    brief = [replace(c, value=c.brief or c.value, brief="") for c in row]
    for allowed in range(1, lines + 1):
        for candidate in (row, brief):
            flowed = _flowed(candidate, width)
            if len(flowed) <= allowed:
                return flowed
    while len(brief) > 1 and len(_flowed(brief, width)) > lines:
        brief.remove(min(brief, key=lambda c: c.importance))
    return _flowed(brief, width)


def _flowed(row: list[Cell], width: int) -> list[list[Cell]]:
    lines: list[list[Cell]] = []
    room = 0
    for cell in row:
        if not lines or cell.width > room:
            lines.append([])
            room = width
        lines[-1].append(cell)
        room -= cell.width + GAP
    return lines


def step_line(progress: Progress) -> str:
    """The newest step as one line of words."""
    step = f"step {step_label(progress)}"
    left = progress.seconds_left
    row = cells(progress, name_rank=False)
    if left:
        row.append(Cell("eta", figures.duration(left), 0))
    return (" " * GAP).join([step, *(f"{c.label} {c.value}" for c in row)])


def skipped_line(progress: Progress) -> str:
    """What to say of a skipped step; empty where enough was said. Said of the 1st, 2nd, 4th, 8th ... in a row."""
    step, in_a_row = progress.newest, progress.skips_in_a_row
    if step is None or not in_a_row or in_a_row & (in_a_row - 1):
        return ""
    what = (
        f"step {step.step} skipped" if in_a_row == 1 else f"{in_a_row} steps in a row skipped, the last was {step.step}"
    )
    scale = f", loss scale now {figures.scale(step.loss_scale)}" if step.loss_scale is not None else ""
    return f"{what}: a gradient is not finite{scale} ({step.skipped_steps} skipped so far)"
