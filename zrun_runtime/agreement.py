"""Facts that must be the same on every rank, compared before anything is laid out by them.

Each rank builds its own model and reads its own config. If a stage, the order of parameters (a set was iterated over)
or a learning rate differs, ranks would send each other slices of other things, or train slices of one weight
differently, and no later check could tell. A digest is compared by one small exchange; only where it differs do two
ranks send the facts themselves, so that the error names the first one that differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zrun_runtime.collectives import Collectives
from zrun_runtime.collectives.rendezvous import Rendezvous
from zrun_runtime.config import Config
from zrun_runtime.errors import RanksDivergedError

Facts = list[tuple[str, str]]

_SECONDS = 60.0  # for the two ranks that differ to send their facts
_OF_ONE_RANK = frozenset(  # of the config: what changes no number, so hosts may differ in it
    ("raw", "notes", "origin", "left_open", "monitors", "steps_per_print", "wall_clock_breakdown", "aio", "checkpoint")
)
_OF_ONE_HOST = frozenset(("nvme_path", "pin_memory", "buffer_count"))  # of the offload sections


def require_agreement(collectives: Collectives, ticket: int, what: str, facts: Facts) -> None:
    """Compare `facts`, pairs of a name and a value, with those of the other ranks. A collective.

    Args:
        ticket: registered for this comparison. what: the place in the program, for the error.

    Raises:
        RanksDivergedError: they differ, on every rank; it names the first difference.
    """
    digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=12).digest()
    halves = [float(int.from_bytes(half, "big")) for half in (digest[:6], digest[6:])]  # 48 bits: exact in a float64
    heard = collectives.exchange(ticket, halves).wait()
    odd = next((rank for rank in range(1, len(heard)) if bool((heard[rank] != heard[0]).any())), None)
    if odd is None:
        return
    said = facts if collectives.world.rank in (0, odd) else None
    all_said = Rendezvous(collectives.world).exchange(what, said, _SECONDS, last=True)
    first, other = (dict(map(tuple, all_said[rank])) for rank in (0, odd))
    raise RanksDivergedError(
        f"{what}: {_first_difference(first, other, odd)}",
        "build the model, the optimizer and the config alike on every rank (no sets where order matters)",
    )


def _first_difference(first: Mapping[str, str], other: Mapping[str, str], odd: int) -> str:
    names = [*first, *(name for name in other if name not in first)]
    name = next(name for name in names if first.get(name) != other.get(name))
    here, there = (side.get(name, "missing") for side in (first, other))
    return f"{name} is {here} on rank 0 and {there} on rank {odd}"


# ---- what is compared at initialize


def model_facts(
    model: nn.Module,
    optimizer_groups: Mapping[int, int],  # id of a parameter -> number of its optimizer group
    leaves: Sequence[nn.Module],
) -> Facts:
    """Order, shapes and dtypes of what is laid out, and who trains it."""
    facts = []
    for index, (name, parameter) in enumerate(model.named_parameters()):
        number = optimizer_groups.get(id(parameter)) if parameter.requires_grad else None
        how = "frozen" if not parameter.requires_grad else f"of optimizer group {number}"
        facts.append((f"parameter {index}", f"{name} ({kind_text(parameter)}, {how})"))
    facts += [
        (f"buffer {i}", f"{name} ({kind_text(buffer)})") for i, (name, buffer) in enumerate(model.named_buffers())
    ]
    names = {module: name for name, module in model.named_modules()}
    facts.append(("the leaf modules", ", ".join(sorted(names[leaf] for leaf in leaves)) or "none"))
    return facts


def kind_text(tensor: torch.Tensor) -> str:
    """Its shape and dtype."""
    return f"{'x'.join(map(str, tensor.shape)) or 'a scalar'} {str(tensor.dtype).removeprefix('torch.')}"


def optimizer_facts(optimizer: Any, groups: Sequence[Mapping[str, Any]]) -> Facts:
    """The class of a client's optimizer, and what is plain data in the optimizer groups."""
    facts = [("the optimizer", type(optimizer).__name__ if optimizer is not None else "the config's")]
    for number, group in enumerate(groups):
        facts += [
            (f"optimizer.param_groups[{number}][{key!r}]", repr(value))
            for key, value in sorted(group.items())
            if key != "params" and _is_plain(value)
        ]
    return facts


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def config_facts(config: Config) -> Facts:
    """What of the config changes numbers or layouts, and the versions that read it."""
    facts = [("the version of torch", str(torch.__version__))]
    for name, value in vars(config).items():
        if name not in _OF_ONE_RANK and name != "train_batch_size":  # which follows from the two other sizes
            facts += _flat(f"config.{name}", value)
    return facts


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    fields = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    if fields is None:
        yield name, repr(value)
        return
    for key, part in fields.items():
        if key not in _OF_ONE_HOST:
            yield from _flat(f"{name}.{key}", part)
