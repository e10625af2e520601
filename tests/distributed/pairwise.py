"""Few rows in which every two values of every two columns meet. Pure."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(row: Mapping[str, Any]) -> set[Pair]:
    """The pairs of (column, value) that a row has, columns in the row's order."""
    return set(combinations(row.items(), 2))


def whole(columns: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Every row that is allowed."""
    rows = (dict(zip(columns, values, strict=True)) for values in product(*columns.values()))
    return [row for row in rows if allowed(row)]


def cover(
    columns: Mapping[str, Sequence[Any]],
    fixed: Iterable[Row] = (),
    allowed: Callable[[Row], bool] = lambda row: True,
) -> list[Row]:
    """Rows that cover all pairs, greedily: first one for each partly given row in `fixed`, then what is missing.

    Ties are broken by chance, always the same, so that three columns do not march in step.

    allowed: whether a row, whole or of some columns only, can be part of what is asked for.
    """
    order = {column: index for index, column in enumerate(columns)}
    missing = set().union(*map(pairs_of, whole(columns, allowed)))
    uses: Counter[Pair] = Counter()
    chance = random.Random(0)
    rows: list[Row] = []

    def worth(row: Row, column: str, value: Any) -> tuple[int, float]:
        new = [_pair(order, (column, value), item) for item in row.items()]
        return sum(pair in missing for pair in new), chance.random() - sum(uses[pair] for pair in new) / len(
            rows or new
        )

    def add(row: Row) -> None:
        for column, values in columns.items():
            if column not in row:
                fitting = [value for value in values if allowed({**row, column: value})]
                row[column] = max(fitting, key=lambda value: worth(row, column, value))
        rows.append({column: row[column] for column in columns})
        missing.difference_update(pairs_of(rows[-1]))
        uses.update(pairs_of(rows[-1]))

    for given in fixed:
        add(dict(given))
    while missing:
        add(dict(min(missing, key=repr)))
    return rows


def _pair(order: Mapping[str, int], one: tuple[str, Any], other: tuple[str, Any]) -> Pair:
    first, second = sorted((one, other), key=lambda item: order[item[0]])
    return first, second
