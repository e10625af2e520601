"""The word auto: the value that follows from the model, the device or the program.

[Note: auto]
Integrations such as HF Trainer fill in what they know before the config gets here. What is still "auto" then is
resolved from AutoHints; a key that only tunes falls back to its default. Only what decides the result of the training
and cannot be known (a learning rate, the length of a schedule) is refused, all such keys at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from zrun_runtime.config.hints import AutoHints
from zrun_runtime.config.keys import Section, field_names, section_of
from zrun_runtime.config.notes import Ledger
from zrun_runtime.config.schema import Document

AUTO = "auto"
_SIZES = {
    "reduce_bucket_size": lambda hidden: hidden * hidden,
    "allgather_bucket_size": lambda hidden: hidden * hidden,
    "stage3_prefetch_bucket_size": lambda hidden: hidden * hidden * 9 // 10,
    "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}
_WORDS = ("data_types.keep_in_fp32_modules",)  # where "auto" is a value like any other
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_NEEDED = {
    "optimizer.type": "name one, such as AdamW",
    "optimizer.params.lr": "give a number, or pass an optimizer to initialize()",
    "scheduler.type": "name one, such as WarmupLR",
    "scheduler.params.total_num_steps": "give the number of optimizer steps of the whole run",
    "scheduler.params.cycle_min_lr": "give a number",
    "scheduler.params.cycle_max_lr": "give a number",
    "zero_optimization.stage": "choose 0, 1, 2 or 3",
}


def resolve_auto(data: dict[str, Any], hints: AutoHints, ledger: Ledger) -> list[str]:
    """Replace every "auto" of a known key in place; keys left to their default are removed.

    Returns:
        The paths that nothing known here decides. They are removed from data too.
    """
    unresolved = []
    precision = choose_precision(data, hints)
    for section, name, path in list(_autos(data, "")):
        if path in _BATCH:
            del section[name]  # the batch trio says what it takes
        elif path in ("fp16.enabled", "bf16.enabled"):
            section[name] = path.startswith(precision)
            _tell_of_precision(path, section[name], precision, hints, ledger)
        elif path.startswith("zero_optimization.") and name in _SIZES:
            _size(section, name, path, hints, ledger)
        elif path == "optimizer.params.lr" and hints.learning_rate is not None:
            section[name] = hints.learning_rate
            ledger.note(path, "assumed", "auto: the learning rate of the program's optimizer", section[name])
        elif path == "scheduler.params.total_num_steps" and hints.total_steps is not None:
            section[name] = hints.total_steps
            ledger.note(path, "assumed", "auto: the steps of the whole run", section[name])
        elif path == "scheduler.params.warmup_num_steps":
            section[name] = 0
            ledger.note(path, "assumed", "auto: no warm-up", 0)
        elif path == "scheduler.params.warmup_max_lr":
            section[name] = None
            ledger.note(path, "assumed", "auto: the optimizer's learning rate")
        else:
            del section[name]
            if path in _NEEDED:
                unresolved.append(path)
            else:
                ledger.note(path, "assumed", "auto: its default", _default(path))
    return unresolved


def open_questions(data: dict[str, Any], hints: AutoHints) -> frozenset[str]:
    """What "auto" stands for that nothing known here decides, while a default is not an answer: precision, batch."""
    autos = {path for _, _, path in _autos(data, "")}
    found = set()
    if hints.device is None and autos & {"fp16.enabled", "bf16.enabled"} and not _settled(data):
        found.add("precision")
    sizes = [data.get(name, AUTO) for name in _BATCH[:2]]
    if sizes == [AUTO, AUTO] and autos & set(_BATCH) and hints.micro_batch is None:
        found.add("batch")
    return frozenset(found)


def refuse_auto(paths: list[str], ledger: Ledger) -> None:
    """One problem for each path that stays "auto"."""
    for path in paths:
        ledger.problem(path, f'is "auto", which nothing here decides: {_NEEDED[path]}')


def defer_auto(paths: list[str], ledger: Ledger) -> None:
    """One note for each path that the program will decide."""
    for path in paths:
        ledger.note(path, "assumed", "auto: left to the program, which must fill it in")


def _autos(section: dict[str, Any], path: str) -> Iterator[tuple[dict[str, Any], str, str]]:
    for name, value in section.items():
        place = f"{path}.{name}".lstrip(".")
        if isinstance(value, dict):
            yield from _autos(value, place)
        elif value == AUTO and place not in _WORDS:
            yield section, name, place


def choose_precision(data: dict[str, Any], hints: AutoHints) -> str:
    """What "auto" means in the sections fp16 and bf16: fp32, bf16 or fp16.

    bf16 wherever the device computes in it; else fp16 on a GPU.
    """
    wanted = {name for name in ("fp16", "bf16") if _enabled(data, name) == AUTO}
    settled = _settled(data)
    if settled:
        return settled[0]
    able = hints.bf16_supported if hints.bf16_supported is not None else hints.device == "cuda"
    if "bf16" in wanted and able:
        return "bf16"
    return "fp16" if "fp16" in wanted and hints.device == "cuda" else "fp32"


def _settled(data: dict[str, Any]) -> list[str]:
    return [name for name in ("fp16", "bf16") if _enabled(data, name) is True]


def _tell_of_precision(path: str, on: bool, precision: str, hints: AutoHints, ledger: Ledger) -> None:
    if hints.device is None:
        text = "auto: the device of the run decides: bf16 where it is on auto and the device has it, else fp16 on a GPU"
        ledger.note(path, "assumed", text)
    else:
        ledger.note(path, "assumed", f"auto: parameters are {precision} on {hints.device}", on)


def _enabled(data: dict[str, Any], name: str) -> Any:
    section = data.get(name)
    return section.get("enabled") if isinstance(section, dict) else None


def _default(path: str) -> Any:
    """The default of a key, if the schema knows it (an argument of an optimizer it does not)."""
    kind: type[Section] | None = Document
    field = None
    for name in path.split("."):
        field = field_names(kind).get(name) if kind is not None else None
        kind = section_of(field) if field is not None else None
    return field.default if field is not None else None


def _size(section: dict[str, Any], name: str, path: str, hints: AutoHints, ledger: Ledger) -> None:
    formula: Callable[[int], int] = _SIZES[name]
    if hints.hidden_size:
        section[name] = formula(hints.hidden_size)
        ledger.note(path, "assumed", f"auto: from the hidden size {hints.hidden_size}", section[name])
    elif hints.model_numel and name.endswith("bucket_size"):
        section[name] = hints.model_numel
        ledger.note(path, "assumed", "auto: the whole model; it is an upper bound", section[name])
    else:
        del section[name]
        ledger.note(path, "assumed", "auto: its default; it is an upper bound", _default(path))
