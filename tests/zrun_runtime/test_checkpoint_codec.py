"""What a client may store comes back as it was; what it may not is named; nothing in JSON makes code run."""

from __future__ import annotations

import argparse
import enum
import json
import math
import types
from collections import OrderedDict, deque, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zrun_runtime.checkpoint.codec import decode, encode
from zrun_runtime.checkpoint.errors import CheckpointError


def round_trip(value):
    tensors = {}
    text = json.dumps(encode(value, "state", tensors), allow_nan=False)
    return decode(json.loads(text), lambda name: tensors[name].clone())


KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.tuples(st.integers(), st.text()))
PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()),
    lambda inner: st.one_of(
        *(st.lists(inner), st.tuples(inner, inner), st.dictionaries(KEYS, inner)),
        *(st.sets(st.integers()), st.complex_numbers(allow_nan=False)),
    ),
    max_leaves=15,
)  # fmt: skip


@given(PLAIN)
def test_plain_data_comes_back(value):
    found = round_trip(value)
    assert found == value
    assert type(found) is type(value)


class Colour(enum.IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (OrderedDict(b=1, a=2), OrderedDict(b=1, a=2)),
        (deque([1, 2]), deque([1, 2])),
        (frozenset({1}), frozenset({1})),
        (torch.Size([2, 3]), torch.Size([2, 3])),
        (torch.bfloat16, torch.bfloat16),
        (torch.device("cpu"), torch.device("cpu")),
        (Path("/a/b"), Path("/a/b")),
        (argparse.Namespace(lr=0.1, name="x"), argparse.Namespace(lr=0.1, name="x")),
        (types.SimpleNamespace(a=[1]), types.SimpleNamespace(a=[1])),
        (Colour.RED, 1),
        (Point(1, 2), (1, 2)),
        ({"$": "os.system", "v": "x"}, {"$": "os.system", "v": "x"}),
        (-math.inf, -math.inf),
        (np.float32(0.5), np.float32(0.5)),
        (np.float64(0.5), 0.5),
    ],
)
def test_other_kinds_come_back_or_as_their_plain_kind(value, wanted):
    found = round_trip(value)
    assert found == wanted and type(found) is type(wanted)


def test_numbers_that_are_not_numbers():
    assert math.isnan(round_trip([math.nan])[0])
    assert math.isnan(round_trip(torch.tensor(math.nan)).item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_tensors_keep_dtype_shape_and_bits(dtype, shape):
    value = torch.randn(shape).to(dtype)
    found = round_trip({"a": [value]})["a"][0]
    assert found.dtype is dtype and found.shape == value.shape and torch.equal(found, value)


def test_arrays_and_random_states_come_back():
    array = np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::-1]
    assert np.array_equal(round_trip(array), array) and round_trip(array).dtype == array.dtype
    state = np.random.RandomState(3).get_state()
    assert np.array_equal(round_trip(state)[1], state[1])


@pytest.mark.parametrize(
    "value",
    [print, object(), np.array(["a"]), torch.zeros(2).to_sparse(), torch.empty(2, device="meta"), iter([]), type],
)
def test_what_cannot_be_stored_is_named(value):
    with pytest.raises(CheckpointError, match=r"state\['a'\]\[1\]"):
        encode({"a": [0, value]}, "state", {})


@pytest.mark.parametrize(
    "text",
    [
        {"$": "os.system", "v": "true"},
        {"$": "dtype", "v": "load"},
        {"$": "namespace", "kind": "builtins", "v": {}},
        {"$": "tensor"},
        {"$": ["tuple"], "v": []},
        {"$": "dict", "v": [1]},
        {"$": "device", "v": "nothing"},
        {"$": "dict", "v": [[{"$": "dict", "v": []}, 1]]},
    ],
)
def test_crafted_json_is_refused(text):
    with pytest.raises(CheckpointError, match="no known kind"):
        decode(text, lambda name: torch.zeros(1))
