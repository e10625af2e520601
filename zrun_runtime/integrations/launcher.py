"""DeepSpeed's launcher and report, as far as other programs call them: zrun does both."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"  # zrun reads a file of this name, too
DLTS_HOSTFILE = "/job/hostfile"


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Become `zrun --as_deepspeed` with these arguments."""
    _become("--as_deepspeed", *(sys.argv[1:] if args is None else args))


def report() -> NoReturn:
    """Become `zrun doctor`."""
    _become("doctor")


def _become(*words: str) -> NoReturn:
    os.execv(sys.executable, [sys.executable, "-m", "zrun", *words])
