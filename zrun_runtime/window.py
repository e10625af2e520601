"""What belongs to one update: which backward is its last, and how gradients are added up until then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch


def _nothing() -> None:
    pass


@dataclass
class Window:
    """The micro-batches between two updates. The engine moves it on; hooks and reducer ask it.

    steps: micro-batches of an update. done: how many of them `Engine.step` has counted.
    dtype: gradients are added up in it; None is each parameter's own.
    managed: False makes every step an update, however many backwards came before it.
    sums: a gradient is the sum over ranks, not their mean.
    forced: what a caller said about the backward that runs now, or the next: whether it is the last. None: count.
    held: backwards keep their gradients to themselves, until one runs that does not.
    driven: our own `Engine.backward` runs the backward.
    backwards: how many `Engine.backward` ran since `step` was called last.
    on_plain_backward: called when a backward begins that is not driven; may refuse it by raising.
    """

    steps: int = 1
    dtype: torch.dtype | None = None
    managed: bool = True
    sums: bool = False
    forced: bool | None = None
    done: int = 0
    held: bool = False
    driven: bool = False
    backwards: int = 0
    on_plain_backward: Callable[[], None] = _nothing
    dividing: ClassVar[int] = 0  # calls of any engine's `backward` under way: each has divided the loss

    @property
    def at_boundary(self) -> bool:
        """The backward that runs now, or the next one, is the last before an update."""
        if self.forced is not None:
            return self.forced
        return not self.managed or self.done + 1 >= self.steps

    @property
    def ends_with_this_backward(self) -> bool:
        """Nothing more will be added, so whole gradients may be reduced now. Unmanaged, only `step` knows."""
        return self.managed and not self.held and self.at_boundary

    @property
    def weight(self) -> float:
        """What a gradient that arrives is multiplied by: divided as the loss was not, which may be several engines'."""
        return 1.0 if Window.dividing else 1.0 / self.steps

    @contextmanager
    def drive(self) -> Iterator[None]:
        """`Engine.backward` of this window's engine runs."""
        self.driven = True
        self.backwards += 1
        Window.dividing += 1
        try:
            yield
        finally:
            self.driven = False
            Window.dividing -= 1

    @property
    def counts_too_slowly(self) -> bool:
        """As many backwards as make a step ran, but `step`, which counts one micro-batch a call, is called once."""
        return self.managed and self.forced is None and self.backwards >= self.steps > 1 and not self.done

    def hold(self) -> None:
        """Keep gradients until `held` is false again. Several are added up from now on, in fp32 if in doubt."""
        self.held = True
        self.dtype = self.dtype or torch.float32

    def move_on(self, updated: bool) -> None:
        """A micro-batch is over, and with it the window if there was an update."""
        self.done = 0 if updated else self.done + 1
        self.backwards = 0
