"""What the steps said so far: the newest values, smoothed rates, memory by rank, the time that is left. No text, no
clock of its own; bounded by the number of ranks.
"""

from __future__ import annotations

from zrun.events import MemoryUsed, StepDone

_KEEP = 0.9  # weight of the past in a rate: about the last ten steps


class Progress:
    """Fed with a job's events; read by the consoles that show steps.

    Args:
        world_size: ranks of the job; what others claim is not kept.
        total: steps of the whole run, if known already.
    """

    def __init__(self, world_size: int, total: int | None = None) -> None:
        self.newest: StepDone | None = None
        self.total = total
        self._world_size = world_size
        self._memory: dict[int, int] = {}  # rank -> bytes
        self._seconds = 0.0  # smoothed, of one step
        self._samples = 0.0  # smoothed, of one step
        self._measured = 0
        self._had_loss = False
        self.skips_in_a_row = 0  # up to the newest step; 0 if that was applied

    def fresh(self, total: int | None) -> Progress:
        """The beginning of another run of the same ranks."""
        return Progress(self._world_size, total)

    def memory_used(self, event: MemoryUsed) -> None:
        if 0 <= event.rank < self._world_size:
            self._memory[event.rank] = event.used

    def step_done(self, event: StepDone) -> None:
        skipped_before = self.newest.skipped_steps if self.newest else 0
        # The first step pays for warming up, so the second begins the averages anew.
        keep = _KEEP if self._measured > 1 else 0.0
        self._seconds = keep * self._seconds + (1 - keep) * event.seconds
        self._samples = keep * self._samples + (1 - keep) * event.samples
        self._measured += 1
        self._had_loss = self._had_loss or event.loss is not None
        self.skips_in_a_row = self.skips_in_a_row + 1 if event.skipped_steps > skipped_before else 0
        self.newest = event
        self.total = event.total_steps if event.total_steps is not None else self.total

    @property
    def loss(self) -> float | None:
        """The newest loss; not a number where a model that had one has none now; None where there never was one."""
        loss = self.newest.loss if self.newest else None
        return float("nan") if loss is None and self._had_loss else loss

    @property
    def step_seconds(self) -> float | None:
        return self._seconds if self._measured else None

    @property
    def samples_per_second(self) -> float | None:
        return self._samples / self._seconds if self._seconds > 0 else None

    @property
    def most_memory(self) -> tuple[int, int] | None:
        """(bytes, rank) of the rank that holds most."""
        if not self._memory:
            return None
        used, negative_rank = max((used, -rank) for rank, used in self._memory.items())
        return used, -negative_rank

    @property
    def fraction(self) -> float | None:
        """Done of the whole, 0..1; None where the whole is unknown."""
        if not self.newest or not self.total or self.total < 1:
            return None
        return min(1.0, max(0.0, self.newest.step / self.total))

    @property
    def seconds_left(self) -> float | None:
        if not self.newest or not self.total or self._measured < 2:
            return None
        return max(0, self.total - self.newest.step) * self._seconds
