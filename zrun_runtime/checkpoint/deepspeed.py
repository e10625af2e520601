"""Reads what DeepSpeed saved (tried: versions 0.14, 0.16, 0.19; ZeRO stages 0 to 3, universal checkpoints) and writes
it in our layout.

[Note: foreign pickles]
DeepSpeed's files are pickles that name its classes. They are read by torch's weights_only unpickler, which builds
tensors and plain containers and nothing else. Each class of DeepSpeed that a file names is replaced by an inert one
that only keeps its attributes, so no code of the file's choosing can run, and DeepSpeed need not be there. Files are
mapped, not read: a parameter is put together and written before the next.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zrun_runtime.checkpoint.convert import Converter, Group, Source
from zrun_runtime.checkpoint.errors import CheckpointError
from zrun_runtime.checkpoint.files import checked_tag
from zrun_runtime.checkpoint.manifest import MASTER

_OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
# Files that tell of what is not read.
_UNREAD = {
    "layer_*_expert_*": "experts (a mixture of experts)",
    "layer_*-model_*": "layers of a pipeline",
    "*mp_rank_01_*": "parts of model parallelism",
    "offloaded_tensors": "tensors on NVMe",
}


def import_deepspeed(path: Path, output: Path, tag: str | None = None) -> Path:
    """Convert the checkpoint of a tag, or that `latest` names, or that `path` itself is; returns where it is now.

    Raises:
        CheckpointError: there is none, it is of a kind that is not known, or the output cannot be written.
    """
    where = _locate(path, tag)
    try:
        source = _universal(where) if (where / "zero").is_dir() else _sharded(where)
        converter = Converter(source, where.name.removesuffix("_universal"))
        return converter.write(output)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{where}: is not laid out as a checkpoint of DeepSpeed 0.14 to 0.19: {type(error).__name__}: {error}",
            "convert it with its ds_to_universal first, or take only the weights with its zero_to_fp32",
        ) from error


def _locate(path: Path, tag: str | None) -> Path:
    if tag is None and not list(path.glob("*model_states.pt")):
        named = path / ("latest" if (path / "latest").is_file() else "latest_universal")
        if not named.is_file():
            raise CheckpointError(
                f"{path}: no checkpoint of DeepSpeed: neither a file `latest` nor mp_rank_00_model_states.pt",
                "give the directory that its save_checkpoint was given",
            )
        tag = named.read_text().strip()
    where = path if tag is None else path / checked_tag(tag)
    if not where.is_dir():
        raise CheckpointError(f"{where}: there is no such directory")
    unread = [what for pattern, what in _UNREAD.items() if next(where.glob(pattern), None) is not None]
    if unread:
        raise CheckpointError(
            f"{where}: it has {' and '.join(unread)}, which cannot be imported",
            "save it from a run without these, or convert it with ds_to_universal first",
        )
    return where


# ---- reading, see [Note: foreign pickles]


class _Inert:
    """Stands for any class of DeepSpeed: keeps what it is given."""

    def __init__(self, *values: Any) -> None:
        self.values = values


def _load(path: Path) -> Any:
    """The contents of one file; tensors are mapped from it.

    Raises:
        CheckpointError: it is missing, damaged, or names classes that are neither DeepSpeed's nor plain data.
    """
    if path.is_symlink() or not path.is_file():
        raise CheckpointError(f"{path}: is missing, or is no regular file")
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        stubs: list[Any] = [
            (type(name.rsplit(".", 1)[-1], (_Inert,), {}), name) for name in names if name.startswith("deepspeed.")
        ]
        with torch.serialization.safe_globals([*stubs, argparse.Namespace]):
            return torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:  # its kinds are torch's secret: UnpicklingError, RuntimeError, EOFError, ...
        text = str(error).split("\n")[0][:300]
        raise CheckpointError(f"{path}: cannot be read as plain data: {text}") from error


def _sharded(where: Path) -> Source:
    """What save_checkpoint wrote, at any stage."""
    optim = {int(m[1]): p for p in where.iterdir() if (m := _OPTIM.fullmatch(p.name))}
    ranks = sorted(optim)
    models = sorted(where.glob("*mp_rank_00_model_states.pt"), key=_numbers)
    if not models:
        raise CheckpointError(f"{where}: mp_rank_00_model_states.pt is missing")
    loaded = [_load(path) for path in models]
    if not ranks:
        return _replicated(where, loaded[0])
    states = [_load(optim[rank])["optimizer_state_dict"] for rank in ranks]
    count = states[0]["partition_count"]
    wanted = count if isinstance(count, int) else max(count)
    if ranks != list(range(wanted)):
        raise CheckpointError(
            f"{where}: {wanted} files *_optim_states.pt belong to it; those of ranks {ranks} are there"
        )
    if "fp32_flat_groups" in states[0]:
        return Source(
            loaded[0], _of_slices_of_parameters(where, loaded[0], states), _frozen(loaded), states[0].get("loss_scaler")
        )
    scaler = states[0].get("loss_scaler")  # there is none where bf16 gradients are added up in fp32
    return Source(loaded[0], _of_slices_of_groups(where, loaded[0], states), _frozen(loaded), scaler)


def _numbers(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.name)]


def _frozen(models: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Frozen parameters: whole in one file, or equal slices of each in all."""
    shapes = models[0]["frozen_param_shapes"] or {}
    found = {}
    for name, shape in shapes.items():
        parts = [model["frozen_param_fragments"][name] for model in models]
        whole = parts[0] if parts[0].shape == shape else torch.cat([p.reshape(-1) for p in parts])
        found[name] = whole.reshape(-1)[: torch.Size(shape).numel()].view(shape)
    model = models[0]
    known = {*found, *model["buffer_names"], *(model["shared_params"] or {})}
    known.update(name for group in model["param_shapes"] or () for name in group)
    return found | {n: v for n, v in model["module"].items() if n not in known and isinstance(v, Tensor) and v.numel()}


