"""What belongs to one update: which backward is its last, and how gradients are added up until then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


def _nothing() -> None:
    pass


@dataclass
class Window:
    """The micro-batches between two updates. The engine moves it on; hooks and reducer ask it.

    steps: micro-batches of an update. done: how many of them `Engine.step` has counted.
    dtype: gradients are added up in it; None is each parameter's own.
    managed: False makes every step an update, however many backwards came before it.
    forced: what a caller said about the backward that runs now, or the next: whether it is the last. None: count.
    held: backwards keep their gradients to themselves, until one runs that does not.
    driven: `Engine.backward` runs the backward, and has divided the loss. Else each gradient is divided as it arrives.
    on_plain_backward: called when a backward begins that is not driven; may refuse it by raising.
    """

    steps: int = 1
    dtype: torch.dtype | None = None
    managed: bool = True
    forced: bool | None = None
    done: int = 0
    held: bool = False
    driven: bool = False
    on_plain_backward: Callable[[], None] = _nothing

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
        """What a gradient that arrives is multiplied by."""
        return 1.0 if self.driven else 1.0 / self.steps

    def hold(self) -> None:
        """Keep gradients until `held` is false again. Several are added up from now on, in fp32 if in doubt."""
        self.held = True
        self.dtype = self.dtype or torch.float32

    def move_on(self, updated: bool) -> None:
        """A micro-batch is over, and with it the window if there was an update."""
        self.done = 0 if updated else self.done + 1
