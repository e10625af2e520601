"""zrun config check | explain | schema."""

import json

import pytest
from click.testing import CliRunner

from zrun_runtime.commands.config import config


def run(*arguments):
    return CliRunner().invoke(config, [str(argument) for argument in arguments])


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "good.json"
    path.write_text(
        json.dumps(
            {
                "train_batch_size": 64,
                "my_key": 1,
                "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": 3, "reduce_scatter": True, "stage3_max_live_parameters": 1e9},
            }
        )
    )
    return path


@pytest.fixture
def bad(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text('{"zero_optimization": {"stage": 4, "overlap_com": true}}')
    return path


def test_check_accepts(good):
    done = run("check", good, "--world_size", 8)
    assert done.exit_code == 0
    assert f"{good}: accepted: ZeRO stage 3, bf16, AdamW; batch 64 = 8 x 1 accumulated x 8 rank(s)" in done.output
    assert "warning: my_key: not a key of this config" in done.output


def test_check_refuses_and_shows_every_problem(good, bad, tmp_path):
    done = run("check", good, bad, tmp_path / "none.json")
    assert done.exit_code == 2
    assert f"{good}: accepted" in done.output
    assert "  line 1: zero_optimization.stage: must be 0, 1, 2 or 3, not 4\n" in done.output
    assert "did you mean overlap_comm?" in done.output
    assert "no such config file" in done.output
    assert "Traceback" not in done.output


def test_strict_refuses_foreign_keys(good):
    assert run("check", "--strict", good).exit_code == 2


def test_check_as_json(good, bad):
    done = run("check", "--json", good, bad)
    first, second = json.loads(done.output)
    assert done.exit_code == 2
    assert (first["file"], first["accepted"], first["problems"]) == (str(good), True, [])
    assert {k: v for k, v in first["notes"][0].items() if k != "text"} == {
        "path": "my_key",
        "kind": "unknown",
        "value": 1,
    }
    assert [problem["path"] for problem in second["problems"]] == [
        "zero_optimization.overlap_com",
        "zero_optimization.stage",
    ]


def test_many_foreign_keys_are_one_line(tmp_path):
    path = tmp_path / "megatron.json"
    path.write_text('{"num-layers": 2, "hidden-size": 8, "max_grad_norm": 1}')
    lines = run("check", path).output.splitlines()[1:]
    assert lines == [
        "  warning: max_grad_norm: not a key of this config, not read; clipping is gradient_clipping",
        "  warning: not keys of this config, not read: num-layers, hidden-size",
    ]


def test_a_syntax_error_has_its_place_and_advice(tmp_path):
    path = tmp_path / "template.json"
    path.write_text('{\n  "train_batch_size": BATCH\n}')
    done = run("check", path)
    assert f"{path}:2:23: not JSON" in done.output
    assert "-> BATCH looks like a placeholder" in done.output


def test_explain_shows_every_key(good):
    done = run("explain", good)
    assert done.exit_code == 0
    lines = done.output.splitlines()
    for key in ("zero_optimization.stage", "zero_optimization.reduce_scatter", "my_key", "gradient_clipping"):
        assert any(line.split()[:1] == [key] for line in lines)
    titles = ["Honoured", "Not given, so taken", "Accepted, no effect here", "Not known, not read"]
    assert [line.strip() for line in lines if line.strip() in titles] == titles


def test_explain_of_a_refused_file(bad):
    done = run("explain", bad)
    assert done.exit_code == 2
    assert "overlap_com" in done.output


def test_the_schema_is_one_of_json():
    done = run("schema")
    schema = json.loads(done.output)
    zero = schema["$defs"]["ZeroConfig"]["properties"]
    assert {"minimum": 0, "type": "integer"} in zero["stage3_prefetch_bucket_size"]["anyOf"]
    assert {"const": "auto"} in zero["stage3_prefetch_bucket_size"]["anyOf"]
    assert zero["stage3_prefetch_bucket_size"]["default"] == 50_000_000
    assert schema["properties"]["zero_optimization"]["$ref"] == "#/$defs/ZeroConfig"
    assert schema["properties"]["gradient_clipping"]["x-effect"] == "honoured"
    assert schema["additionalProperties"] is False, "an editor marks a misspelt key"
    assert schema["$defs"]["ZeroConfig"]["additionalProperties"] is False
    assert "additionalProperties" not in schema["$defs"]["ElasticityConfig"], "a section of which little is read"
