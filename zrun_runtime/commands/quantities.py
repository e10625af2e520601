"""Quantities as people write them: 7b parameters, 80GB, 100Gbit."""

from __future__ import annotations

import re
from typing import Any

import click

_NUMBER = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([a-z/]*)\s*\Z", re.IGNORECASE)
_LARGEST = 1e21  # of what is counted here; larger numbers are slips
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_BYTES = {
    "": 2.0**30, "mb": 1e6, "gb": 1e9, "tb": 1e12, "g": 2.0**30, "t": 2.0**40,
    "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40,
}  # fmt: skip
_RATES = {
    "": 1e9 / 8, "gbit": 1e9 / 8, "gbps": 1e9 / 8, "gbit/s": 1e9 / 8, "gb/s": 1e9, "gib/s": 2.0**30, "mbit": 1e6 / 8,
    "mbit/s": 1e6 / 8, "mb/s": 1e6,
}  # fmt: skip


class Quantity(click.ParamType):
    """A number with a unit."""

    def __init__(self, name: str, units: dict[str, float], example: str) -> None:
        self.name, self.units, self.example = name, units, example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number in plain units: elements, bytes, or bytes a second."""
        if isinstance(value, (int, float)):
            return float(value)
        found = _NUMBER.match(value)
        unit = found[2].lower() if found else None
        if found is None or unit not in self.units or float(found[1].replace("_", "")) <= 0:
            known = ", ".join(sorted(u for u in self.units if u))
            self.fail(f"{value!r} is not a {self.name}: write it as {self.example} (units: {known})", param, ctx)
        number = float(found[1].replace("_", "")) * self.units[unit]
        if number > _LARGEST:
            self.fail(f"{value!r} is more than there is anywhere: write it as {self.example}", param, ctx)
        return number


COUNT = Quantity("number of parameters", _COUNTS, "7b")
MEMORY = Quantity("size", _BYTES, "80GB")
RATE = Quantity("rate", _RATES, "100Gbit, or 12.5GB/s")
