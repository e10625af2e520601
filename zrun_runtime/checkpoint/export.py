"""Whole weights out of a checkpoint, for other programs: safetensors or torch files, in shards as transformers reads.

One shard is written at a time, tensor by tensor in pieces, so memory stays small however large the model.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from zrun_runtime.checkpoint.errors import CheckpointError
from zrun_runtime.checkpoint.files import checked_tag, sync_directory, told, write_small
from zrun_runtime.checkpoint.open import StoredState, open_checkpoint
from zrun_runtime.checkpoint.writer import BufferPair, DiskThread, Entry, StreamWriter, header

DTYPES: dict[str, torch.dtype | None] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "stored": None,
}
_UNITS = {"": 1, "B": 1, **{f"{u}B": 1000**i for i, u in enumerate("KMGT", 1)}}
_UNITS |= {f"{u}IB": 1024**i for i, u in enumerate("KMGT", 1)}


@dataclass(frozen=True)
class Form:
    """How weights are written. safetensors: else torch's own format, `pytorch_model.bin`. Sizes in bytes."""

    dtype: torch.dtype | None = torch.float32
    max_shard_bytes: int = 5 * 10**9
    safetensors: bool = True
    exclude_frozen: bool = False

    @property
    def stem(self) -> tuple[str, str]:
        """(beginning, ending) of the names of files."""
        return ("model", ".safetensors") if self.safetensors else ("pytorch_model", ".bin")


def parse_size(text: str | int) -> int:
    """Bytes of `5GB`, `200MB`, `1GiB`, or a number.

    Raises:
        CheckpointError: it is none of these.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if not found or found[2].upper() not in _UNITS or float(found[1]) <= 0:
        raise CheckpointError(f"max_shard_size: {text!r} is not a size", "write 5GB, 200MB or a number of bytes")
    return max(1, int(float(found[1]) * _UNITS[found[2].upper()]))


def export(path: Path, output: Path, tag: str | None = None, form: Form = Form()) -> list[Path]:
    """Write the weights of a checkpoint into a directory; returns the files, the index (if there is one) last.

    Raises:
        CheckpointError: the checkpoint is not there or is damaged; the output cannot be written or is there already.
    """
    with open_checkpoint(path, tag) as reader:
        for file in reader.manifest.files:
            if file.role == "model":
                reader.verify(file)
        state = StoredState(reader, form.dtype, form.exclude_frozen)
        shards = _shards(state, form.max_shard_bytes)
        names = _names(form, len(shards))
        with told(output, "cannot be made"):
            output.mkdir(parents=True, exist_ok=True)
        _refuse_older(output, form)
        asides = [output / f".{name}.partial" for name in names]
        try:
            for aside, shard in zip(asides, shards, strict=True):
                _write_safetensors(aside, state, shard) if form.safetensors else _write_torch(aside, state, shard)
            for aside, name in zip(asides, names, strict=True):
                os.rename(aside, output / name)
        finally:
            for aside in asides:
                aside.unlink(missing_ok=True)
        written = [output / name for name in names]
        if len(names) > 1:
            written.append(_write_index(output, form, state, dict(zip(names, shards, strict=True))))
        sync_directory(output)
        return written


def _refuse_older(output: Path, form: Form) -> None:
    """Files of an older export would be mixed up with the new ones."""
    start, end = form.stem
    there = sorted(p.name for p in output.iterdir() if p.name.startswith(start) and p.suffix in (end, ".json"))
    if there:
        raise CheckpointError(f"{output}: {', '.join(there[:3])} is there already", "give an empty directory")


def _write_index(output: Path, form: Form, state: StoredState, shards: Mapping[str, Sequence[str]]) -> Path:
    index = output / f"{form.stem[0]}{form.stem[1]}.index.json"
    size = sum(state.nbytes_of(name) for name in state)
    table = {name: file for file, names in shards.items() for name in names}
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": table}, indent=2, sort_keys=True) + "\n"
    with told(index, "cannot be written"):
        write_small(index, text.encode())
    return index


def _shards(state: StoredState, most: int) -> list[list[str]]:
    """Names, in order, by file: a file is closed before it would exceed `most` bytes."""
    shards: list[list[str]] = [[]]
    size = 0
    for name in state:
        nbytes = state.nbytes_of(name)
        if shards[-1] and size + nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    return shards


def _names(form: Form, count: int) -> list[str]:
    start, end = form.stem
    if count == 1:
        return [f"{start}{end}"]
    return [f"{start}-{number + 1:05d}-of-{count:05d}{end}" for number in range(count)]


def _write_safetensors(path: Path, state: StoredState, names: Sequence[str]) -> None:
    entries = {name: Entry(state.dtype_of(name), tuple(state.sources[name].shape)) for name in names}
    head = header(entries, {"format": "pt"}, pad=False)
    with closing(DiskThread()) as disk:
        writer = StreamWriter(path, BufferPair(), disk, len(head) + sum(e.nbytes for e in entries.values()))
        try:
            writer.feed_bytes(head)
            for name in names:
                for part in state.parts(name):
                    writer.feed(part)
            writer.close()
        except BaseException:
            writer.abandon()
            raise


def _write_torch(path: Path, state: Mapping[str, Tensor], names: Sequence[str]) -> None:
    with told(path, "cannot be written"), open(path, "xb") as file:
        torch.save({name: state[name] for name in names}, file)
        file.flush()
        os.fsync(file.fileno())


def write_whole(directory: Path, name: str, state: Mapping[str, Tensor]) -> None:
    """Write a state dict into one file, at one instant: safetensors if it is called so, else torch's format.

    Raises:
        CheckpointError: the name is a path, or the file cannot be written.
    """
    name = checked_tag(name, "save_filename")
    aside = directory / f".{name}.{secrets.token_hex(4)}.partial"
    with told(directory / name, "cannot be written", sum(value.nbytes for value in state.values())):
        directory.mkdir(parents=True, exist_ok=True)
        try:
            if name.endswith(".safetensors"):
                save_file({key: value.clone().contiguous() for key, value in state.items()}, aside, {"format": "pt"})
            else:
                torch.save(dict(state), aside)
            with open(aside, "rb") as file:
                os.fsync(file.fileno())
            os.replace(aside, directory / name)
        finally:
            aside.unlink(missing_ok=True)
        sync_directory(directory)


# ---- under the names of the field


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> Mapping[str, Tensor]:
    """The whole model in fp32, in memory; `lazy_mode`: a mapping that reads each tensor when it is asked for."""
    reader = open_checkpoint(Path(checkpoint_dir), tag)
    state = StoredState(reader, torch.float32, exclude_frozen_parameters)
    if lazy_mode:
        return state
    with reader:
        return state.dict_of()


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the whole model in fp32 as `pytorch_model.bin`, or as safetensors, sharded."""
    form = Form(torch.float32, parse_size(max_shard_size), safe_serialization, exclude_frozen_parameters)
    export(Path(checkpoint_dir), Path(output_dir), tag, form)


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> torch.nn.Module:
    """Load a checkpoint's weights into a model that no engine has, on the CPU; returns the model."""
    model = model.cpu()
    with open_checkpoint(Path(checkpoint_dir), tag) as reader:
        model.load_state_dict(StoredState(reader, None).dict_of(), strict=False)
    return model
