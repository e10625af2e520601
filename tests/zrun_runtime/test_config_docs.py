"""docs/config.md is current, and `zrun config upgrade` writes today's spelling."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from zrun_runtime.commands.config import config
from zrun_runtime.config import load_config
from zrun_runtime.config.tables import key_tables

PAGE = Path(__file__).resolve().parents[2] / "docs" / "config.md"
OLD = {
    "bfloat16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "cpu_offload": True, "prefetch_bucket_size": "5e7"},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "max_grad_norm": 0.5}},
    "mine": 1,
}
NEW = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "stage3_prefetch_bucket_size": "5e7",
    },
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    "gradient_clipping": 0.5,
    "mine": 1,
}


def run(*arguments):
    return CliRunner().invoke(config, [str(argument) for argument in arguments])


def test_the_page_has_the_tables_of_today():
    written = PAGE.read_text().partition("<!-- tables -->\n")[2]
    assert written == key_tables(), "replace what follows the marker by what `zrun config schema --markdown` prints"
    assert run("schema", "--markdown").output == key_tables()


def test_upgrade_prints_and_tells(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps(OLD)[:-1] + ", // a comment\n}")
    before, done = path.read_text(), run("upgrade", path)
    assert done.exit_code == 0
    assert json.loads(done.stdout) == NEW
    assert "bfloat16: is now bf16" in done.stderr and "cpu_offload: is now" in done.stderr
    assert path.read_text() == before


def test_upgrade_writes_the_file_and_then_has_nothing_to_do(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps(OLD))
    assert run("upgrade", "--write", path).exit_code == 0
    assert json.loads(path.read_text()) == NEW
    assert [item.name for item in tmp_path.iterdir()] == ["old.json"]
    again = run("upgrade", path)
    assert again.stderr == "" and json.loads(again.stdout) == NEW
    assert load_config(NEW).gradient_clipping == load_config(OLD).gradient_clipping


def test_a_file_that_cannot_be_replaced_stays(tmp_path, monkeypatch):
    path = tmp_path / "old.json"
    path.write_text(json.dumps(OLD))

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    done = run("upgrade", "--write", path)
    assert done.exit_code == 2 and "No space left on device; it is as it was" in done.stderr
    assert json.loads(path.read_text()) == OLD and [item.name for item in tmp_path.iterdir()] == ["old.json"]


def test_an_accelerate_file_becomes_a_config(tmp_path):
    path = tmp_path / "accelerate.yaml"
    path.write_text("distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n  zero_stage: 2\n")
    done = run("upgrade", path)
    assert json.loads(done.stdout) == {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}


@pytest.mark.parametrize(
    "text", ('{"bf16": {"enabled": true}, "bfloat16": {"enabled": false}}', '{"a": 1, "a": 2}', "no config")
)
def test_what_contradicts_itself_or_cannot_be_read_is_refused(text, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(text)
    done = run("upgrade", "--write", path)
    assert done.exit_code == 2 and done.stderr and "Traceback" not in done.output
    assert path.read_text() == text
