"""A config in today's spelling, for those who keep the file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from zrun_runtime.config.migrate import modernise
from zrun_runtime.config.notes import Ledger, Note
from zrun_runtime.config.places import Places
from zrun_runtime.config.source import read_source


def upgrade(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Note, ...]]:
    """The config with old spellings renamed and the training part of an accelerate file alone; what was changed.

    Values are kept as they are written, "auto" too. Keys that are not known stay.

    Raises:
        ConfigError: the source cannot be read.
        InvalidConfig: (a ConfigError) an old and a new spelling contradict each other.
    """
    found = read_source(source)
    ledger = Ledger(found.origin, Places(found.lines))
    data = modernise(found, ledger)
    ledger.raise_problems()
    return data, tuple(ledger.notes)
