"""Files of checkpoints: opened so that nothing else can be meant, written so that they are whole or not there.

[Note: how a checkpoint becomes visible]
All is written into a directory of a name that is no tag (`.TAG.NONCE.partial`), each file synced; the manifest comes
last. One rename makes it DIR/TAG. If DIR/TAG is there already (the same tag is saved again), the new files are moved
into it, under names that none there has, and the manifest is replaced by one rename; then the old files go. So at any
instant DIR/TAG is the old checkpoint or the new one. `latest` is replaced last, in the same way.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import resource
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zrun_runtime.checkpoint.errors import CheckpointError
from zrun_runtime.checkpoint.manifest import MANIFEST

LATEST = "latest"
_LARGEST_MANIFEST = 2**28  # bytes: a hundred times that of a model of 10,000 parameters
_LARGEST_LATEST = 4096
_TAG = re.compile(r"[A-Za-z0-9_][^/\\\x00-\x1f\x7f\ud800-\udfff]{0,199}")
_OUR_FILES = re.compile(r"(model|optimizer)-\d{5,}-of-\d{5,}(\.[0-9a-f]+)?\.safetensors")
_PARTIAL = re.compile(r"\..*\.partial")
_LOCK = ".writing"
_OLD_SECONDS = 86400  # where locks are not known, leftovers of this age belong to nobody


def checked_tag(tag: object, source: str = "tag") -> str:
    """A tag that is one component of a path and nothing else.

    Raises:
        CheckpointError: it is not.
    """
    text = str(tag)
    if not _TAG.fullmatch(text) or text in (LATEST, MANIFEST) or text != text.strip():
        raise CheckpointError(
            f"{source}: {text[:100]!r} is not a tag", "use one name of a directory: letters, digits, `_`, `-` and dots"
        )
    return text


# ---- reading


def open_directory(path: Path, name: str | None = None) -> int:
    """A descriptor of a directory, or of the directory `name` in it, which must not be a symbolic link.

    Raises:
        CheckpointError: there is none.
    """
    where = path if name is None else path / name
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        return os.open(where, flags if name is None else flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and where.is_symlink():
            raise CheckpointError(f"{where}: is a symbolic link", "give the directory that it points to") from error
        raise CheckpointError(f"{where}: cannot be opened: {error.strerror}") from error


def open_file(directory: int, name: str, where: Path, patience: float = 0.0) -> int:
    """A descriptor of the regular file `name` in an open directory; symbolic links are not followed.

    patience: seconds to wait for a file that is not there, as other hosts' files on NFS may be at first.

    Raises:
        CheckpointError: it is missing or is something else.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
            break
        except OSError as error:
            if error.errno == errno.ENOENT and time.monotonic() < deadline:
                os.listdir(directory)  # has NFS ask the server again
                time.sleep(0.1)
                continue
            known = {errno.ENOENT: "is missing", errno.ELOOP: "is a symbolic link"}
            what = known.get(error.errno or 0, str(error.strerror))
            raise CheckpointError(f"{where / name}: {what}", "the checkpoint is not whole") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{where / name}: is not a regular file", "do not use this checkpoint")
    return descriptor


def read_small(directory: int, name: str, where: Path, limit: int) -> bytes:
    """A whole file of at most `limit` bytes."""
    descriptor = open_file(directory, name, where)
    with open(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise CheckpointError(f"{where / name}: {size} bytes, more than the {limit} that it can have")
        return file.read(limit + 1)


def read_manifest(path: Path, tag: str) -> bytes:
    """The text of a checkpoint's manifest."""
    directory = open_directory(path, tag)
    try:
        return read_small(directory, MANIFEST, path / tag, _LARGEST_MANIFEST)
    finally:
        os.close(directory)


def read_latest(path: Path) -> str | None:
    """The tag that `latest` names; None if there is no such file (or no directory).

    Raises:
        CheckpointError: it is no regular file, or holds no tag.
    """
    if not os.path.lexists(path / LATEST):
        return None
    directory = open_directory(path)
    try:
        text = read_small(directory, LATEST, path, _LARGEST_LATEST)
    finally:
        os.close(directory)
    return checked_tag(text.decode(errors="replace").strip(), str(path / LATEST))


def list_tags(path: Path) -> list[str]:
    """Tags of the directories that have a manifest, newest manifest first."""
    found = []
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False) or not _TAG.fullmatch(entry.name):
                continue
            with contextlib.suppress(OSError):
                found.append((os.stat(Path(entry.path) / MANIFEST, follow_symlinks=False).st_mtime_ns, entry.name))
    return [name for _, name in sorted(found, reverse=True)]


