from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zrun.hostlist import PatternError, expand, format_numbers, parse_numbers, split_names


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("plain", ["plain"]),
        ("", [""]),
        ("n[1-4,8]", ["n1", "n2", "n3", "n4", "n8"]),
        ("n[8,1]", ["n8", "n1"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[001-003]x", ["n001x", "n002x", "n003x"]),
        ("n[98-101]", ["n98", "n99", "n100", "n101"]),
        ("n[0-0]", ["n0"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("10.0.0.[1,3]", ["10.0.0.1", "10.0.0.3"]),
        ("n[ 1 , 2-3 ]", ["n1", "n2", "n3"]),
    ],
)
def test_expansion(pattern, names):
    assert expand(pattern) == names


@pytest.mark.parametrize(
    ("pattern", "at"),
    [
        ("n[1-2", 1),
        ("n]", 1),
        ("n1]x[2]", 2),
        ("n[]", 2),
        ("n[a]", 2),
        ("n[1,,2]", 4),
        ("n[1,x]", 4),
        ("n[3-1]", 2),
        ("n[1-016]", 2),
        ("n[1-2-3]", 2),
        ("n[-1]", 2),
        ("n[[1]]", 2),
        ("n[1-99999]", 2),
        ("n[1-200]m[1-200]", 9),
        ("n[1-" + 50 * "9" + "]", 2),
        ("n[²]", 2),
    ],
)
def test_patterns_that_cannot_be_right(pattern, at):
    with pytest.raises(PatternError) as caught:
        expand(pattern)
    assert caught.value.at == at and caught.value.message


@pytest.mark.parametrize(
    ("text", "names"),
    [("a,b", ["a", "b"]), ("a[1,2],b", ["a[1,2]", "b"]), ("a[1,2]b[3,4],c[5]", ["a[1,2]b[3,4]", "c[5]"]), ("a", ["a"])],
)
def test_lists_split_outside_of_brackets(text, names):
    assert split_names(text) == names


NUMBERS = st.lists(st.integers(0, 300), min_size=1, unique=True).map(sorted)


@given(NUMBERS)
def test_numbers_survive_being_written(numbers):
    assert parse_numbers(format_numbers(numbers)) == numbers


@given(NUMBERS, st.integers(3, 6), st.from_regex(r"[a-z-]{0,5}", fullmatch=True))
def test_a_list_of_padded_numbers_is_its_names(numbers, width, stem):
    padded = [str(n).zfill(width) for n in numbers]
    assert expand(f"{stem}[{','.join(padded)}]") == [stem + text for text in padded]
    low, high = padded[0], padded[-1]
    assert expand(f"{stem}[{low}-{high}]") == [stem + str(n).zfill(width) for n in range(numbers[0], numbers[-1] + 1)]


@given(st.text(alphabet="ab[]-,019. ", max_size=20))
def test_any_text_is_names_or_an_error_with_its_place(text):
    try:
        names = expand(text)
    except PatternError as error:
        assert 0 <= error.at <= len(text)
    else:
        assert names and not any("[" in name or "]" in name for name in names)
