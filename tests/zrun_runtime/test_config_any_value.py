"""Any JSON value at any key: an answer with the key and, in a file, its line; never another error."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from zrun_runtime.config import AutoHints, InvalidConfig, load_config, short_report, summary
from zrun_runtime.config.accelerate import _NOT_READ, _PLACES
from zrun_runtime.config.json_schema import json_schema
from zrun_runtime.config.keys import Section, field_names, section_of
from zrun_runtime.config.optimizers import OPTIMIZERS
from zrun_runtime.config.schedulers import SCHEDULERS, TORCH_SCHEDULERS
from zrun_runtime.config.schema import Document
from zrun_runtime.config.upgrade import upgrade
from zrun_runtime.errors import ConfigError


def _paths(kind: type[Section], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in field_names(kind).items():
        yield (*path, name)
        inner = section_of(field)
        if inner is not None:
            yield from _paths(inner, (*path, name))


TYPES = {**OPTIMIZERS, **SCHEDULERS, **TORCH_SCHEDULERS}
ARGUMENTS = sorted({name for known in TYPES.values() for name in known})
KEYS = [
    *_paths(Document),
    *((section, "params", name) for section in ("optimizer", "scheduler") for name in ARGUMENTS),
    ("optimizer", "params", "max_grad_norm"),
    ("bfloat16",),
    ("bfloat16", "enabled"),
    ("fp32_allreduce",),
    ("allgather_size",),
    *(("zero_optimization", name) for name in ("cpu_offload", "cpu_offload_param", "prefetch_bucket_size")),
    ("compression_training", "weight_quantization", "shared_parameters", "enabled"),
]
ACCELERATE = [
    ("distributed_type",),
    ("mixed_precision",),
    ("deepspeed_config",),
    *(("deepspeed_config", name) for name in (*_PLACES, *_NOT_READ)),
    *(("deepspeed_config", *path) for path in (("gradient_clipping",), ("zero_optimization",), ("fp16", "enabled"))),
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 20),
    st.integers(),
    st.floats(allow_nan=False),
    st.sampled_from(["auto", "cpu", "nvme", "none", "fp16", "bf16", "5e8", "inf", "nan", "1e400", "1_000", "", " "]),
    st.text(max_size=6),
    st.sampled_from(list(TYPES)),
)
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=3), max_leaves=6
)
BASE = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10}},
}


def _put(data: Any, path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        data = data.setdefault(name, {})
        if not isinstance(data, dict):
            return
    data[path[-1]] = value


def _answer(source: Any, **options: Any) -> None:
    """Read it, and everything that is told of it; or have every problem with its key, and its line in a file."""
    try:
        config = load_config(source, **options)
    except InvalidConfig as error:
        assert error.problems and all(problem.path and problem.text for problem in error.problems)
        if isinstance(source, Path):
            written = any(problem.line is not None for problem in error.problems)
            assert written, f"no line: {error}"
        return
    except ConfigError as error:
        assert str(error)
        return
    assert summary(config) and short_report(config) is not None
    assert config.train_batch_size == config.micro_batch_size * config.accumulation_steps * config.world_size
    json.dumps([note.text for note in config.notes])


MANY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@MANY
@given(st.lists(st.tuples(st.sampled_from(KEYS), VALUES), min_size=1, max_size=4))
def test_any_value_at_any_key(choices: list[tuple[tuple[str, ...], Any]]) -> None:
    data: dict[str, Any] = json.loads(json.dumps(BASE))
    for path, value in choices:
        _put(data, path, value)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ds.json"
        file.write_text(json.dumps(data, indent=1))
        _answer(file)
        _answer(data, world_size=2, strict=True, auto=AutoHints(hidden_size=8, device="cpu"))
        _answer(data, world_size=3, defer=True, auto=AutoHints(device="cuda", first_world_size=4, learning_rate=0.1))
        try:
            upgrade(file)
        except ConfigError:
            pass


@MANY
@given(st.lists(st.tuples(st.sampled_from(ACCELERATE), VALUES), min_size=1, max_size=4))
@example([(("mixed_precision",), []), (("deepspeed_config",), {"": None})])
def test_any_value_in_an_accelerate_file(choices: list[tuple[tuple[str, ...], Any]]) -> None:
    data: dict[str, Any] = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}}
    for path, value in choices:
        _put(data, path, value)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "accelerate.yaml"
        file.write_text(yaml.safe_dump(data))
        _answer(file)


@MANY
@given(st.text(alphabet='{}[],:"#/* \n0e-.tfna\\', max_size=60))
@example('{"a": {"b": [1, {"c": "}"}], "d": 1}, "e": 2,}')
def test_any_text_as_json(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ds.json"
        file.write_text(text)
        try:
            load_config(file)
        except ConfigError as error:
            assert str(error)


@MANY
@given(st.text(alphabet="{}[],:&*!-?|>'\"# \nab0<~", max_size=40))
def test_any_text_as_yaml(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ds.yaml"
        file.write_text(text)
        try:
            load_config(file)
        except ConfigError as error:
            assert str(error)


def test_the_lines_of_a_file(tmp_path: Path) -> None:
    text = """{ // a comment, "stage": 1
  "[": 1, "[2]": 1,
  "bfloat16": {"enabled": "x"},
  "zero_optimization": {"reduce_scatter": true,
    "prefetch_bucket_size": 1.5,
    "stage": [{"stage": 1},
              2]},
  "optimizer": {"type": "Adam",
                "params": {"betas": [1, "a"], "eps": 1e-8,
                           "lr": "fast"}},
  "scheduler": {"type": "WarmupDecayLR"}
}"""
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(InvalidConfig) as caught:
        load_config(file)
    assert {problem.path: problem.line for problem in caught.value.problems} == {
        "bf16.enabled": 3,
        "zero_optimization.stage3_prefetch_bucket_size": 5,
        "zero_optimization.stage": 6,
        "optimizer.params.betas": 9,
        "optimizer.params.lr": 10,
        "scheduler.params.total_num_steps": 11,
    }
    assert "\n  line 10: optimizer.params.lr: must be a number" in str(caught.value)
    file = tmp_path / "ds.yaml"
    file.write_text("distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 9\n  fp16: {enabled: maybe}\n")
    with pytest.raises(InvalidConfig) as caught:
        load_config(file)
    assert {problem.path: problem.line for problem in caught.value.problems} == {
        "zero_optimization.stage": 3,
        "fp16.enabled": 4,
    }


def test_the_json_schema_knows_every_key() -> None:
    text = json.dumps(json_schema())
    assert all(f'"{path[-1]}"' in text for path in _paths(Document))
