"""The errors of the runtime: what is wrong, where (key path, parameter, rank), what to do next.

ZeroRuntimeError
├── ConfigError         a config that cannot be read, or asks for what cannot be
├── DistributedError    the process group cannot be built, or ranks do not agree
│   └── RanksDivergedError   ranks entered different modules or operations
├── ParameterError      a parameter is used where it cannot be (sharded, unmanaged, of a kind that cannot be sharded)
├── EngineError         the engine's methods were called in an order that has no meaning
└── OffloadError        a tier below the device cannot hold or give back what was to be kept there
"""

from __future__ import annotations


class ZeroRuntimeError(RuntimeError):
    """Base of everything the runtime raises on purpose.

    Args:
        message: what is wrong and where.
        hint: what to do next; empty if the message says it all.
    """

    zrun_exit_code = 1  # of a script that it ends; also what `zrun_runtime.uncaught` knows errors of ours by

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message}\n  -> {hint}" if hint else message)
        self.message = message
        self.hint = hint


class ConfigError(ZeroRuntimeError, ValueError):
    """A config that cannot be read, or asks for what cannot be."""

    zrun_exit_code = 2


class DistributedError(ZeroRuntimeError):
    """The process group cannot be built, or ranks do not agree."""


class RanksDivergedError(DistributedError):
    """Ranks entered different modules or operations, so their shards must not meet."""


class ParameterError(ZeroRuntimeError):
    """A parameter is used where it cannot be: sharded, unmanaged, or of a kind that cannot be sharded."""


class EngineError(ZeroRuntimeError):
    """The engine's methods were called in an order that has no meaning."""


class OffloadError(ZeroRuntimeError):
    """A tier below the device cannot hold what is to be kept there, or cannot give it back."""