def _shapes(where: Path, model: dict[str, Any]) -> list[dict[str, tuple[int, ...]]]:
    if not model["param_shapes"]:
        raise CheckpointError(
            f"{where}: param_shapes are missing", "only checkpoints with optimizer state are imported"
        )
    return [{name: tuple(shape) for name, shape in group.items()} for group in model["param_shapes"]]


def _of_slices_of_groups(where: Path, model: dict[str, Any], states: Sequence[dict[str, Any]]) -> list[Group]:
    """The layout in which a group is one flat buffer, cut into equal slices."""
    groups = []
    for number, shapes in enumerate(_shapes(where, model)):
        bases = [state["base_optimizer_state"] for state in states]
        if not isinstance(bases[0], dict):
            raise CheckpointError(
                f"{where}: elastic checkpoints are not imported", "convert it with ds_to_universal first"
            )
        flats = {MASTER: [state["single_partition_of_fp32_groups"][number] for state in states]}
        for key, value in bases[0]["state"].get(number, {}).items():
            if isinstance(value, Tensor) and value.dim():
                flats[key] = [base["state"][number][key] for base in bases]
        places = _fragments(shapes, states, number, flats)
        pieces = {
            kind: {name: [(values[rank], start, n) for rank, start, n in found] for name, found in places.items()}
            for kind, values in flats.items()
        }
        options = bases[0]["param_groups"][number]
        scalars = {k: v for k, v in bases[0]["state"].get(number, {}).items() if k not in flats}
        groups.append(Group(shapes, pieces, scalars, options))
    return groups


def _fragments(
    shapes: Mapping[str, tuple[int, ...]],
    states: Sequence[dict[str, Any]],
    number: int,
    flats: Mapping[str, Sequence[Tensor]],
) -> dict[str, list[tuple[int, int, int]]]:
    """name -> (rank, first element in its slice, how many), in order."""
    places: dict[str, list[tuple[int, int, int]]] = {name: [] for name in shapes}
    if "param_slice_mappings" in states[0]:
        for rank, state in enumerate(states):
            for name, fragment in state["param_slice_mappings"][number].items():
                places[name].append((rank, fragment.start, fragment.numel))
        return places
    each, offset = max(flat.numel() for values in flats.values() for flat in values), 0
    for name, shape in shapes.items():
        end = offset + torch.Size(shape).numel()
        while offset < end:
            rank, start = divmod(offset, each)
            count = min(end - offset, each - start)
            places[name].append((rank, start, count))
            offset += count
    return places


