"""Loading: which checkpoint, is it whole, does it fit; only then is the engine touched."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zrun_runtime.checkpoint.contents import Trainer
from zrun_runtime.checkpoint.errors import CheckpointError, TagsDifferError, by_value, raise_troubles
from zrun_runtime.checkpoint.files import LATEST, checked_tag, list_tags, read_latest, read_manifest
from zrun_runtime.checkpoint.manifest import MANIFEST, Manifest, Role, parse
from zrun_runtime.checkpoint.reader import CheckpointReader, needed_files
from zrun_runtime.checkpoint.restore import Restorer, Wanted
from zrun_runtime.collectives.rendezvous import Rendezvous
from zrun_runtime.config.extras_schema import CheckpointConfig
from zrun_runtime.telemetry import notice

_FILES_OF_OTHER_HOSTS = 10.0  # seconds after which files that other hosts wrote must be seen (NFS)


@dataclass(frozen=True)
class Survey:
    """What one rank sees of a checkpoint without reading its data. nodes: the disks of which all files are here."""

    manifest: Manifest
    digest: str
    nodes: frozenset[int]

    @property
    def complete(self) -> bool:
        """All files are here, not only those of some hosts."""
        return self.nodes == {file.node for file in self.manifest.files}


def survey(path: Path, tag: str, roles: Sequence[Role], rank: int = 0, patience: float = 0.0) -> Survey:
    """Read the manifest, and see whether the files of these roles are there in full size.

    rank: whose host's files are missed first. patience: seconds to wait for what other hosts wrote.

    Raises:
        CheckpointError: the checkpoint is not whole; it names the file.
    """
    text = read_manifest(path, tag)
    manifest = parse(text, str(path / tag / MANIFEST))
    troubles: dict[int, CheckpointError] = {}
    one_disk = len({file.node for file in manifest.files}) == 1  # else what is not here now never will be
    with CheckpointReader(path / tag, manifest, patience=patience if one_disk else 0.0) as reader:
        for file in manifest.files:
            if file.role in roles and file.node not in troubles:
                try:
                    reader.descriptor(file)
                except CheckpointError as error:
                    troubles[file.node] = error
    nodes = {file.node for file in manifest.files}
    if nodes == set(troubles):
        own = manifest.file_of.get(("model", rank))
        raise troubles[own.node if own is not None else min(troubles)]
    return Survey(manifest, hashlib.sha256(text).hexdigest(), frozenset(nodes - set(troubles)))


class Loader:
    """Loads checkpoints into one trainer."""

    def __init__(self, trainer: Trainer, settings: CheckpointConfig, rendezvous: Rendezvous) -> None:
        self.trainer, self.settings, self.meeting = trainer, settings, rendezvous
        self.world = trainer.collectives.world
        self._seen: dict[Path, Survey] = {}  # by this call

    def load(self, path: Path, tag: object, wanted: Wanted, fallback: bool) -> tuple[str | None, Any]:
        """See Engine.load_checkpoint. (directory that was loaded, client state), or (None, {}) if there is none."""
        self._seen.clear()
        roles: list[Role] = ["model", "optimizer"] if wanted.moments and self.trainer.updater else ["model"]
        if tag is None and (path / MANIFEST).is_file() and not (path / LATEST).exists():
            path, tag = path.absolute().parent, path.absolute().name  # the directory of one checkpoint was given
        chosen = self._first_choice(path, tag, roles, fallback)
        damaged: list[str] = []
        while chosen is not None:
            trouble = self._verify(path, chosen, roles)
            if not trouble:
                return str(path / chosen), self._restore(path, chosen, roles, wanted)
            damaged.append(chosen)
            chosen = self._other(path, roles, damaged, trouble, fallback)
        if self.world.rank == 0:
            notice("warning", f"load_checkpoint: {path.absolute()} has no `latest`: nothing was loaded")
        return None, {}

    # ---- which one

    def _first_choice(self, path: Path, tag: object, roles: Sequence[Role], fallback: bool) -> str | None:
        """The tag that was asked for, or that `latest` names; None if there is none on any rank."""
        said: dict[str, Any] = {"asked": None, "name": None, "digest": None, "trouble": None}
        try:
            said["asked"] = said["name"] = None if tag is None else checked_tag(tag)
            said["name"] = said["name"] or read_latest(path)
            if said["name"] is not None:
                said["digest"] = self._look(path, said["name"], roles).digest
        except CheckpointError as error:
            said["trouble"] = str(error)
        heard = self.meeting.exchange("load_checkpoint", said, self.settings.timeout)
        asked = [str(one["asked"]) for one in heard]
        if len(set(asked)) > 1:
            raise TagsDifferError(f"load_checkpoint: ranks ask for different tags: {by_value(asked)}")
        try:
            raise_troubles("load_checkpoint", heard)
        except CheckpointError as error:
            return self._other(path, roles, [heard[0]["name"] or ""], error, fallback)
        seen = [f"{one['name']} ({one['digest'][:8]})" if one["digest"] else "none" for one in heard]
        if len(set(seen)) > 1:
            differ = CheckpointError(f"load_checkpoint: ranks see different checkpoints: {by_value(seen)}")
            return self._other(path, roles, [], differ, fallback or tag is None)
        name: str | None = heard[0]["name"]
        return name

    def _look(self, path: Path, tag: str, roles: Sequence[Role]) -> Survey:
        one_host = os.environ.get("LOCAL_WORLD_SIZE", "") == str(self.world.size) or self.world.size == 1
        found = survey(path, tag, roles, self.world.rank, 0.0 if one_host else _FILES_OF_OTHER_HOSTS)
        if not found.complete:
            manifest, rank = found.manifest, self.world.rank
            if manifest.world_size != self.world.size:
                raise CheckpointError(
                    f"{path / tag}: files of other hosts are missing here, and {manifest.world_size} ranks saved it "
                    f"where {self.world.size} load",
                    "load it with the same number of ranks on the same hosts, or copy all hosts' files together",
                )
            if manifest.file_of["model", rank].node not in found.nodes:
                raise CheckpointError(
                    f"{path / tag}: {manifest.file_of['model', rank].name} is missing", "it is on another host's disk"
                )
        self._seen[path / tag] = found
        return found

    def _other(
        self, path: Path, roles: Sequence[Role], damaged: list[str], error: CheckpointError, fallback: bool
    ) -> str | None:
        """The newest checkpoint that looks whole on all ranks, if it may be taken.

        Raises:
            CheckpointError: it may not (it is named), or there is none.
        """
        seen = {}
        for tag in list_tags(path):
            if tag not in damaged:
                with contextlib.suppress(CheckpointError):
                    seen[tag] = self._look(path, tag, roles).digest
        heard = self.meeting.exchange("looking for another checkpoint", seen, self.settings.timeout)
        common = next((t for t, digest in heard[0].items() if all(one.get(t) == digest for one in heard)), None)
        if common is None:
            hint = f"there is no whole one in {path.absolute()}"
            raise CheckpointError(error.message, f"{error.hint}; {hint}" if error.hint else hint) from error
        if not fallback:
            offer = f"the newest that looks whole is {common!r}: pass tag={common!r} or fallback=True"
            raise CheckpointError(error.message, f"{error.hint}; {offer}" if error.hint else offer) from error
        if self.world.rank == 0:
            notice("warning", f"{error.message}; {common!r} is loaded instead")
        return common

    # ---- is it whole, and in with it

    def _verify(self, path: Path, tag: str, roles: Sequence[Role]) -> CheckpointError | None:
        """Each rank reads its share of the files and compares checksums. What is wrong, the same on every rank."""
        said: dict[str, Any] = {"trouble": None}
        try:
            with self._reader(path, tag, roles) as reader:
                for file in needed_files(reader.index, roles):
                    if file.rank % self.world.size == self.world.rank:
                        reader.verify(file)
        except CheckpointError as error:
            said["trouble"] = str(error)
        slowest = self.settings.timeout * 100
        heard = self.meeting.exchange("verifying a checkpoint", said, slowest)
        try:
            raise_troubles("load_checkpoint", heard)
        except CheckpointError as error:
            return error
        return None

    def _reader(self, path: Path, tag: str, roles: Sequence[Role]) -> CheckpointReader:
        found = self._seen.get(path / tag) or self._look(path, tag, roles)
        return CheckpointReader(path / tag, found.manifest, None if found.complete else found.nodes)

    def _restore(self, path: Path, tag: str, roles: Sequence[Role], wanted: Wanted) -> Any:
        with self._reader(path, tag, roles) as reader:
            restorer = Restorer(self.trainer, reader, wanted)
            restorer.check()
            said: dict[str, Any] = {"trouble": None}
            try:
                restorer.read()
            except CheckpointError as error:
                said["trouble"] = str(error)
            heard = self.meeting.exchange("reading a checkpoint", said, self.settings.timeout * 100)
            raise_troubles("load_checkpoint", heard)
            restorer.share()
            client_state = restorer.finish()
            self.meeting.exchange("the end of load_checkpoint", None, self.settings.timeout, last=True)
            return client_state
