"""The errors of the launcher: what is wrong, where, what to do next, and the exit code it leads to.

ZrunError
├── UsageError       exit 2: an option, a file or a name that cannot be right
├── PreflightError   exit 3: a host is not fit to run the job
├── HostLostError    exit 4: a host, its agent or the link to it is gone
└── ProtocolError    exit 4: the other end said something that is not the protocol
"""

from __future__ import annotations


class ZrunError(Exception):
    """Base of everything the launcher raises on purpose.

    Args:
        message: what is wrong and where (file:line, host, rank), one sentence.
        hint: what to do next; empty if the message says it all.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(ZrunError):
    """An option, a file or a name that cannot be right."""

    exit_code = 2


class PreflightError(ZrunError):
    """A host is not fit to run the job."""

    exit_code = 3


class HostLostError(ZrunError):
    """A host, its agent or the link to it is gone."""

    exit_code = 4


class ProtocolError(HostLostError):
    """The other end said something that is not the protocol."""
