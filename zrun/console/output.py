"""The stream a console writes to, which may stall, lose characters or go away without harm to the job."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import TextIO


class Output:
    """A text stream for the console alone.

    A character that the stream's encoding lacks is replaced. When the reader is gone (`zrun ... | head`, a closed
    terminal) everything later is dropped in silence: training goes on, its output is in the log files. If the stream
    takes nothing for another reason, as on a full disk, stderr hears of it once.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        try:
            if self._stream is not None:
                self._write(self._stream, text)
        except BlockingIOError:
            pass  # someone made the terminal non-blocking; better a gap than the end
        except (OSError, ValueError) as error:
            self._give_up(error)
        return len(text)

    def flush(self) -> None:
        try:
            if self._stream is not None:
                self._stream.flush()
        except BlockingIOError:
            pass
        except (OSError, ValueError) as error:
            self._give_up(error)

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("the console's stream is gone")
        return self._stream.fileno()

    def _write(self, stream: TextIO, text: str) -> None:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            stream.write(text.encode(self.encoding, "replace").decode(self.encoding))

    def _give_up(self, why: Exception) -> None:
        """Point the descriptor at nothing, so that no later flush of the same stream (at exit) fails again."""
        if isinstance(why, OSError) and why.errno not in (errno.EPIPE, errno.EIO):  # somebody still waits for it
            with contextlib.suppress(OSError, ValueError, AttributeError):
                what = f"nothing more can be shown: {why.strerror}; --log_dir keeps what the workers say"
                sys.stderr.write(f"zrun: warning: {what}\n")
        stream, self._stream = self._stream, None
        try:
            descriptor = stream.fileno() if stream is not None else -1
        except (OSError, ValueError):
            return  # not a real file, or closed already
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)
