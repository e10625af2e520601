"""Saving: what ranks agree on before, what each writes, and how it all becomes one checkpoint or none.

[Note: the four meetings of a save]
1. Everyone is here, with the same tag; leaders have made the directories. (One leader a disk: rank 0, or with
   `use_node_local_storage` the first rank of each host.)
2. Everyone has written and synced their files; leaders then write the manifest and give the directory its name.
3. That worked on all disks; leaders then switch `latest` and remove old checkpoints.
4. All is done.
A rank that fails comes to the next meeting and says so; then no one goes on, and all raise the same error. The first
meeting is in the caller's thread; with `async` the rest is in a thread of its own, over copies.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zrun_runtime.checkpoint.contents import Contents, OwnTensor, Trainer, collect, digests, slices
from zrun_runtime.checkpoint.errors import CheckpointError, TagsDifferError, by_value, raise_troubles
from zrun_runtime.checkpoint.files import (
    LATEST,
    Aside,
    checked_tag,
    list_tags,
    read_latest,
    remove_tag,
    replace_small,
    told,
    write_small,
)
from zrun_runtime.checkpoint.manifest import (
    DTYPES,
    MANIFEST,
    NAMES,
    Manifest,
    Role,
    StoredFile,
    StoredTensor,
    role_of,
    sealed,
)
from zrun_runtime.checkpoint.script import leave_script
from zrun_runtime.checkpoint.writer import Entry, FileSet
from zrun_runtime.collectives.rendezvous import Rendezvous
from zrun_runtime.config.extras_schema import CheckpointConfig
from zrun_runtime.layout import round_up
from zrun_runtime.telemetry import notice

_SLOWEST_DISK = 10e6  # bytes a second: a rank that writes more slowly counts as lost
_NFS_PATIENCE = 10.0  # seconds after which what another host made must be seen
_ALIGNMENT = 64  # bytes
_DEFAULT_TAGS = "global_step"
_unheard: set[Saver] = set()  # a checkpoint of theirs is missing, and the program does not know yet


@atexit.register  # when this module is imported, so that what a program registers runs before it
def _fail_at_exit() -> None:
    """A checkpoint is missing and nobody has heard of it: the program must not end as if all were well."""
    if _unheard:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)


@dataclass(frozen=True)
class Request:
    """What the caller wants saved."""

    path: Path
    tag: object
    client_state: Any
    save_latest: bool = True
    exclude_frozen: bool = False


@dataclass
class Job:
    """One checkpoint that is being written."""

    path: Path
    tag: str
    save_latest: bool
    contents: Contents
    leader: int  # the rank whose disk ours is; -1: we see no leader's directory
    directory: Path  # that the leader made
    aside: Aside | None  # the same, of a leader
    suffix: str  # of file names; where the tag is saved again, no file there has it
    own: list[OwnTensor]  # what is in this rank's file beside its slices
    own_state: dict[str, Any] | None  # None: the same as rank 0's


class Saver:
    """Writes the checkpoints of one trainer, one at a time. See [Note: the four meetings of a save]."""

    def __init__(self, trainer: Trainer, settings: CheckpointConfig, rendezvous: Rendezvous) -> None:
        self.trainer, self.settings, self.meeting = trainer, settings, rendezvous
        self.world = trainer.collectives.world
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None  # of the thread; not raised yet
        self._host = torch.empty(0, dtype=torch.uint8)  # what the thread writes from; kept for the next time

    def save(self, request: Request, trouble: Exception | None = None) -> None:
        """Write a checkpoint, on all ranks; see Engine.save_checkpoint.

        trouble: why this rank cannot; all ranks hear of it.
        """
        self.wait()
        job = self._agree(request, trouble)
        stream = slices(job.contents, self.trainer.updater, self.world.rank)
        if not self.settings.asynchronous:
            self._carry_out(job, stream)
            return
        copies = self._copy(job, stream)
        self._thread = threading.Thread(target=self._in_background, args=(job, copies), name="zrun-checkpoint")
        self._thread.start()  # not a daemon: the interpreter waits for it

    # ---- the background

    def wait(self) -> None:
        """Until nothing is being written any more."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def raise_failure(self) -> None:
        """Raise what failed in the background, once.

        Raises:
            CheckpointError: a checkpoint could not be written.
        """
        failure, self._failure = self._failure, None
        _unheard.discard(self)
        if failure is not None:
            raise failure

    def _in_background(self, job: Job, copies: list[tuple[Role, Tensor]]) -> None:
        try:
            self._carry_out(job, copies)
        except Exception as error:
            self._failure = error
            _unheard.add(self)
            notice("error", f"{job.path / job.tag} was not written: {error}", rank=self.world.rank)

    def _copy(self, job: Job, stream: Iterable[tuple[Role, Tensor]]) -> list[tuple[Role, Tensor]]:
        """Copies of all that this rank writes, in host memory that is used again and again."""
        group_bytes = sum(
            group.padded_numel // self.world.size * DTYPES[dtype].itemsize + _ALIGNMENT
            for group in job.contents.groups
            for dtype in group.kinds.values()
        )
        wanted = group_bytes + sum(one.values.nbytes + _ALIGNMENT for one in job.own)
        if self._host.numel() < wanted:
            self._host = torch.empty(wanted, dtype=torch.uint8, pin_memory=self.world.device.type == "cuda")
        end = 0

        def copy(tensor: Tensor) -> Tensor:
            nonlocal end
            place = self._host[end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor, non_blocking=True)
            end = round_up(end + tensor.nbytes, _ALIGNMENT)
            return place

        copies = [(role, copy(tensor)) for role, tensor in stream]
        job.own = [replace(one, values=copy(one.values)) for one in job.own]
        if self.world.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return copies

    # ---- the first meeting

    def _agree(self, request: Request, error: Exception | None) -> Job:
        rank, nonce = self.world.rank, secrets.token_hex(4)
        leads = self.world.local_rank == 0 if self.settings.use_node_local_storage else rank == 0
        aside, contents, text = None, Contents(), ""
        try:
            if error is not None:
                raise error
            text = checked_tag(request.tag)
            contents = collect(self.trainer, request.client_state, request.exclude_frozen)
            if leads:
                aside = Aside(request.path, text, nonce)
                aside.create()
        except Exception as caught:
            error = caught
        said = {
            "trouble": str(error) if error is not None else None,
            "failure": str(self._failure) if self._failure is not None else None,
            "tag": text,
            "host": socket.gethostname(),
            "aside": aside.path.name if aside is not None else None,
            "suffix": f".{nonce}" if aside is not None and os.path.lexists(request.path / text) else "",
            "digests": digests(contents.own),
            "own_state": hashlib.sha256(json.dumps(contents.own_state, sort_keys=True).encode()).hexdigest(),
        }
        try:
            heard = self.meeting.exchange("save_checkpoint", said, self.settings.timeout)
            self._failure = None
            _unheard.discard(self)
            raise_troubles("an earlier save_checkpoint", heard, "failure")
            if error is not None:
                raise error
            raise_troubles("save_checkpoint", heard)
            return self._job(request, contents, aside, heard)
        except BaseException:
            if aside is not None:
                aside.discard()
            raise

    def _job(self, request: Request, contents: Contents, aside: Aside | None, heard: Sequence[dict[str, Any]]) -> Job:
        """What this rank has to write, now that all have spoken."""
        rank, path, tag = self.world.rank, request.path, self._one_tag([one["tag"] for one in heard])
        leaders = [number for number, one in enumerate(heard) if one["aside"]]
        leader = self._find_leader(path, leaders, heard)
        if aside is not None and leader != rank:  # its disk is another leader's as well
            aside.discard()
            aside = None
        if aside is not None:
            aside.tag = tag
        mine, theirs = heard[rank], heard[leader]
        own = [
            one for one in contents.own if rank == leader or mine["digests"][one.key] != theirs["digests"].get(one.key)
        ]
        holders = [leader] if len(leaders) > 1 else range(self.world.size)
        own += [one for index, one in enumerate(contents.shared) if holders[index % len(holders)] == rank]
        alike = rank > 0 and mine["own_state"] == heard[0]["own_state"]
        state = None if alike else contents.own_state
        directory, suffix = path / (theirs["aside"] or ""), theirs["suffix"]
        return Job(path, tag, request.save_latest, contents, leader, directory, aside, suffix, own, state)

    def _one_tag(self, tags: Sequence[str]) -> str:
        if len(set(tags)) > 1:
            text = "save_checkpoint: ranks gave different tags: " + by_value(tags)
            if self.settings.tag_validation == "Fail":
                raise TagsDifferError(text, "give the same tag on every rank, or leave it out")
            if self.settings.tag_validation == "Warn" and self.world.rank == 0:
                notice("warning", f"{text}; {tags[0]!r}, that of rank 0, is taken")
        return tags[0]

    def _find_leader(self, path: Path, leaders: Sequence[int], heard: Sequence[dict[str, Any]]) -> int:
        """The first leader whose directory is on the disk that we see; -1 if there is none."""
        rank = self.world.rank
        far = any(heard[one]["host"] != heard[rank]["host"] for one in leaders)
        deadline = time.monotonic() + (_NFS_PATIENCE if far and rank not in leaders else 0.0)
        while True:
            for one in leaders:
                if (path / heard[one]["aside"]).is_dir():
                    return one
            if time.monotonic() >= deadline:
                return -1
            time.sleep(0.1)

    # ---- writing, and the other meetings

    def _carry_out(self, job: Job, stream: Iterable[tuple[Role, Tensor]]) -> None:
        try:
            self._write_and_publish(job, stream)
        except BaseException:
            if job.aside is not None:
                job.aside.discard()
            raise

    def _write_and_publish(self, job: Job, stream: Iterable[tuple[Role, Tensor]]) -> None:
        """The second to the fourth meeting.

        Raises:
            CheckpointError: on every rank, if any failed; it names the rank and what failed there.
        """
        written: dict[str, Any] = {"trouble": None, "leader": job.leader, "own_state": job.own_state}
        with _reporting(written):
            written |= self._write(job, stream)
        slowest = sum(file["size"] for file in written.get("files", ())) / _SLOWEST_DISK
        heard = self._meet("writing a checkpoint", written, slowest)
        published: dict[str, Any] = {"trouble": None}
        with _reporting(published):
            if job.aside is not None:
                self._publish(job, job.aside, heard)
        self._meet("publishing a checkpoint", published)
        switched: dict[str, Any] = {"trouble": None}
        with _reporting(switched):
            if job.aside is not None:
                self._switch(job)
        self._meet("switching to a checkpoint", switched, last=True)

    def _meet(self, what: str, said: dict[str, Any], slowest: float = 0.0, last: bool = False) -> list[dict[str, Any]]:
        heard = self.meeting.exchange(what, said, self.settings.timeout + slowest, last)
        raise_troubles("save_checkpoint", heard)
        return heard

    def _write(self, job: Job, stream: Iterable[tuple[Role, Tensor]]) -> dict[str, Any]:
        """Write this rank's files. Returns what the manifest says of them."""
        if job.leader < 0:
            raise CheckpointError(
                f"{job.path.absolute()}: rank {self.world.rank} does not see what rank 0 made there: another "
                "directory, or a disk of its own",
                "give all ranks one directory on a shared file system, or set checkpoint.use_node_local_storage",
            )
        rank, size = self.world.rank, self.world.size
        plan: dict[Role, dict[str, Entry]] = {"model": {}}
        for number, group in enumerate(job.contents.groups):
            for kind, dtype in group.kinds.items():
                entry = Entry(DTYPES[dtype], (group.padded_numel // size,))
                plan.setdefault(role_of(kind), {})[f"{number:05d}.{kind}"] = entry
        tensors, end = [], sum(entry.nbytes for entry in plan["model"].values())
        for one in job.own:
            entry = plan["model"][one.key] = Entry(one.values.dtype, tuple(one.values.shape))
            place = StoredTensor(
                name=one.name, what=one.what, rank=rank, dtype=NAMES[entry.dtype], shape=entry.shape, start=end
            )
            tensors.append(place.model_dump())
            end += entry.nbytes
        files = FileSet(job.directory, plan, rank, size, job.suffix)
        try:
            for role, tensor in stream:
                files.feed(role, tensor)
            for one in job.own:
                files.feed("model", one.values)
            stored = files.close()
        except BaseException:
            files.abandon()
            raise
        return {
            "files": [file.model_copy(update={"node": job.leader}).model_dump() for file in stored],
            "tensors": tensors,
        }

    def _publish(self, job: Job, aside: Aside, heard: Sequence[dict[str, Any]]) -> None:
        contents = job.contents
        manifest = Manifest(
            format="zrun-checkpoint",
            version=1,
            tag=job.tag,
            world_size=self.world.size,
            written_by=f"zrun_runtime, torch {torch.__version__}",
            written_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            files=tuple(StoredFile(**file) for one in heard for file in one["files"]),
            groups=tuple(contents.groups),
            tensors=tuple(
                StoredTensor(**{**tensor, "shape": tuple(tensor["shape"])})
                for one in heard
                for tensor in one["tensors"]
            ),
            aliases=contents.aliases,
            left_out=tuple(contents.left_out),
            gradient_order=contents.gradient_order,
            state=contents.state,
            own=tuple(one["own_state"] for one in heard),
        )
        text = sealed(manifest.model_dump_json(exclude_defaults=True).encode())
        with told(aside.path / MANIFEST, "the manifest cannot be written", len(text)):
            write_small(aside.path / MANIFEST, text)
        aside.publish()

    def _switch(self, job: Job) -> None:
        """Have `latest` name the new checkpoint, leave the script that exports it, and remove the oldest."""
        if job.save_latest:
            with told(job.path / LATEST, "cannot be replaced", len(job.tag)):
                replace_small(job.path / LATEST, job.tag.encode(), secrets.token_hex(4))
        leave_script(job.path)
        keep = self.settings.keep_last
        if keep:
            latest = read_latest(job.path)
            numbered = [tag for tag in list_tags(job.path) if tag.startswith(_DEFAULT_TAGS)]
            for tag in numbered[keep:]:
                if tag not in (latest, job.tag):
                    remove_tag(job.path, tag, secrets.token_hex(4))


@contextmanager
def _reporting(said: dict[str, Any]) -> Iterator[None]:
    """What fails inside is said at the next meeting, where everyone hears of it."""
    try:
        yield
    except Exception as error:
        said["trouble"] = str(error)
