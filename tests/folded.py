"""What a console folded, unfolded, for tests that count what ranks said. Shares no code with the product."""

from __future__ import annotations

import re

_FOLDED = re.compile(r"\[(?P<who>(?:\S+:)?\d[\d,-]*(?: \S+:\d[\d,-]*)*)\] (?P<text>.*)")


def unfolded(printed: str) -> str:
    """`[0-1] up` as `[0] up` and `[1] up`, also with hosts; all else as it is."""
    return "".join(line for folded in printed.splitlines(keepends=True) for line in _lines(folded))


def _lines(line: str) -> list[str]:
    match = _FOLDED.match(line)
    if match is None:
        return [line]
    lines = []
    for part in match["who"].split(" "):
        host, colon, numbers = part.rpartition(":")
        for run in numbers.split(","):
            low, _, high = run.partition("-")
            ranks = range(int(low), int(high or low) + 1)
            lines += [f"[{host}{colon}{rank}] {match['text']}{line[match.end() :]}" for rank in ranks]
    return lines
