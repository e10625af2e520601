"""Where a config may come from, and what is said of one that cannot be read."""

import base64
import json

import pytest

from zrun_runtime.config import load_config
from zrun_runtime.errors import ConfigError


def write(folder, text, name="ds.json", encoding="utf-8"):
    path = folder / name
    path.write_bytes(text.encode(encoding))
    return path


def refusal(source):
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    return str(caught.value)


def test_a_dict_is_read_and_never_changed():
    given = {"train_batch_size": "8", "bfloat16": {"enabled": True}, "zero_optimization": {"cpu_offload": True}}
    before = json.loads(json.dumps(given))
    config = load_config(given)
    assert config.train_batch_size == 8
    assert given == before == config.raw


def test_a_path_as_text_or_path(tmp_path):
    path = write(tmp_path, '{"train_batch_size": 8}')
    assert load_config(path).train_batch_size == load_config(str(path)).train_batch_size == 8


def test_base64_as_deepspeed_passes_it():
    text = base64.urlsafe_b64encode(json.dumps({"train_batch_size": 8, "note": ">>>???"}).encode()).decode()
    assert load_config(text).train_batch_size == 8


def test_yaml(tmp_path):
    text = "train_batch_size: 8\nzero_optimization:\n  stage: 2\n  reduce_bucket_size: 5e8\nsteps_per_print: .inf\n"
    config = load_config(write(tmp_path, text, "ds.yaml"))
    assert (config.train_batch_size, config.zero.stage, config.zero.reduce_bucket_size) == (8, 2, 500_000_000)
    assert config.steps_per_print is None


def test_comments_and_trailing_commas(tmp_path):
    text = """
    { # what a person writes
      "train_batch_size": 8, // per step
      /* not "this": 1,
         at all */
      "optimizer": {"type": "SGD", "params": {"lr": 0.1,},},
      "tensorboard": {"output_path": "http://a//b#c,}"},
    }"""
    config = load_config(write(tmp_path, text))
    assert config.train_batch_size == 8
    assert config.optimizer.params["lr"] == 0.1
    assert config.raw["tensorboard"]["output_path"] == "http://a//b#c,}"


def test_a_byte_order_mark(tmp_path):
    assert load_config(write(tmp_path, '{"train_batch_size": 8}', encoding="utf-8-sig")).train_batch_size == 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{\n  "train_batch_size": 8\n  "fp16": {}\n}', [":3:3:", "not JSON"]),
        ('{\n  "train_batch_size": BATCH\n}', [":2:23:", "BATCH looks like a placeholder"]),
        ('{\n  "zero_optimization": {"stage": ${stage}}\n}', [":2:34:", "${stage} looks like a placeholder"]),
        ('{"fp16": {"enabled": True}}', [":1:22:", "write true instead of True"]),
        ("{train_batch_size: 8}", [":1:2:", '"train_batch_size"']),
        ("{'train_batch_size': 8}", [":1:2:", "double quotes"]),
        ('{"a": "no end}', [":1:7:"]),
        ('{"a": 1', [":1:"]),
        ("[1, 2]", ["a list"]),
        ('"text"', ["an object"]),
        ("null", ["nothing"]),
        ('{"gradient_clipping": NaN}', ["gradient_clipping", "NaN"]),
        ("[" * 100_000, ["nested too deeply"]),
        ('{"a":' * 60 + "1" + "}" * 60, ["nested deeper"]),
        ('{"a": ' + "9" * 10_000 + "}", ["too long"]),
        ("", ["is empty"]),
        ("  \n", ["is empty"]),
    ],
)
def test_what_is_not_json_is_told_with_its_place(tmp_path, text, said):
    message = refusal(write(tmp_path, text))
    for part in said:
        assert part in message


def test_duplicate_keys_are_told_with_their_place(tmp_path):
    text = '{\n  "fp16": {"enabled": false},\n  "a": {"b": 1, "c": [{"b": 2}]},\n  "fp16": {"enabled": true}\n}'
    message = refusal(write(tmp_path, text))
    assert ':4:3: the key "fp16" is given twice' in message


