"""Numbers as a person reads them, each in a width that hardly changes from one step to the next. Pure."""

from __future__ import annotations

import math

UNKNOWN = "-"
NOT_FINITE = "not finite"


def decimal(value: float | None) -> str:
    """A loss: four decimals where that says enough, else an exponent."""
    if value is None or not math.isfinite(value):
        return _odd(value)
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-3:
        return f"{value:.3e}"
    return f"{value:.4f}" if size < 1000 else f"{value:.1f}"


def exponent(value: float | None) -> str:
    """A learning rate: 3.0e-04."""
    return f"{value:.1e}" if value is not None and math.isfinite(value) else _odd(value)


def short(value: float | None) -> str:
    """Three digits: a norm, a rate. 0.98, 12.3, 4560, 1.2e-05."""
    if value is None or not math.isfinite(value):
        return _odd(value)
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-2:
        return f"{value:.1e}"
    return f"{value:.{2 if size < 10 else 1 if size < 100 else 0}f}"


def scale(value: float | None) -> str:
    """A loss scale: the whole number where it is short, a power of two where it is not."""
    if value is None or not math.isfinite(value):
        return _odd(value)
    mantissa, power = math.frexp(value)
    if value > 1e6 and mantissa == 0.5:
        return f"2^{power - 1}"
    return f"{value:g}"


def step_time(seconds: float | None) -> str:
    """One step: 0.85 ms, 7.2 ms, 45 ms, 1.23 s, 2:05."""
    if seconds is None or not math.isfinite(seconds):
        return _odd(seconds)
    if seconds >= 100:
        return duration(seconds)
    if seconds >= 1:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    milliseconds = seconds * 1000
    return f"{milliseconds:.{2 if milliseconds < 1 else 1 if milliseconds < 10 else 0}f} ms"


def duration(seconds: float) -> str:
    """0:12, 1:02:03, 2d 03:04:05."""
    whole = max(0, round(seconds))
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02d}:{minute:02d}:{second:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def size(count: float) -> str:
    """Bytes in binary units: 512 B, 3.4 MiB, 12.1 GiB."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1000 and len(units) > 1:
        value /= 1024
        units.pop(0)
    digits = 0 if units[0] == "B" or value >= 100 else 1
    return f"{value:.{digits}f} {units[0]}"


def count(number: int, thing: str) -> str:
    """1 worker, 2 workers."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _odd(value: float | None) -> str:
    return UNKNOWN if value is None else NOT_FINITE
