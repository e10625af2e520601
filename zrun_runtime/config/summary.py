"""A config in a few lines, for the start of a run; `zrun config explain` has the whole of it."""

from __future__ import annotations

from zrun_runtime.config.notes import Note, shown
from zrun_runtime.config.resolved import Config

_TITLES = {
    "unknown": "not known, not read",
    "no_effect": "no effect here (`zrun config explain` says why)",
    "migrated": "old spellings, read as new ones",
}
_TOLD_APART = ("optimizer.params.", "scheduler.params.")  # defaults that nobody needs to hear of at every start


def summary(config: Config) -> str:
    """One line: what is trained how, and the batch sizes."""
    optimizer = config.optimizer.type if config.optimizer else "the program's optimizer"
    precision: str = "precision auto" if "precision" in config.left_open else config.precision
    if config.autocast_dtype is not None:
        precision += f" under autocast to {config.autocast_dtype}"
    batch = (
        f"batch {config.train_batch_size} = {config.micro_batch_size} x {config.accumulation_steps} accumulated"
        f" x {config.world_size} rank(s)"
    )
    if "batch" in config.left_open:
        batch = "batch sizes auto"
    return f"ZeRO stage {config.zero.stage}, {precision}, {optimizer}; {batch}"


def short_report(config: Config) -> list[str]:
    """What asks for attention, a line each: what does not hold as given; keys that are not read, change nothing, are
    spelt in an old way; and values that were not given."""
    lines = [f"{note.path}: {note.text}" for note in config.notes if note.kind == "changed"]
    for kind, title in _TITLES.items():
        paths = [note.path for note in config.notes if note.kind == kind and note.value is not False]
        if paths:
            lines.append(f"{title}: {', '.join(paths)}")
    taken = [_taken(note) for note in config.notes if _is_news(note)]
    if taken:
        lines.append(f"not given, so taken: {', '.join(taken)}")
    return lines


def _is_news(note: Note) -> bool:
    if note.kind != "assumed":
        return False
    return not note.path.startswith(_TOLD_APART) or note.text.startswith("auto")


def _taken(note: Note) -> str:
    return note.path if note.value is None else f"{note.path} = {shown(note.value)}"