# ---- writing


@contextmanager
def told(path: Path, doing: str, needed: int = 0) -> Iterator[None]:
    """Says of an OSError inside which path it was about, and what space is missing.

    Raises:
        CheckpointError: in its place.
    """
    try:
        yield
    except OSError as error:
        text = f"{path}: {doing}: {error.strerror or error}"
        hint = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text += _missing_space(path, needed)
            hint = "free some space (checkpoint.keep_last keeps only the newest), or save elsewhere"
        elif error.errno == errno.EFBIG:
            most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            known = f", and ulimit -f allows {most:,}" if most != resource.RLIM_INFINITY else ""
            text += f" ({needed:,} bytes{known})"
            hint = "raise the limit on the size of files, or save elsewhere"
        elif error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            hint = "give a directory that this user may write to"
        raise CheckpointError(text, hint) from error


def _missing_space(path: Path, needed: int) -> str:
    with contextlib.suppress(OSError):
        place = next(p for p in (path, *path.parents) if p.exists())
        disk = os.statvfs(place)
        free = disk.f_bavail * disk.f_frsize
        return f" (needed: {max(needed, 1):,} bytes; free: {free:,}; missing: {max(needed - free, 1):,})"
    return ""


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems know no such thing
            raise
    finally:
        os.close(descriptor)


def write_small(path: Path, content: bytes) -> None:
    """A new file with this content, synced."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_small(path: Path, content: bytes, nonce: str) -> None:
    """The file has this content instead of what it had, at one instant."""
    aside = path.with_name(f".{path.name}.{nonce}.partial")
    try:
        write_small(aside, content)
        os.replace(aside, path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    sync_directory(path.parent)


class Aside:
    """The directory that a checkpoint is written in, before it has its name. Locked for as long as we live.

    See [Note: how a checkpoint becomes visible].
    """

    def __init__(self, parent: Path, tag: str, nonce: str) -> None:
        self.parent, self.tag, self.nonce = parent, tag, nonce
        self.path = parent / f".{tag}.{nonce}.partial"
        self._lock: int | None = None

    def create(self) -> None:
        """Make it, and its parents. Leftovers of writers that are gone are removed first."""
        with told(self.path, "the directory cannot be made"):
            self.parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(self.parent)
            self.path.mkdir()
            self._lock = os.open(self.path / _LOCK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def publish(self) -> None:
        """Give it its name. Its files and manifest are there, and synced."""
        target = self.parent / self.tag
        with told(target, "the checkpoint cannot be given its name"):
            sync_directory(self.path)
            if os.path.lexists(target):
                self._merge(target)
            else:
                os.rename(self.path, target)
                self._unlock()  # first: what is open gets another name on NFS, and its directory cannot be removed
                (target / _LOCK).unlink()
            sync_directory(self.parent)

    def _merge(self, target: Path) -> None:
        """Move the files into a directory that is there, whatever else it holds."""
        before = [name for name in os.listdir(target) if _OUR_FILES.fullmatch(name)]
        names = [name for name in os.listdir(self.path) if name not in (MANIFEST, _LOCK)]
        for name in names:
            os.rename(self.path / name, target / name)
        sync_directory(target)
        os.replace(self.path / MANIFEST, target / MANIFEST)
        sync_directory(target)
        for name in set(before).difference(names):
            with contextlib.suppress(OSError):
                (target / name).unlink()
        self._unlock()
        shutil.rmtree(self.path, ignore_errors=True)

    def discard(self) -> None:
        """Remove it; errors do not matter: what is left is no checkpoint."""
        self._unlock()
        shutil.rmtree(self.path, ignore_errors=True)

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def _remove_leftovers(parent: Path) -> None:
    """Remove what writers that are gone have left."""
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            if _PARTIAL.fullmatch(name) and _abandoned(parent / name):
                if (parent / name).is_dir():
                    shutil.rmtree(parent / name, ignore_errors=True)
                else:
                    (parent / name).unlink()


def _abandoned(path: Path) -> bool:
    try:
        lock = os.open(path / _LOCK, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return time.time() - path.lstat().st_mtime > _OLD_SECONDS or path.name.endswith(".old.partial")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES) and time.time() - path.stat().st_mtime > _OLD_SECONDS
    finally:
        os.close(lock)


def remove_tag(parent: Path, tag: str, nonce: str) -> None:
    """Remove a checkpoint; at no instant is there a part of it under its name."""
    aside = parent / f".{tag}.{nonce}.old.partial"
    with told(parent / tag, "an old checkpoint cannot be removed"):
        os.rename(parent / tag, aside)
    shutil.rmtree(aside, ignore_errors=True)
