"""The page of bug reports cannot rot: every test that it names exists, and every report has one."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
ROW = re.compile(r"^\| (?P<report>[^|]+#\d[^|]*) \| [^|]+ \| [^|]+ \| (?P<tests>[^|]+) \|$", re.MULTILINE)
TEST = re.compile(r"`(?P<file>[\w/]+\.py)::(?P<name>test_\w+)(?:\[(?P<scenario>\w+)\])?`")


def wrong(page: str) -> list[str]:
    """What a page names that is not there, and rows without a test."""
    found = []
    rows = list(ROW.finditer(page))
    for line in page.splitlines():
        if line.startswith("| ") and "#" in line and not ROW.match(line):
            found.append(f"not a row: {line}")
    for row in rows:
        tests = list(TEST.finditer(row["tests"]))
        if len(tests) != row["tests"].count("`") // 2 or not tests:
            found.append(f"{row['report']}: {row['tests']}")
        found += [test[0] for test in tests if test["name"] not in existing(test["file"])]
        found += [test[0] for test in tests if test["scenario"] and test["scenario"] not in scenarios()]
    return found


@cache
def existing(file: str) -> set[str]:
    path = TESTS / file
    tree = ast.parse(path.read_text("utf-8")) if path.is_file() else ast.Module([], [])
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@cache
def scenarios() -> set[str]:
    """The names of parity scenarios."""
    texts = (path.read_text("utf-8") for path in (TESTS / "distributed").glob("*.py"))
    return {name for text in texts for name in re.findall(r'^    name = "(\w+)"', text, re.MULTILINE)}


def test_every_report_has_a_test_and_every_test_exists() -> None:
    page = (TESTS / "BUG_REPORTS.md").read_text("utf-8")
    assert len(ROW.findall(page)) > 80
    assert not wrong(page)


def test_what_does_not_exist_is_caught() -> None:
    row = "| a/b#1 | x | y | {} |"
    here = "`test_bug_reports.py::test_what_does_not_exist_is_caught`"
    assert not wrong(row.format(here))
    for tests in (
        "none",
        "`test_bug_reports.py::test_gone`",
        "`gone.py::test_x`",
        f"{here[:-1]}[gone]`",
        f"{here} `x`",
    ):
        assert wrong(row.format(tests)), tests
    assert wrong("| a/b#1 | x | y |")
