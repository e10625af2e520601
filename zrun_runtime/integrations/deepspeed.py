"""Being `deepspeed`, in this process and in those it starts.

`install()` is for a notebook, `python -m zrun_runtime.integrations.deepspeed SCRIPT` for a script, and
`python -m zrun_runtime.integrations.deepspeed -m accelerate.commands.launch ...` for another launcher.

`zrun --as_deepspeed SCRIPT` does the same for every worker, by PYTHONPATH alone.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib import metadata
from pathlib import Path

from zrun_runtime.errors import ConfigError
from zrun_runtime.telemetry import notice

SITE = str(Path(__file__).parent / "site")


def install() -> None:
    """From now on `import deepspeed` means zrun, in this process and in those it starts.

    Where DeepSpeed itself is installed, it is left as it is, and a line says that it is not used.

    Raises:
        ConfigError: another `deepspeed` was imported already.
    """
    loaded = sys.modules.get("deepspeed")
    if loaded is not None and not str(loaded.__file__).startswith(SITE):
        raise ConfigError(
            f"install: deepspeed was imported already, from {loaded.__file__}",
            "call install() before anything imports it",
        )
    if SITE in sys.path:
        return
    theirs = _version()
    sys.path.insert(0, SITE)
    os.environ["PYTHONPATH"] = os.pathsep.join([SITE, *filter(None, [os.environ.get("PYTHONPATH")])])
    if theirs:
        notice("info", f"`deepspeed` is zrun's here; the installed DeepSpeed {theirs} is not used")


def _version() -> str:
    """That of the DeepSpeed that can be seen; empty if there is none."""
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return ""


def main() -> None:
    """Run the script or the module (after -m) that the command line names, as Python itself would."""
    words = sys.argv[1:]
    is_module = words[:1] == ["-m"]
    words = words[is_module:]
    if not words or words[0].startswith("-"):
        sys.exit("usage: python -m zrun_runtime.integrations.deepspeed SCRIPT [ARGS]...  (or -m MODULE [ARGS]...)")
    install()
    sys.argv[:] = words
    if is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
