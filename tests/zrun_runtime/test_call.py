"""What `initialize` takes beside a model: one config, no model parallelism, and arguments that say something else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zrun_runtime.call import compare_batch_sizes, config_source, refuse_model_parallelism
from zrun_runtime.config import load_config
from zrun_runtime.errors import ConfigError


def test_one_config_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    named = SimpleNamespace(deepspeed_config="ds.json")
    assert config_source(named, None) == "ds.json"
    assert config_source(None, "ds.json") == config_source(SimpleNamespace(deepspeed_config=None), "ds.json")
    assert config_source(named, tmp_path / "ds.json") == tmp_path / "ds.json", "the same file twice is one config"
    for other in ("other.json", {"train_batch_size": 8}):
        with pytest.raises(ConfigError, match="both"):
            config_source(named, other)
    with pytest.raises(ConfigError, match="no config"):
        config_source(SimpleNamespace(), None)


def unit(**sizes: int) -> Any:
    """An mpu: a method for each size."""
    return SimpleNamespace(**{f"get_{name}_world_size": lambda size=size: size for name, size in sizes.items()})


def test_an_mpu_by_which_every_rank_has_the_whole_model_is_taken() -> None:
    refuse_model_parallelism(None, None, 4)
    refuse_model_parallelism(unit(model_parallel=1, data_parallel=4), (4, 1), 4)
    refuse_model_parallelism(unit(tensor_model_parallel=1, pipeline_model_parallel=1), (4,), 4)


@pytest.mark.parametrize("kind", ["model_parallel", "tensor_model_parallel", "pipe_parallel", "sequence_parallel"])
def test_model_parallelism_is_refused_by_its_kind_and_size(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"{kind.split('_')[0]}.* parallel size of 2.*"):
        refuse_model_parallelism(unit(**{kind: 2}), None, 4)


def test_a_mesh_or_ranks_that_do_not_all_train_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 data-parallel ranks of 4"):
        refuse_model_parallelism(unit(data_parallel=2), None, 4)
    with pytest.raises(ConfigError, match="sequence parallelism"):
        refuse_model_parallelism(None, (2, 2), 4)


def test_other_batch_sizes_of_the_program_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config({"train_micro_batch_size_per_gpu": 2})
    compare_batch_sizes(SimpleNamespace(gradient_accumulation_steps=1, train_batch_size="auto"), config)
    assert not capsys.readouterr().err
    compare_batch_sizes(SimpleNamespace(gradient_accumulation_steps=4), config)
    assert "args.gradient_accumulation_steps is 4, but the config makes it 1" in capsys.readouterr().err
