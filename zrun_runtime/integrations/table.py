"""The names of zrun's `deepspeed` as a page: `python -m zrun_runtime.integrations.table` prints its tables."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from zrun_runtime.integrations.deepspeed import SITE


def names_tables() -> str:
    """Two tables in Markdown: what is there, and what is not and why."""
    tables = _tables()
    lines = ["| module | names |", "|---|---|"]
    for module, names in sorted(tables.HERE.items()):
        shown = [f"`{name}`" for name in sorted(names) if name != tables.EVERYTHING]
        if tables.EVERYTHING in names:
            shown.append(f"everything of `{names[tables.EVERYTHING]}`")
        lines.append(f"| `{_full(module)}` | {' '.join(shown)} |")
    lines += ["", "| can be imported, not used | why not |", "|---|---|"]
    for reason, text in sorted(tables.REASONS.items()):
        lines.append(f"| {' '.join(_absent(tables, reason))} | {text} |")
    return "\n".join(lines) + "\n"


def _absent(tables: ModuleType, reason: str) -> list[str]:
    found = []
    for module, names in sorted(tables.ABSENT.items()):
        mine = [name for name in names if names[name] == reason]
        found += [f"`{_full(module)}.{name}`" for name in mine]
    return found


def _full(module: str) -> str:
    return f"deepspeed.{module}" if module else "deepspeed"


def _tables() -> ModuleType:
    """The module of the tables, which is no part of this package."""
    spec = spec_from_file_location("_zrun_deepspeed_names", Path(SITE) / "deepspeed" / "_names.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{SITE}/deepspeed/_names.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    print(names_tables(), end="")
