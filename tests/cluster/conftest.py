"""One lab for all tests of many hosts: a desk and two nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import lab as labs

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of them start real processes."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def whole_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[labs.Lab]:
    lacking = labs.missing()
    if lacking:
        if os.environ.get("CI"):
            pytest.fail(f"the tests of many hosts are part of CI: {lacking}")
        pytest.skip(lacking)
    lab = labs.Lab(tmp_path_factory.mktemp("lab"), 2)
    try:
        lab.build()
        yield lab
    finally:
        lab.remove()


@pytest.fixture
def lab(whole_lab: labs.Lab) -> Iterator[labs.Lab]:
    """The lab as it was built, whatever the test before did to it."""
    yield whole_lab
    whole_lab.restore()
