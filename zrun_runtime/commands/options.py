"""What all commands have in common: how words are read, and how an error is said."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import click

REFUSED = 2
SETTINGS: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda word: word.replace("-", "_"),
    "max_content_width": 110,
}


def refuse(text: str) -> NoReturn:
    """Say what is wrong as `zrun` does, and end."""
    click.echo(f"zrun: error: {text}", err=True)
    sys.exit(REFUSED)
