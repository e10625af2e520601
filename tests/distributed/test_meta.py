"""Parameters without values are refused by name where they would have to have some."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import zrun_runtime

from .worlds import World

pytestmark = pytest.mark.slow


def start_without_values(rank: int, world: int) -> str:
    """What `initialize` says to a model on the meta device."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    with pytest.raises(zrun_runtime.ParameterError) as refused:
        zrun_runtime.initialize(model=model, config={"optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    return str(refused.value)


def test_parameters_on_the_meta_device_are_named(world: Callable[..., World]) -> None:
    (said,) = world(1).run(start_without_values)
    assert "3 parameters are on the meta device" in said and "0.weight" in said and "to_empty" in said
