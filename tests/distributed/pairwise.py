"""Few rows in which every two values of every two columns meet. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(row: Mapping[str, Any]) -> set[Pair]:
    """The pairs of (column, value) that a row has, columns in the row's order."""
    return set(combinations(row.items(), 2))


def cover(columns: Mapping[str, Sequence[Any]], fixed: Iterable[Row] = ()) -> list[Row]:
    """Rows that cover all pairs, greedily: first one for each partly given row in `fixed`, then what is missing."""
    missing = set().union(*(pairs_of(dict(zip(columns, values, strict=True))) for values in product(*columns.values())))
    rows: list[Row] = []

    def add(given: Row) -> None:
        row = dict(given)
        for column, values in columns.items():
            if column not in row:
                row[column] = max(values, key=lambda value: _gain(row, column, value, columns, missing))
        row = {column: row[column] for column in columns}
        missing.difference_update(pairs_of(row))
        rows.append(row)

    for given in fixed:
        add(given)
    while missing:
        add(dict(min(missing, key=repr)))
    return rows


def _gain(row: Row, column: str, value: Any, columns: Mapping[str, Sequence[Any]], missing: set[Pair]) -> int:
    """How many missing pairs `value` in `column` adds to what the row has so far."""
    order = list(columns)
    new = 0
    for other, chosen in row.items():
        first, second = sorted([(column, value), (other, chosen)], key=lambda item: order.index(item[0]))
        new += (first, second) in missing
    return new
