"""What is told of where ranks are."""

from __future__ import annotations

import sys

from torch import nn

from zrun_runtime.positions import Position, position_text, table


class Looking(nn.Module):
    """Tells, in its forward, where its rank is."""

    def __init__(self, awaited: str = "") -> None:
        super().__init__()
        self.awaited = awaited
        self.inner = nn.Identity()

    def forward(self) -> str:
        return position_text(sys._getframe(), self.awaited, lambda module: type(module).__name__)


def test_the_innermost_module_and_the_line_of_the_script() -> None:
    text = Looking()()
    assert text.startswith("outside the engine, in Looking, at zrun_runtime/test_positions.py:")
    assert text.endswith(" in forward")


def test_a_wait_names_its_operation() -> None:
    assert Looking("a gather of blocks.1")().startswith(
        "waits for other ranks at a gather of blocks.1, at zrun_runtime/"
    )
    assert position_text(None, "", str) == "outside the engine"


def test_a_table_has_those_behind_first_and_ranks_that_are_alike_in_one_line() -> None:
    waits = Position(9, 3, "waits", 90.0)
    lines = table([waits, Position(7, 3, "sleeps", 70.0), waits, None], 100.0)
    assert lines == [
        "rank 3: goes on, as far as is known",
        "rank 1: 3 steps done, operation 7: sleeps, for 30 s   <- behind",
        "ranks 0, 2: 3 steps done, operation 9: waits, for 10 s",
    ]
    many = table([Position(rank, 0, "x", 0.0) for rank in range(40)], 1.0)
    assert len(many) == 13 and many[-1] == "and 28 more places"
    assert table([waits] * 40, 100.0)[0].startswith("ranks 0, 1, 2, 3, 4, 5, ... (40 ranks): ")


def test_positions_travel_as_text() -> None:
    there = Position(9, 3, 'waits at "x"', 90.5)
    assert Position.from_json(there.to_json()) == there
