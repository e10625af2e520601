"""The commands `deepspeed` and `ds_report`: thin names for `zrun --as_deepspeed` and `zrun doctor`.

Where DeepSpeed itself is installed, the commands are its own: whoever wants zrun there types zrun.
"""

from __future__ import annotations

import importlib
import sys

from zrun.cli import main
from zrun.environment import installed_deepspeed


def deepspeed() -> None:
    """`deepspeed [OPTIONS] SCRIPT`: `zrun --as_deepspeed` with the same words."""
    if _is_theirs():
        importlib.import_module("deepspeed.launcher.runner").main()
        return
    main(["--as_deepspeed", *sys.argv[1:]])


def ds_report() -> None:
    """What this machine is fit for."""
    if _is_theirs():
        importlib.import_module("deepspeed.env_report").cli_main()
        return
    main(["doctor", *sys.argv[1:]])


def _is_theirs() -> bool:
    """DeepSpeed is installed, and not hidden by zrun's package of that name."""
    version = installed_deepspeed()
    if version:
        print(f"zrun: DeepSpeed {version} is installed and runs; for zrun type `zrun --as_deepspeed`", file=sys.stderr)
    return bool(version)
