"""Short ways to write many: `node-[1-4,8]` for names, `0,2,4-6` for numbers. Pure."""

from __future__ import annotations

import re

MAX_NAMES = 16_384  # that one pattern may stand for; more is a slip of the keyboard
_RANGE = re.compile(r"(?P<low>\d{1,9})(?:-(?P<high>\d{1,9}))?\Z", re.ASCII)


class PatternError(ValueError):
    """A pattern that cannot be right.

    Args:
        at: where in the pattern, counted from 0.
    """

    def __init__(self, message: str, at: int) -> None:
        super().__init__(message)
        self.message = message
        self.at = at


def expand(pattern: str) -> list[str]:
    """The names that a pattern stands for, in its order; a name without brackets stands for itself.

    Ranges keep the zeros that their first number begins with: `n[08-10]` is n08, n09, n10. With several brackets the
    last one turns fastest.

    Raises:
        PatternError: brackets that are not closed or hold something else than numbers, too many names.
    """
    names, rest, at = [""], pattern, 0
    while "[" in rest or "]" in rest:
        before, bracket, behind = rest.partition("[")
        if "]" in before or not bracket:
            raise PatternError("`]` closes nothing", at + rest.index("]"))
        inside, closing, rest = behind.partition("]")
        begin = at + len(before) + 1
        if not closing:
            raise PatternError("`[` is never closed", begin - 1)
        numbers = _expand_numbers(inside, begin)
        if len(names) * len(numbers) > MAX_NAMES:
            raise PatternError(f"that is more than {MAX_NAMES} names", begin - 1)
        names = [name + before + number for name in names for number in numbers]
        at = begin + len(inside) + 1
    return [name + rest for name in names]


def split_names(text: str) -> list[str]:
    """`a[1,2],b` -> `a[1,2]`, `b`: splits at the commas that are outside of brackets."""
    return re.split(r",(?![^\[]*\])", text)


def parse_numbers(text: str) -> list[int]:
    """`0,2,4-6` -> 0, 2, 4, 5, 6, in its order; blanks around a number mean nothing.

    Raises:
        PatternError: something else than numbers and ranges, too many of them.
    """
    return [int(number) for number in _expand_numbers(text, 0)]


def format_numbers(numbers: list[int]) -> str:
    """The reverse of parse_numbers, as short as it can be; `numbers` ascend."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _expand_numbers(text: str, at: int) -> list[str]:
    """The numbers of a list as they are written. `at`: where it begins, for errors."""
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.match(part.strip())
        if match is None:
            said = f"{part.strip()!r} is not" if part.strip() else "a comma too many, or nothing at all: this is not"
            raise PatternError(f"{said} a number or a range such as 0-3", at)
        low, high = match["low"], match["high"] or match["low"]
        if int(high) < int(low):
            raise PatternError(f"the range {part.strip()} runs backwards", at)
        if high.startswith("0") and len(high) != len(low):
            raise PatternError(f"the range {part.strip()} begins and ends with another number of digits", at)
        if int(high) - int(low) + len(numbers) >= MAX_NAMES:
            raise PatternError(f"the range {part.strip()} holds more than {MAX_NAMES} numbers", at)
        numbers += [str(n).zfill(len(low)) for n in range(int(low), int(high) + 1)]
        at += len(part) + 1
    return numbers
