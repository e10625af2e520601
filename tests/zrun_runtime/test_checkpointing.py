"""The settings of activation checkpointing, and what it keeps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from zrun_runtime import checkpointing
from zrun_runtime.errors import ConfigError


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    checkpointing.configure(checkpoint_in_cpu=False)


def calls_and_moves(settings: dict[str, bool]) -> tuple[int, int]:
    """(calls of the function in forward and backward, tensors packed away by save_on_cpu)."""
    checkpointing.configure(None, **settings)
    calls: list[int] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.sin().exp()

    x = torch.ones(3, requires_grad=True)
    y = checkpointing.checkpoint(function, x)
    y.sum().backward()
    wanted = torch.autograd.functional.jacobian(lambda v: v.sin().exp().sum(), torch.ones(3))
    torch.testing.assert_close(x.grad, wanted)
    return len(calls), int(checkpointing._settings.on_cpu)


def test_the_function_is_called_again_in_the_backward() -> None:
    assert calls_and_moves({"partition_activations": True, "profile": False}) == (2, 0)
    assert calls_and_moves({"checkpoint_in_cpu": True}) == (2, 1)
    assert checkpointing.is_configured()


def test_a_config_says_it_and_arguments_go_first() -> None:
    config = {"activation_checkpointing": {"cpu_checkpointing": True, "number_checkpoints": 4}}
    checkpointing.configure(deepspeed_config=config)
    assert checkpointing._settings.on_cpu
    checkpointing.configure(deepspeed_config=config, checkpoint_in_cpu=False)
    assert not checkpointing._settings.on_cpu


def test_model_parallelism_is_refused() -> None:
    class Mpu:
        @staticmethod
        def get_model_parallel_world_size() -> int:
            return 2

    with pytest.raises(ConfigError, match="model parallel size of 2"):
        checkpointing.configure(Mpu())