def _of_slices_of_parameters(where: Path, model: dict[str, Any], states: Sequence[dict[str, Any]]) -> list[Group]:
    """The layout in which each parameter is cut by itself, and the slices of many follow each other in sub-groups."""
    inner = [state["optimizer_state_dict"] for state in states]
    masters = [state["fp32_flat_groups"] for state in states]
    cursor, start, groups = 0, 0, []
    for number, shapes in enumerate(_shapes(where, model)):
        options = inner[0]["param_groups"][min(number, len(inner[0]["param_groups"]) - 1)]
        group = Group(shapes, {}, {}, options)
        for name, shape in shapes.items():
            each = -(-torch.Size(shape).numel() // len(states))
            if cursor < len(masters[0]) and start + each > masters[0][cursor].numel():
                cursor, start = cursor + 1, 0
            if cursor >= len(masters[0]):
                raise CheckpointError(f"{where}: the sub-groups end before {name}")
            left = torch.Size(shape).numel()
            state = inner[0]["state"].get(cursor, {})
            kinds = [MASTER, *(k for k, v in state.items() if isinstance(v, Tensor) and v.dim())]
            for rank in range(len(states)):
                count = max(0, min(each, left - rank * each))
                for kind in kinds:
                    flat = masters[rank][cursor] if kind == MASTER else inner[rank]["state"][cursor][kind]
                    group.state.setdefault(kind, {}).setdefault(name, []).append((flat, start, count))
            group.scalars = {k: v for k, v in state.items() if k not in kinds}
            start += each
        groups.append(group)
    return groups


def _replicated(where: Path, model: dict[str, Any]) -> Source:
    """Without sharding: whole weights, and a plain optimizer's state, whose parameters have no names."""
    values, buffers = model["module"], set(model["buffer_names"])
    seen: dict[int, str] = {}
    names = [n for n, v in values.items() if n not in buffers and seen.setdefault(v.data_ptr(), n) == n]
    optimizer = model["optimizer"] or {}
    base = optimizer.get("optimizer_state_dict", optimizer)
    state, options = base.get("state", {}), base.get("param_groups", [])
    masters = _whole_masters(optimizer, state, options)
    groups = []
    for number, members in enumerate(_match(where, {name: values[name] for name in names}, state, options, masters)):
        group = Group({name: tuple(values[name].shape) for name in members}, {MASTER: {}}, {}, options[number])
        for name, index in members.items():
            kinds = {k: v for k, v in state.get(index, {}).items() if isinstance(v, Tensor) and v.dim()}
            for kind, value in {MASTER: masters.get(index, values[name]), **kinds}.items():
                group.state.setdefault(kind, {})[name] = [(value.reshape(-1), 0, value.numel())]
            for key, value in state.get(index, {}).items():
                if key not in kinds and group.scalars.setdefault(key, value) != value:
                    raise CheckpointError(
                        f"{where}: the parameters of optimizer group {number} were trained for different numbers of "
                        f"steps ({key}: {group.scalars[key]} and {value})"
                    )
        groups.append(group)
    trained = {name for group in groups for name in group.shapes}
    dynamic = argparse.Namespace(**{"cur_hysteresis": 1, **optimizer}) if optimizer.get("dynamic_loss_scale") else None
    return Source(model, groups, {n: values[n] for n in names if n not in trained}, dynamic)


def _whole_masters(
    optimizer: Mapping[str, Any], state: Mapping[int, Any], options: Sequence[dict[str, Any]]
) -> dict[int, Tensor]:
    """The fp32 master weights of 16-bit parameters by their numbers; of fp32 parameters there are none."""
    found: dict[int, Tensor] = {}
    for number, group in enumerate(options):
        if "fp32_groups" in optimizer:  # a tensor each
            found |= dict(zip(group["params"], optimizer["fp32_groups"][number], strict=True))
        elif "fp32_groups_flat" in optimizer:  # one after the other
            flat, start = optimizer["fp32_groups_flat"][number], 0
            for index in group["params"]:
                like = state[index]["exp_avg"]
                found[index] = flat[start : start + like.numel()].view(like.shape)
                start += like.numel()
    return found


def _match(
    where: Path,
    values: Mapping[str, Tensor],
    state: Mapping[int, Any],
    options: Sequence[dict[str, Any]],
    masters: Mapping[int, Tensor],
) -> list[dict[str, int]]:
    """Of each optimizer group: name -> number of its parameters.

    Numbers go to names of the same shape in order, which is right if all parameters of that shape are in one group. Of
    16-bit parameters the values tell as well: they are their master weights, rounded.

    Raises:
        CheckpointError: it is not certain.
    """

    def look(value: Tensor, rounded: bool) -> tuple[tuple[int, ...], bytes]:
        own = value.detach().contiguous().view(torch.uint8).numpy().tobytes() if rounded else b""
        return tuple(value.shape), hashlib.sha256(own).digest()

    fitting: dict[Any, list[str]] = {}
    for name, value in values.items():
        fitting.setdefault(look(value, bool(masters)), []).append(name)
    wanted: dict[Any, list[tuple[int, int]]] = {}
    narrow = next((v.dtype for v in values.values() if v.dtype in (torch.float16, torch.bfloat16)), torch.float32)
    for number, group in enumerate(options):
        for index in group["params"]:
            moments = [v for v in state.get(index, {}).values() if isinstance(v, Tensor) and v.dim()]
            like = [masters[index].to(narrow)] if masters else moments
            if not like:
                raise _uncertain(where, f"there is no state of parameter {index} of optimizer group {number}")
            wanted.setdefault(look(like[0], bool(masters)), []).append((number, index))
    found: list[dict[str, int]] = [{} for _ in options]
    for key, places in wanted.items():
        names, groups = fitting.get(key, []), sorted({number for number, _ in places})
        if len(names) != len(places) or len(groups) > 1:
            text = f"{len(places)} parameters of shape {key[0]} are in optimizer groups {groups}, and the model has "
            raise _uncertain(where, f"{text}{len(names)}: {', '.join(names[:6])}")
        for name, (number, index) in zip(names, places, strict=True):
            found[number][name] = index
    return found


def _uncertain(where: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: which optimizer state belongs to which parameter is not written in it, and shapes do not tell: "
        f"{why}",
        "save it at ZeRO stage 1 and import that, or load only the weights: torch.load and load_module_state_dict",
    )


def _universal(where: Path) -> Source:
    """What ds_to_universal wrote: a directory a parameter."""
    model = (
        _load(where / "mp_rank_00_model_states.pt")
        if (where / "mp_rank_00_model_states.pt").exists()
        else _load(next(iter(sorted(where.glob("*model_states.pt"))), where / "mp_rank_00_model_states.pt"))
    )
    common = _load(where / "zero" / "optimizer_state.pt")
    options, groups = common.get("param_groups", []), []
    for number, shapes in enumerate(_shapes(where, model)):
        group = Group(shapes, {}, {}, options[min(number, len(options) - 1)] if options else {})
        for name in shapes:
            for path in sorted((where / "zero" / name).glob("*.pt")):
                loaded = _load(path)
                value = loaded["param"] if isinstance(loaded, dict) else loaded
                if isinstance(value, Tensor) and value.dim():
                    kind = MASTER if path.stem == "fp32" else path.stem
                    group.state.setdefault(kind, {})[name] = [(value.reshape(-1), 0, value.numel())]
                else:
                    group.scalars[path.stem] = value
            if name not in group.state.get(MASTER, {}):
                raise CheckpointError(f"{where / 'zero' / name / 'fp32.pt'}: is missing")
        groups.append(group)
    frozen = {}
    for name, shape in (model["frozen_param_shapes"] or {}).items():
        loaded = _load(where / "zero" / name / "fp32.pt")
        frozen[name] = (loaded["param"] if isinstance(loaded, dict) else loaded).view(shape)
    return Source(model, groups, frozen, common.get("loss_scaler"))
