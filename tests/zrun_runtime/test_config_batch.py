"""The batch trio, against the table of the field, and its messages."""

import itertools

import pytest

from zrun_runtime.config import AutoHints, InvalidConfig, load_config, short_report
from zrun_runtime.distributed import first_world_size

B, M, G = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def sizes(source, world_size=None, **hints):
    config = load_config(source, auto=AutoHints(world_size=world_size, **hints))
    return config.train_batch_size, config.micro_batch_size, config.accumulation_steps


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({B: 64, M: 4, G: 4}, (64, 4, 4)),
        ({B: 64, M: 4}, (64, 4, 4)),
        ({B: 64, G: 2}, (64, 8, 2)),
        ({M: 4, G: 2}, (32, 4, 2)),
        ({B: 64}, (64, 16, 1)),
        ({M: 4}, (16, 4, 1)),
        ({G: 2}, (8, 1, 2)),
        ({}, (4, 1, 1)),
    ],
)
def test_what_is_not_given_follows(given, expected):
    assert sizes(given, 4) == expected
    assert sizes({B: "auto", M: "auto", G: "auto", **given}, 4) == expected
    assert sizes({B: None, M: None, G: None, **given}, 4) == expected


@pytest.mark.parametrize(("world", "micro", "steps"), list(itertools.product([1, 2, 7], [1, 3], [1, 5])))
def test_any_two_give_the_third(world, micro, steps):
    total = world * micro * steps
    trio = {B: total, M: micro, G: steps}
    for left_out in trio:
        given = {key: value for key, value in trio.items() if key != left_out}
        assert sizes(given, world) == (total, micro, steps)


@pytest.mark.parametrize(
    ("given", "world", "parts"),
    [
        ({B: 64, M: 4, G: 3}, 4, ["64", "4 * 3 * 4 is 48", f"set {B} to 48"]),
        ({B: 10, M: 3}, 2, [f"{B} 10", f"{M} 3", "world size 2", "multiple of 6", "such as 12"]),
        ({B: 10, G: 3}, 2, ["multiple of 6"]),
        ({B: 6}, 4, ["multiple of 4"]),
        ({B: 2}, 4, ["multiple of 4", "such as 4"]),
    ],
)
def test_sizes_that_do_not_agree(given, world, parts):
    with pytest.raises(InvalidConfig) as caught:
        load_config(given, world_size=world)
    for part in parts:
        assert part in str(caught.value)


def test_without_a_world_size_the_one_that_fits_is_taken():
    assert load_config({B: 20000, M: 20, G: 100}).world_size == 10
    with pytest.raises(InvalidConfig):
        load_config({B: 20001, M: 20, G: 100})


def test_what_the_program_knows_is_used_where_nothing_is_given():
    assert sizes({}, micro_batch=8, world_size=2) == (16, 8, 1)
    assert load_config({G: 2}, auto=AutoHints(micro_batch=8, world_size=4)).train_batch_size == 64
    assert sizes({M: 2}, micro_batch=8) == (2, 2, 1)


def test_every_assumed_size_is_told():
    told = {note.path: note for note in load_config({M: 4, G: 2}, world_size=4).notes}
    assert (told[B].kind, told[B].value) == ("assumed", 32)
    assert told[M].kind == "honoured"
    assert "one sample" in {note.path: note for note in load_config({}).notes}[M].text


# ---- fewer ranks than at first -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "first", "world", "expected"),
    [
        ({B: 64, M: 4, G: 2}, 8, 4, (64, 4, 4)),
        ({B: 64, M: 4, G: 2}, 8, 1, (64, 4, 16)),
        ({B: 64, M: 4}, 8, 4, (64, 4, 4)),
        ({B: 64, G: 2}, 8, 4, (64, 4, 4)),  # not a larger micro-batch: it may not fit in memory
        ({B: 64}, 8, 4, (64, 8, 2)),
        ({M: 4, G: 2}, 8, 4, (64, 4, 4)),
        ({M: 4}, 8, 2, (32, 4, 4)),
        ({B: 12, G: 1}, 4, 3, (12, 4, 1)),  # what the config asks for fits as it is
        ({B: 32, M: 4, G: 2}, 8, 4, (32, 4, 2)),  # so does this, and at first it did not
        ({}, 8, 4, (4, 1, 1)),
        ({M: 4, G: 2}, 4, 8, (64, 4, 2)),  # more ranks
        ({M: 4, G: 2}, 8, 8, (64, 4, 2)),
    ],
)
def test_with_fewer_ranks_a_step_sees_as_many_samples(given, first, world, expected):
    assert sizes(given, world, first_world_size=first) == expected


def test_a_size_that_was_given_and_does_not_hold_is_told():
    config = load_config({B: 64, M: 4, G: 2}, auto=AutoHints(world_size=4, first_world_size=8))
    told = next(line for line in short_report(config) if line.startswith(G))
    assert told == f"{G}: 4 keeps {B} 64 at world size 4; 2 as the job was first started, with world size 8"
    assert [note.kind for note in config.notes if note.path == B] == ["honoured"]


@pytest.mark.parametrize("given", [{B: 48, M: 4, G: 2}, {B: 48, M: 4}, {B: 48, G: 2}, {M: 4, G: 2}])
def test_where_accumulation_cannot_keep_it_the_world_sizes_that_can_are_named(given):
    with pytest.raises(InvalidConfig) as caught:
        load_config(given, auto=AutoHints(world_size=5, first_world_size=6))
    for part in (f"{B} 48", f"{M} 4", "world size 6", "at world size 5", "world sizes that do: 1, 2, 3, 4, 6;"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("restarts", "said", "expected"), [("1", "8", 8), ("0", "8", None), (None, "8", None), ("1", None, None)]
)
def test_only_a_restart_has_a_past(monkeypatch, restarts, said, expected):
    for name, value in (("ZRUN_RESTART_COUNT", restarts), ("ZRUN_FIRST_WORLD_SIZE", said)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert first_world_size() == expected


def test_sizes_that_never_agreed_are_refused_as_ever():
    with pytest.raises(InvalidConfig, match="4 \\* 3 \\* 4 is 48"):
        load_config({B: 64, M: 4, G: 3}, auto=AutoHints(world_size=4, first_world_size=8))
