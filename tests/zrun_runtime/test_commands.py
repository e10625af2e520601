"""What all commands that need torch have in common for a person who types them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from zrun_runtime.commands.checkpoint import checkpoint
from zrun_runtime.commands.config import config
from zrun_runtime.commands.plan import plan

ROOTS = {"plan": plan, "config": config, "checkpoint": checkpoint}


def leaves(command: click.Command) -> Iterator[tuple[list[str], click.Command]]:
    """Every command that does something, with the words that lead to it."""
    if isinstance(command, click.Group):
        yield from (([name], one) for name, one in command.commands.items())
    else:
        yield [], command


@pytest.mark.parametrize("name", ROOTS)
def test_help_has_examples_and_options_are_read_with_either_stroke(name):
    text = CliRunner().invoke(ROOTS[name], ["-h"]).output
    assert f"zrun {name} " in text.partition("Examples:")[2] and "Exit code:" in text
    for words, command in leaves(ROOTS[name]):
        for option in command.params:
            if isinstance(option, click.Option):
                value = [] if option.is_flag else ["1"]
                dashed = option.opts[0].replace("_", "-")
                done = CliRunner().invoke(ROOTS[name], [*words, dashed, *value, "-h"])
                assert done.exit_code == 0 and done.output.startswith("Usage:"), (words, dashed, done.output)


@pytest.mark.parametrize("number", ["1e400", "1e30", "9" * 400, "0", "-1", "x", "nan", "inf"])
@pytest.mark.parametrize("option", ["--params", "--gpu_memory", "--network"])
def test_numbers_that_cannot_be_meant(option, number):
    rest = [] if option == "--params" else ["--params", "7b"]
    done = CliRunner().invoke(plan, [option, number, *rest])
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit)
    assert option in done.output and "write it as" in done.output


@pytest.mark.parametrize("words", ["inspect {}", "verify {}", "export {} out", "diff {} {}", "import {} out"])
def test_a_path_that_holds_no_checkpoint(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for path, said in (("nosuch", "no"), ("file", ""), (".", "no")):
        done = CliRunner().invoke(checkpoint, words.replace("{}", path).split())
        assert done.exit_code == 2 and isinstance(done.exception, SystemExit), done.output
        assert done.output.startswith("zrun: error: ") and said in done.output
    assert "a file, not a directory" in CliRunner().invoke(checkpoint, ["inspect", "file"]).output


def test_a_model_config_that_cannot_be_read(tmp_path):
    for text, said in (
        (b"", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"{}", "model_type"),
    ):
        (tmp_path / "config.json").write_bytes(text)
        done = CliRunner().invoke(plan, ["--hf_config", str(tmp_path)])
        assert done.exit_code == 2 and said in done.output
    (tmp_path / "config.json").unlink()
    done = CliRunner().invoke(plan, ["--hf_config", str(tmp_path)])
    assert f"{tmp_path}/config.json: No such file or directory" in done.output and "[Errno" not in done.output
    assert json.loads(CliRunner().invoke(plan, ["--params", "7b", "--num-gpus", "8", "--json"]).output)
