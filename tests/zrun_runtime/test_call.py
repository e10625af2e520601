"""What `initialize` takes beside a model: one config, no model parallelism, and arguments that say something else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zrun_runtime.call import (
    compare_batch_sizes,
    config_source,
    listed_parameters,
    refuse_model_parallelism,
    refuse_nothing,
    refuse_other_kinds,
)
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


def kinds(**arguments: Any) -> None:
    """`refuse_other_kinds` with good arguments but these."""
    good = {"model": nn.Linear(1, 1), "optimizer": None, "lr_scheduler": None, "training_data": None}
    refuse_other_kinds(**{**good, **arguments})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"model": nn.Linear}, "the class Linear, not a module\n  -> give an instance"),
        ({"model": nn.Linear(1, 1).state_dict()}, "of type OrderedDict, not a module"),
        ({"optimizer": "adam"}, "optimizer is of type str"),
        ({"lr_scheduler": "cosine"}, "lr_scheduler is of type str"),
        ({"training_data": 3}, "training_data is of type int"),
    ],
)
def test_an_argument_of_another_kind_is_named(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        kinds(**arguments)


def test_functions_lists_and_iterators_are_of_the_right_kind() -> None:
    kinds(optimizer=torch.optim.SGD, lr_scheduler=lambda optimizer: None, training_data=[1, 2])
    kinds(training_data=iter([1]), optimizer=torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))


def test_parameters_in_every_form_are_listed() -> None:
    model = nn.Linear(1, 1)
    assert listed_parameters(None) is None
    for given in (model.parameters(), model.named_parameters(), [{"params": model.parameters()}], [{"params": []}]):
        assert listed_parameters(given)
    assert listed_parameters(model.weight) is not None
    used_up = model.parameters()
    list(used_up)
    with pytest.raises(ConfigError, match="holds no parameter\n  -> a generator gives"):
        refuse_nothing(listed_parameters(used_up), model)
    refuse_nothing([], nn.Identity())
    for wrong in (["weight"], [{"params": ["weight"]}], [3], model.state_dict(), model.parameters, 3):
        with pytest.raises(ConfigError, match="of type"):
            listed_parameters(wrong)
    assert listed_parameters([]) == []
