"""The manifest: what is in a checkpoint and where, as JSON. Everything that is read is checked here before it is used.

[Note: the layout of a checkpoint]
DIR/latest names a tag; DIR/TAG holds manifest.json and, per rank, one or two valid safetensors files: `model` (weights,
buffers, client data) and `optimizer` (moments). Both begin, after a header padded to whole pages, with this rank's
slices of every flat group as they lie in memory: group after group, in each its kinds of state. So the place of an
element follows by arithmetic: which file from its offset in the group, where in it from the sizes of what comes before.
After the slices come single tensors, whose places the manifest gives.

Files hold what their rank owns; what several ranks of one disk have alike is stored once there.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zrun_runtime.checkpoint.errors import CheckpointError

MANIFEST = "manifest.json"
MASTER, PARAM = "master", "param"  # the kinds of state that are weights
PAGE = 4096  # data sections begin on whole pages
_LARGEST = 2**56  # bytes; no count of elements or bytes is larger

# The names that safetensors gives them.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}

Role = Literal["model", "optimizer"]
What = Literal["parameter", "buffer", "data"]
Natural = Annotated[int, Field(ge=0, le=_LARGEST)]
Positive = Annotated[int, Field(ge=1, le=_LARGEST)]
DtypeName = Annotated[str, Field(pattern="^(" + "|".join(DTYPES) + ")$")]
_SEAL = re.compile(rb'\{"crc32":"([0-9a-f]{8})",')
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class StoredFile(_Part):
    """One file. Sizes in bytes; crc32 (zlib) of all of it; node: the disk that it was written to."""

    name: str
    role: Role
    rank: Natural
    node: Natural = 0
    size: Positive
    crc32: Natural
    data_start: Positive


class StoredParameter(_Part):
    """A parameter's place in a flat group, in elements. strides: where its elements do not lie in C order."""

    name: str
    shape: tuple[Natural, ...]
    offset: Natural
    strides: tuple[Natural, ...] | None = None

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)


class StoredGroup(_Part):
    """A flat group. kinds: kind of state -> dtype, weights ("master" or "param") first. scalars: see codec."""

    label: str
    padded_numel: Positive
    kinds: dict[str, DtypeName]
    parameters: tuple[StoredParameter, ...]
    optimizer_group: Natural | None = None
    scalars: Any = None

    @property
    def weights(self) -> str:
        """The kind of state that its weights are stored as."""
        return MASTER if MASTER in self.kinds else PARAM


class StoredTensor(_Part):
    """A tensor of its own, in the model file of `rank`. start: byte in the data section.

    what: parameter (that is in no group), buffer, or data (of the client, of random generators).
    """

    name: str
    what: What
    rank: Natural
    dtype: DtypeName
    shape: tuple[Natural, ...]
    start: Natural

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Manifest(_Part):
    """See [Note: the layout of a checkpoint].

    aliases: further names of tied parameters -> the name that is stored. left_out: frozen parameters that the caller
    did not want stored. state: what is the same on all ranks; own: of each rank what only it has (null: as rank 0).
    gradient_order: trained parameters in the order in which gradients arrive; empty if not known yet.
    """

    format: Literal["zrun-checkpoint"]
    version: Literal[1]
    tag: str
    world_size: Annotated[int, Field(ge=1, le=1_000_000)]
    written_by: str
    written_at: str
    files: tuple[StoredFile, ...]
    groups: tuple[StoredGroup, ...]
    tensors: tuple[StoredTensor, ...]
    aliases: dict[str, str] = {}
    left_out: tuple[str, ...] = ()
    gradient_order: tuple[str, ...] = ()
    state: dict[str, Any] = {}
    own: tuple[Any, ...] = ()

    def shard_bytes(self, group: StoredGroup, kind: str) -> int:
        """Bytes of one rank's slice of one kind of state."""
        return group.padded_numel // self.world_size * DTYPES[group.kinds[kind]].itemsize

    @cached_property
    def starts(self) -> dict[tuple[int, str], int]:
        """(group, kind) -> first byte of a rank's slice in the data section of its file."""
        found: dict[tuple[int, str], int] = {}
        end: dict[Role, int] = {"model": 0, "optimizer": 0}
        for number, group in enumerate(self.groups):
            for kind in group.kinds:
                role = role_of(kind)
                found[number, kind] = end[role]
                end[role] += self.shard_bytes(group, kind)
        return found

    def slices_bytes(self, role: Role) -> int:
        """Bytes of a rank's slices of all groups in its file of this role."""
        return sum(self.shard_bytes(g, kind) for g in self.groups for kind in g.kinds if role_of(kind) == role)

    @cached_property
    def file_of(self) -> dict[tuple[Role, int], StoredFile]:
        """(role, rank) -> its file."""
        return {(file.role, file.rank): file for file in self.files}


