"""Writes a checkpoint that came from elsewhere in our layout, as one of a single rank."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zrun_runtime.checkpoint.codec import encode
from zrun_runtime.checkpoint.errors import CheckpointError
from zrun_runtime.checkpoint.files import LATEST, Aside, checked_tag, replace_small, told, write_small
from zrun_runtime.checkpoint.manifest import (
    DTYPES,
    MANIFEST,
    MASTER,
    NAMES,
    Manifest,
    Role,
    StoredFile,
    StoredGroup,
    StoredParameter,
    StoredTensor,
    role_of,
    sealed,
)
from zrun_runtime.checkpoint.writer import Entry, FileSet
from zrun_runtime.layout import lay_out

Piece = tuple[Tensor, int, int]  # a flat tensor, the first element in it, how many
# Options of an optimizer group that mean the same here.
_OPTIONS = (
    *("lr", "initial_lr", "betas", "eps", "weight_decay", "momentum"),
    *("dampening", "nesterov", "amsgrad", "alpha", "centered", "rho"),
)
# What the file of a model has beside the client's own state.
_OWN_KEYS = frozenset(
    """
    module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler
    data_sampler random_ltd skipped_steps global_steps global_samples dp_world_size mp_world_size
    checkpoint_parallel_dimensions ds_config ds_version sparse_tensor_module_names
    """.split()  # noqa: SIM905 (a table of words)
)


@dataclass
class Group:
    """One optimizer group. state: kind ("master", "exp_avg", ...) -> name -> the pieces of its values, in order."""

    shapes: dict[str, tuple[int, ...]]
    state: dict[str, dict[str, list[Piece]]]
    scalars: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Source:
    """A foreign checkpoint. model: the file with counters, buffers and, unless sharded, whole weights."""

    model: dict[str, Any]
    groups: list[Group]
    frozen: dict[str, Tensor]
    scaler: Any = None


class Converter:
    """Writes a source as a checkpoint of one rank."""

    def __init__(self, source: Source, tag: str) -> None:
        self.source, self.tag = source, checked_tag(tag)
        self.groups = [self._group(number, group) for number, group in enumerate(source.groups) if group.shapes]

    def _group(self, number: int, group: Group) -> StoredGroup:
        numels = [torch.Size(shape).numel() for shape in group.shapes.values()]
        layout = lay_out(numels, 4, 1)
        kinds = {kind: NAMES[next(iter(values.values()))[0][0].dtype] for kind, values in group.state.items()}
        kinds[MASTER] = "F32"
        scalars = {
            key: torch.tensor(float(value)) if key == "step" else value
            for key, value in {**{k: v for k, v in group.options.items() if k == "step"}, **group.scalars}.items()
        }
        return StoredGroup(
            label=f"group {number}",
            padded_numel=layout.padded_numel,
            kinds={MASTER: "F32", **{kind: kinds[kind] for kind in sorted(kinds) if kind != MASTER}},
            parameters=tuple(
                StoredParameter(name=name, shape=shape, offset=offset)
                for (name, shape), offset in zip(group.shapes.items(), layout.offsets, strict=True)
            ),
            optimizer_group=number,
            scalars=encode(scalars, f"optimizer state of group {number}", {}) if scalars else None,
        )

    def write(self, output: Path) -> Path:
        """Write it whole, or not at all; `latest` names it. Returns its directory."""
        data: dict[str, Tensor] = {}
        model = self.source.model
        client = {key: value for key, value in model.items() if key not in _OWN_KEYS}
        state, own = self._state(data), {"client_state": encode(client, "client_state", data)}
        singles = [("parameter", name, value) for name, value in self.source.frozen.items()]
        singles += [("buffer", n, model["module"][n]) for n in model["buffer_names"] if n in model["module"]]
        singles += [("data", name, value) for name, value in data.items()]
        aside = Aside(output, self.tag, secrets.token_hex(4))
        aside.create()
        try:
            files, tensors = self._write_files(aside, output, singles)
            manifest = Manifest(
                format="zrun-checkpoint",
                version=1,
                tag=self.tag,
                world_size=1,
                written_by=f"zrun checkpoint import, from DeepSpeed {model.get('ds_version')}",
                written_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                files=tuple(files),
                groups=tuple(self.groups),
                tensors=tuple(tensors),
                aliases=dict(model["shared_params"] or {}),
                state=state,
                own=(own,),
            )
            text = sealed(manifest.model_dump_json(exclude_defaults=True).encode())
            with told(aside.path / MANIFEST, "the manifest cannot be written", len(text)):
                write_small(aside.path / MANIFEST, text)
            aside.publish()
        except BaseException:
            aside.discard()
            raise
        with told(output / LATEST, "cannot be replaced"):
            replace_small(output / LATEST, self.tag.encode(), secrets.token_hex(4))
        return output / self.tag

    def _write_files(
        self, aside: Aside, output: Path, singles: list[tuple[Any, str, Tensor]]
    ) -> tuple[list[StoredFile], list[StoredTensor]]:
        plan: dict[Role, dict[str, Entry]] = {"model": {}}
        for number, group in enumerate(self.groups):
            for kind, dtype in group.kinds.items():
                entry = Entry(DTYPES[dtype], (group.padded_numel,))
                plan.setdefault(role_of(kind), {})[f"{number:05d}.{kind}"] = entry
        end, tensors = sum(entry.nbytes for entry in plan["model"].values()), []
        for what, name, value in singles:
            entry = plan["model"][f"{what}:{name}"] = Entry(value.dtype, tuple(value.shape))
            dtype = NAMES[value.dtype]
            tensors.append(StoredTensor(name=name, what=what, rank=0, dtype=dtype, shape=entry.shape, start=end))
            end += entry.nbytes
        files = FileSet(aside.path, plan, 0, 1, f".{aside.nonce}" if (output / self.tag).exists() else "")
        try:
            for number, stored in enumerate(self.groups):
                for kind in stored.kinds:
                    for part in self._parts(number, stored, kind):
                        files.feed(role_of(kind), part)
            for _, _, value in singles:
                files.feed("model", value)
            return files.close(), tensors
        except BaseException:
            files.abandon()
            raise

    def _parts(self, number: int, stored: StoredGroup, kind: str) -> Iterator[Tensor]:
        """The flat buffer of one kind of state, parameter by parameter, gaps between them included."""
        values = [g for g in self.source.groups if g.shapes][number].state[kind]
        dtype, end = DTYPES[stored.kinds[kind]], 0
        for parameter in stored.parameters:
            yield torch.zeros(parameter.offset - end, dtype=dtype)
            pieces = [flat[start : start + count] for flat, start, count in values.get(parameter.name, ())]
            whole = torch.cat(pieces).to(dtype) if pieces else torch.zeros(parameter.numel, dtype=dtype)
            if whole.numel() != parameter.numel:
                raise CheckpointError(
                    f"{parameter.name}: {whole.numel()} of its {parameter.numel} elements are there ({kind})"
                )
            yield whole
            end = parameter.offset + parameter.numel
        yield torch.zeros(stored.padded_numel - end, dtype=dtype)

    def _state(self, data: dict[str, Tensor]) -> dict[str, Any]:
        model, scaler = self.source.model, self.source.scaler
        config = model.get("ds_config") or {}
        optimizer, scheduler = config.get("optimizer") or {}, config.get("scheduler") or {}
        accumulation = config.get("gradient_accumulation_steps") or 1
        options = [
            {key: group.options[key] for key in _OPTIONS if key in group.options} for group in self.source.groups
        ]
        kind = str(optimizer.get("type", ""))
        return {
            "global_steps": model["global_steps"],
            "micro_steps": model["global_steps"] * (accumulation if isinstance(accumulation, int) else 1),
            "skipped_steps": model["skipped_steps"],
            "global_samples": model["global_samples"],
            "precision": "fp16" if _enabled(config, "fp16") else "bf16" if _enabled(config, "bf16") else "fp32",
            "train_batch_size": config.get("train_batch_size"),
            "loss_scaler": _scaler(scaler),
            "optimizer": "AdamW" if kind.lower() in ("adam", "adamw", "fusedadam") else kind or None,
            "param_groups": encode(options, "param_groups", data),
            "scheduler": scheduler.get("type"),
            "scheduler_state": encode(model["lr_scheduler"], "lr_scheduler", data),
            "loaders": [],
        }


def _enabled(config: Mapping[str, Any], section: str) -> bool:
    found = config.get(section)
    return isinstance(found, dict) and found.get("enabled") is True


def _scaler(scaler: Any) -> dict[str, float | int] | None:
    """Our names for the state of a dynamic loss scaler; None for a fixed one."""
    if not hasattr(scaler, "cur_iter"):
        return None
    return {
        "scale": float(scaler.cur_scale),
        "hysteresis_left": int(scaler.cur_hysteresis),
        "step": int(scaler.cur_iter),
        "last_overflow": int(scaler.last_overflow_iter),
    }
