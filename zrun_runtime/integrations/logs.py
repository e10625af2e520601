"""`deepspeed.utils.logging`: one logger, and who of the ranks writes to it."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

logger = logging.getLogger("DeepSpeed")
log_levels = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}


class LoggerFactory:
    """Makes loggers."""

    @staticmethod
    def create_logger(name: str, level: int = logging.INFO) -> logging.Logger:
        """A logger of this name and level."""
        made = logging.getLogger(name)
        made.setLevel(level)
        return made


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks only; on all if none are named or one is -1."""
    if _is_one_of(ranks):
        logger.log(level, f"[Rank {_rank()}] {message}")


@functools.lru_cache(None)
def _once(write: Any, *arguments: Any) -> None:
    write(*arguments)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """The same, the first time that it is said."""
    _once(log_dist, message, tuple(ranks) if ranks else None, level)


def warning_once(*arguments: Any, **keywords: Any) -> None:
    """A warning, the first time that it is said."""
    _once(functools.partial(logger.warning, **keywords) if keywords else logger.warning, *arguments)


def print_json_dist(message: Mapping[str, Any], ranks: Sequence[int] | None = None, path: str | Path = "") -> None:
    """Write a dict, with this rank in it, as JSON into a file, on these ranks only."""
    if _is_one_of(ranks):
        Path(path).write_text(json.dumps({**message, "rank": _rank()}))


def get_log_level_from_string(log_level_str: str) -> int:
    """The number of a level.

    Raises:
        ValueError: there is no level of this name.
    """
    if log_level_str.lower() not in log_levels:
        raise ValueError(f"{log_level_str} is not one of {', '.join(log_levels)}")
    return log_levels[log_level_str.lower()]


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Let a logger (ours by default) write what is of this level or more severe."""
    (custom_logger or logger).setLevel(get_log_level_from_string(log_level_str))


def get_current_level() -> int:
    """The level from which our logger writes."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Our logger writes what is of this level."""
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _is_one_of(ranks: Sequence[int] | None) -> bool:
    return not ranks or -1 in ranks or _rank() in ranks