def role_of(kind: str) -> Role:
    """The file that a kind of state is stored in."""
    return "model" if kind in (MASTER, PARAM) else "optimizer"


def sealed(text: bytes) -> bytes:
    """The text of a JSON object with its own checksum as the first field, over all that follows it."""
    rest = text.lstrip()[1:]
    return b'{"crc32":"%08x",' % zlib.crc32(rest) + rest


def _opened(text: bytes, where: str) -> bytes:
    found = _SEAL.match(text)
    if found is None or int(found[1], 16) != zlib.crc32(text[found.end() :]):
        raise CheckpointError(f"{where}: its checksum does not fit its text", "the checkpoint is damaged")
    return b"{" + text[found.end() :]


def parse(text: bytes, where: str) -> Manifest:
    """A manifest whose every number is in bounds and fits every other one.

    Raises:
        CheckpointError: it does not; it says what.
    """
    text = _opened(text, where)
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(
            f"{where}: not a manifest of a checkpoint: {path or 'the JSON'}: {first['msg']}"
        ) from error
    for trouble in _troubles(manifest):
        raise CheckpointError(f"{where}: the manifest contradicts itself: {trouble}", "do not use this checkpoint")
    return manifest


def _troubles(manifest: Manifest) -> Iterator[str]:
    yield from _name_troubles(manifest)
    for number, group in enumerate(manifest.groups):
        if group.padded_numel % manifest.world_size:
            yield f"groups[{number}] is not a whole number of slices"
        if (MASTER in group.kinds) == (PARAM in group.kinds) or next(iter(group.kinds), "") not in (MASTER, PARAM):
            yield f"groups[{number}] has no weights"
        end = 0
        for parameter in group.parameters:
            if parameter.offset < end or parameter.offset + parameter.numel > group.padded_numel:
                yield f"{parameter.name}: its place in groups[{number}] is taken, or outside of it"
            if parameter.strides is not None and not _dense(parameter.shape, parameter.strides):
                yield f"{parameter.name}: its strides {parameter.strides} do not fit its shape"
            end = parameter.offset + parameter.numel
    yield from _file_troubles(manifest)


def _name_troubles(manifest: Manifest) -> Iterator[str]:
    names = [p.name for g in manifest.groups for p in g.parameters]
    names += {t.name for t in manifest.tensors if t.what == "parameter"}  # each disk has one
    for name, count in Counter([*names, *manifest.aliases]).items():
        if count > 1:
            yield f"the parameter {name} is there twice"
    known = {*names, *manifest.left_out}
    for alias, name in manifest.aliases.items():
        if name not in known:
            yield f"{alias} is another name of {name}, which is not there"
    for (what, name, rank), count in Counter((t.what, t.name, t.rank) for t in manifest.tensors).items():
        if count > 1:
            yield f"the {what} {name} of rank {rank} is there twice"
    if len(manifest.own) not in (0, manifest.world_size):
        yield f"`own` has {len(manifest.own)} entries for {manifest.world_size} ranks"


def _file_troubles(manifest: Manifest) -> Iterator[str]:
    if len(manifest.file_of) != len(manifest.files) or len({f.name for f in manifest.files}) != len(manifest.files):
        yield "two files are of the same rank, or have the same name"
    singles = dict.fromkeys(range(manifest.world_size), 0)
    for tensor in manifest.tensors:
        if tensor.rank not in singles:
            yield f"{tensor.name} is of rank {tensor.rank}, which there was not"
            continue
        singles[tensor.rank] = max(singles[tensor.rank], tensor.start + tensor.nbytes)
    for role in ("model", "optimizer"):
        slices = manifest.slices_bytes(role)
        for rank in range(manifest.world_size):
            file = manifest.file_of.get((role, rank))
            wanted = max(slices, singles[rank] if role == "model" else 0)
            if file is None:
                if wanted or role == "model":
                    yield f"no {role} file of rank {rank}"
            elif not _FILE_NAME.fullmatch(file.name):
                yield f"{file.name!r} is no name of a file of a checkpoint"
            elif file.size - file.data_start != wanted:
                yield f"{file.name} has {file.size - file.data_start} bytes of data, and its contents have {wanted}"
    for file in manifest.files:
        if file.rank >= manifest.world_size:
            yield f"{file.name} is of rank {file.rank}, which there was not"


def _dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Every element has a place of its own and there are no holes."""
    if len(shape) != len(strides):
        return False
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(strides, shape, strict=True) if sz != 1):
        if stride != expected:
            return False
        expected *= size
    return True