def test_duplicate_keys_in_yaml(tmp_path):
    message = refusal(write(tmp_path, "a: 1\nb:\n  c: 1\n  c: 2\n", "ds.yml"))
    assert ':4:3: not YAML: the key "c" is given twice' in message


@pytest.mark.parametrize("text", ["a: [1,", "a: b: c", "\tx", "!!python/object:os.system {}", "1: 2", "- 1", "a: \x07"])
def test_what_is_not_yaml(tmp_path, text):
    assert "ds.yaml" in refusal(write(tmp_path, text, "ds.yaml"))


def test_a_missing_file_is_named_by_its_whole_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal("missing.json") == f"no such config file: {tmp_path}/missing.json"
    assert "no such config file" in refusal("abcdefgh")
    assert "no such config file" in refusal("x" * 5000)


def test_what_is_no_file(tmp_path):
    assert "is a directory" in refusal(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"\x80\x02\xff\xfe")
    assert "byte 0 is not UTF-8" in refusal(tmp_path / "model.bin")
    (tmp_path / "large.json").write_bytes(b" " * (4 * 1024 * 1024 + 1))
    assert "larger than" in refusal(tmp_path / "large.json")


@pytest.mark.parametrize("source", [None, 5, ["a"], b"{}"])
def test_what_is_no_source(source):
    assert "a path, a dict or base64 text" in refusal(source)


def test_a_dict_that_json_cannot_hold():
    assert "keys are texts" in refusal({1: 2})
    assert "fp16.enabled: object is not something JSON can hold" in refusal({"fp16": {"enabled": object()}})
    circle: dict = {}
    circle["a"] = circle
    assert "nested deeper" in refusal(circle)


ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 8
deepspeed_config:
  gradient_accumulation_steps: 4
  gradient_clipping: 0.5
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
"""


def test_accelerate_yaml(tmp_path):
    config = load_config(write(tmp_path, ACCELERATE, "accelerate.yaml"))
    assert (config.zero.stage, config.precision, config.accumulation_steps) == (3, "bf16", 4)
    assert config.gradient_clipping == 0.5
    assert config.zero.offload_optimizer.device == "cpu"
    assert config.zero.gather_16bit_weights_on_model_save


def test_accelerate_yaml_with_a_nested_block_or_a_file(tmp_path):
    nested = ACCELERATE.replace("  zero_stage: 3", "  zero_stage: 3\n  zero_optimization: {reduce_bucket_size: 5e7}")
    assert load_config(write(tmp_path, nested, "nested.yaml")).zero.reduce_bucket_size == 50_000_000
    write(tmp_path, '{"train_batch_size": 64, "zero_optimization": {"stage": 1}}')
    named = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\n"
    config = load_config(write(tmp_path, named, "named.yaml"))
    assert (config.train_batch_size, config.zero.stage) == (64, 1)


def test_accelerate_yaml_that_contradicts_itself_or_names_nothing(tmp_path):
    twice = ACCELERATE.replace("  zero_stage: 3", "  zero_stage: 3\n  zero_optimization: {stage: 2}")
    assert "zero_stage: is 3, but zero_optimization.stage is 2" in refusal(write(tmp_path, twice, "twice.yaml"))
    named = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: nowhere.json}\n"
    message = refusal(write(tmp_path, named, "named.yaml"))
    assert "deepspeed_config_file: no such config file" in message
    assert "nowhere.json" in message


def test_accelerate_without_deepspeed_shards_nothing(tmp_path):
    text = "distributed_type: MULTI_GPU\ndeepspeed_config: {}\nmixed_precision: 'no'\n"
    assert load_config(write(tmp_path, text, "plain.yaml")).zero.stage == 0
    assert load_config(write(tmp_path, text.replace("MULTI_GPU", "DEEPSPEED"), "deep.yaml")).zero.stage == 2
