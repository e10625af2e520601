"""Where the output of workers is kept on their host: bounded files that hold every byte, two streams a rank."""

from __future__ import annotations

import os

FILE_LIMIT = 64 * 1024 * 1024  # bytes; the file before it is kept as well


class SpoolFile:
    """One stream's file. At FILE_LIMIT it becomes `<name>.1`, which replaces the one before, and a new one begins.

    A file that is already there, of an earlier job with the same --log_dir, is moved aside in the same way.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: str, limit: int = FILE_LIMIT) -> None:
        self.path = path
        self._limit = limit
        self._size = 0
        self._rotated = False
        self._fd: int | None = None
        if os.path.exists(path) and os.path.getsize(path) > 0:
            os.replace(path, path + ".1")
        self._open()

    def write(self, data: bytes) -> str:
        """Keeps `data`.

        Returns:
            what a person should know: that older output is being thrown away, or that the disk takes no more. Mostly
            nothing, and each only once.
        """
        if self._fd is None:
            return ""
        said = ""
        try:
            if self._size + len(data) > self._limit and self._size:
                said = self._rotate()
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            self.close()
            return f"{self.path} cannot be written, later output is not kept: {error.strerror}"
        self._size += len(data)
        return said

    @property
    def empty(self) -> bool:
        """Nothing was ever written."""
        return self._size == 0

    @property
    def takes(self) -> bool:
        """It still keeps what is written."""
        return self._fd is not None

    def close(self) -> None:
        """Lets go of the file; later writes do nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def remove(self) -> None:
        """Takes the file and its predecessor away."""
        self.close()
        for path in (self.path, self.path + ".1"):
            if os.path.exists(path):
                os.unlink(path)

    def _open(self) -> None:
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def _rotate(self) -> str:
        before = self.path + ".1"
        self.close()
        os.replace(self.path, before)
        self._open()
        self._size, first, self._rotated = 0, not self._rotated, True
        if not first:
            return ""
        return (
            f"{self.path} reached {self._limit >> 20} MiB: the older output is in {before}, what is older still is lost"
        )


class SpoolDirectory:
    """The files of all ranks of one host: `rank-R/stdout` and `rank-R/stderr`.

    Args:
        log_dir: where the user wants them; empty for a directory of our own that only this user can read.

    Raises:
        OSError: the directory cannot be made.
    """

    def __init__(self, log_dir: str, job_id: str) -> None:
        self._own = not log_dir
        self.path = log_dir or _make_private(job_id)
        self._files: list[SpoolFile] = []

    def rank_directory(self, rank: int) -> str:
        """Where the files of `rank` lie."""
        return os.path.join(self.path, f"rank-{rank}")

    def open(self, rank: int, stream: str) -> SpoolFile:
        """The file for a stream of a rank."""
        os.makedirs(self.rank_directory(rank), exist_ok=True)
        file = SpoolFile(os.path.join(self.rank_directory(rank), stream))
        self._files.append(file)
        return file

    def finish(self, keep: bool) -> str:
        """Closes all files. Ours are taken away unless they are to be kept and hold something.

        Returns:
            where they are, or nothing if they were taken away.
        """
        for file in self._files:
            file.close()
        if not self._own or (keep and not all(file.empty for file in self._files)):
            return self.path
        try:
            for file in self._files:
                file.remove()
            for directory in {os.path.dirname(file.path) for file in self._files}:
                os.rmdir(directory)
            os.rmdir(self.path)
        except OSError:
            return self.path  # somebody put something there
        return ""


def _make_private(job_id: str) -> str:
    base = next((os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)), "/tmp")
    path = os.path.join(os.path.abspath(base), f"zrun-{job_id}-{os.getpid()}-{os.urandom(4).hex()}")
    os.mkdir(path, 0o700)
    return path
