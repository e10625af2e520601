"""Telling a misspelt key from a foreign one."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was most likely meant to be; None if it is near to none.

    Near is: the same but for case, dashes and underscores; one edit away (two in names of more than five characters);
    or mostly the same words.
    """
    best: tuple[float, str] | None = None
    for candidate in known:
        distance = _distance(name, candidate)
        if distance is not None and (best is None or distance < best[0]):
            best = (distance, candidate)
    return best[1] if best else None


def _distance(name: str, candidate: str) -> float | None:
    """How far apart two names are, or None if they are not near."""
    plain, other = (text.lower().replace("-", "").replace("_", "").strip() for text in (name, candidate))
    if plain == other:
        return 0.0
    limit = 1 if min(len(name), len(candidate)) <= 5 else 2
    edits = _edits(name.lower(), candidate.lower(), limit)
    if edits <= limit:
        return float(edits)
    mine, theirs = set(name.lower().split("_")), set(candidate.split("_"))
    shared = len(mine & theirs)
    if shared >= 2 and shared / len(mine | theirs) >= 0.6:
        return 3.0 + 3 * len(mine - theirs) + len(theirs - mine)
    return None


def _edits(a: str, b: str, limit: int) -> int:
    """Insertions, deletions, replacements and swaps of neighbours from a to b; more than `limit` is limit + 1."""
    if abs(len(a) - len(b)) > limit:
        return limit + 1
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, last, row = row, before, [i]
        for j, y in enumerate(b, 1):
            cost = min(before[j], row[j - 1]) + 1
            cost = min(cost, before[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
    return min(row[-1], limit + 1)
