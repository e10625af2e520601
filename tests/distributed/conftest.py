"""The worlds of ranks that all tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from .worlds import World


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[..., World]]:
    """`world(size)` is the world of that many ranks, the same one all session long; `world(1)` is a plain process
    without any launcher's environment, `world(1, launched=True)` one with it.
    """
    worlds: dict[tuple[int, bool], World] = {}

    def get(size: int, launched: bool = False) -> World:
        key = size, launched or size > 1
        return worlds.setdefault(key, World(size, launched=key[1]))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the reference then adds in the same order as a rank
    yield get
    torch.set_num_threads(threads)
    for one in worlds.values():
        one.close()
