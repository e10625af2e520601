"""What can be wrong with a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zrun_runtime.errors import ZeroRuntimeError
from zrun_runtime.positions import ranks_text


class CheckpointError(ZeroRuntimeError):
    """A checkpoint cannot be written, or is not there, not whole, or not for this model."""


class TagsDifferError(CheckpointError, AssertionError):
    """Ranks gave a checkpoint different tags. (An AssertionError as well, as DeepSpeed raises.)"""


def raise_troubles(what: str, heard: Sequence[dict[str, Any]], key: str = "trouble") -> None:
    """One error on every rank for what went wrong on any.

    Raises:
        CheckpointError: something did; identical texts are told once.
    """
    troubles: dict[str, list[int]] = {}
    for rank, one in enumerate(heard):
        if one[key] is not None:
            troubles.setdefault(one[key], []).append(rank)
    if troubles:
        told_by = "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in troubles.items())
        raise CheckpointError(f"{what} failed on {told_by}")


def by_value(values: Sequence[str]) -> str:
    """Which ranks have which value."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(f"{value!r} on {ranks_text(found)}" for value, found in ranks.items())
