"""Which parameters stay fp32 by the names of their modules."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from zrun_runtime.casting import kept_in_fp32
from zrun_runtime.config import load_config
from zrun_runtime.errors import ConfigError


class Tied(nn.Module):
    """Its head is its table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        self.head.weight = self.table.weight
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 3)) for _ in range(2))


def kept(names: Any, precision: str = "bf16") -> set[str]:
    model = Tied()
    config = load_config({precision: {"enabled": True}, "data_types": {"keep_in_fp32_modules": names}})
    ids = kept_in_fp32(model, config)
    return {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in ids}


NORMS = {f"blocks.{block}.0.{name}" for block in (0, 1) for name in ("weight", "bias")}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("head", {"head.weight", "table.weight"}),
        (["blocks.*.0"], NORMS),
        (["blocks.1.0", "blocks.0.0"], NORMS),
        ([], set()),
        ("auto", set()),
    ],
)
def test_names(names: Any, expected: set[str]) -> None:
    assert kept(names) == expected


def test_a_name_is_a_whole_part_of_a_path() -> None:
    with pytest.raises(ConfigError, match=r"no module block\b(?!s)"):
        kept("block")


def test_fp32_keeps_everything_anyway() -> None:
    config = load_config({"data_types": {"keep_in_fp32_modules": "nothing"}})
    assert kept_in_fp32(Tied(), config) == set()
