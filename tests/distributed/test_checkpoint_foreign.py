"""Checkpoints of DeepSpeed come in, whole weights go out, and `zrun checkpoint` tells of both."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner

from zrun_runtime.checkpoint import export as exporting
from zrun_runtime.checkpoint.open import open_checkpoint
from zrun_runtime.commands.checkpoint import checkpoint

from . import checkpoint_foreign as foreign
from .checkpoint_harm import Boom
from .worlds import World

pytestmark = pytest.mark.slow
Worlds = Callable[..., World]
DEEPSPEED = Path(__file__).resolve().parents[1] / "data" / "deepspeed"


def zrun(*arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(checkpoint, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.output


@pytest.mark.parametrize("name", sorted(p.name for p in DEEPSPEED.iterdir() if p.is_dir()))
def test_training_goes_on_from_deepspeed(name: str, world: Worlds, tmp_path: Path) -> None:
    """Fixtures: three steps of DeepSpeed 0.19.8 on two ranks, saved, and its losses at the steps after."""
    stage, dtype = int(name[4]), re.findall("fp32|bf16", name)[0]
    code, text = zrun("import", DEEPSPEED / name, tmp_path)
    assert code == 0, text
    for rank, found in enumerate(world(2).run(foreign.after_import, directory=str(tmp_path), stage=stage, dtype=dtype)):
        theirs = json.loads((DEEPSPEED / f"zero{stage}-{dtype}.rank{rank}.json").read_text())
        limit = 1e-5 if dtype == "fp32" else 5e-3  # bf16: its forward rounds at other places than plain torch's
        assert found["losses"] == pytest.approx(theirs["losses"][3:], rel=limit)
        assert found["client"] == {"note": "rank 0", "epoch": 7}
        assert found["lr"] == pytest.approx(theirs["lr"])
        assert found["counters"] == (6, 48)
        assert found["seen"] == [3.0, 6.0, 9.0]


def test_what_is_no_checkpoint_of_deepspeed_is_told(tmp_path: Path) -> None:
    code, text = zrun("import", tmp_path, tmp_path / "out")
    assert code == 2 and "latest" in text and "mp_rank_00_model_states.pt" in text
    (tmp_path / "mp_rank_00_model_states.pt").write_bytes(b"x")
    code, text = zrun("import", tmp_path, tmp_path / "out")
    assert code == 2 and "cannot be read as plain data" in text
    torch.save({"module": Boom(str(tmp_path / "boom"))}, tmp_path / "mp_rank_00_model_states.pt")
    code, text = zrun("import", tmp_path, tmp_path / "out")
    assert code == 2 and not (tmp_path / "boom").exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("stage", "dtype"), ((1, "bf16"), (3, "fp32"), (0, "fp32")))
def test_whole_weights_for_other_programs(stage: int, dtype: str, world: Worlds, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    ranks = world(2).run(foreign.saved_whole, directory=str(saved), stage=stage, dtype=dtype)
    wanted = {**{n: w.float() for n, w in ranks[0]["weights"].items()}, **ranks[0]["masters"], **ranks[0]["buffers"]}
    wanted["head.weight"] = wanted["embedding.weight"]

    def same(found: dict[str, torch.Tensor]) -> None:
        assert found.keys() == wanted.keys()
        for name, value in found.items():
            assert value.dtype is wanted[name].dtype and torch.equal(value, wanted[name]), name

    code, text = zrun("export", saved, tmp_path / "one")
    assert code == 0 and "model.safetensors" in text
    same(safetensors.torch.load_file(tmp_path / "one" / "model.safetensors"))
    assert zrun("export", saved, tmp_path / "one")[0] == 2  # never over an older one
    zrun("export", saved / "global_step2", tmp_path / "many", "--max_shard_size", "4KB")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    found = {}
    for name in sorted(set(index["weight_map"].values())):
        found.update(safetensors.torch.load_file(tmp_path / "many" / name))
    same(found)
    assert len(set(index["weight_map"].values())) > 3
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in wanted.values())
    zrun("export", saved, tmp_path / "torch", "--torch")
    same(torch.load(tmp_path / "torch" / "pytorch_model.bin", weights_only=True))
    same(dict(exporting.get_fp32_state_dict_from_zero_checkpoint(saved)))
    same(dict(exporting.get_fp32_state_dict_from_zero_checkpoint(saved, lazy_mode=True)))
    half = tmp_path / "half"
    zrun("export", saved, half, "--dtype", "bf16")
    for name, value in safetensors.torch.load_file(half / "model.safetensors").items():
        assert torch.equal(value, wanted[name].bfloat16() if name != "codes" else wanted[name])

    plain = {**ranks[0]["weights"], **ranks[0]["buffers"]}
    plain["head.weight"] = plain["embedding.weight"]
    assert [rank["written"] for rank in ranks] == [(True, True)] * 2
    assert ranks[1]["consolidated"] is None
    whole = torch.load(saved / "whole.bin", weights_only=True)
    for one in (ranks[0]["consolidated"], whole, safetensors.torch.load_file(saved / "whole.safetensors")):
        assert one.keys() == plain.keys()
        assert all(torch.equal(one[name], plain[name]) for name in plain)

    with open_checkpoint(saved, "trained") as reader:
        assert {"blocks.0.up.weight", "blocks.1.down.bias"} <= set(reader.manifest.left_out)
        assert "blocks.0.up.weight" not in reader.index.held and "blocks.3.up.weight" in reader.index.held


def test_inspect_verify_and_diff(world: Worlds, tmp_path: Path) -> None:
    for name, stage in (("a", 3), ("b", 0)):
        world(2).run(foreign.saved_whole, directory=str(tmp_path / name), stage=stage, dtype="fp32")
    code, text = zrun("inspect", tmp_path / "a")
    assert code == 0 and "ranks: 2" in text and "blocks.0.up.weight" in text and "exp_avg_sq" in text
    code, text = zrun("inspect", tmp_path / "a", "--json")
    rows = {row["name"]: row for row in json.loads(text)["tensors"]}
    assert rows["embedding.weight"]["shape"] == [31, 16] and rows["head.weight"]["kind"] == "is embedding.weight"
    assert rows["blocks.0.up.weight"]["kind"] == "frozen" and rows["codes"]["kind"] == "buffer"

    assert zrun("diff", tmp_path / "a", tmp_path / "a") == (0, "equal\n")
    code, text = zrun("diff", tmp_path / "a", tmp_path / "a" / "trained")
    assert code == 1 and "blocks.0.up.weight: only in" in text and "embedding.weight:" not in text

    assert zrun("verify", tmp_path / "a") == (0, "trained: whole\nglobal_step2 (latest): whole\n")
    code, text = zrun("verify", tmp_path / "a", "--json")
    assert code == 0 and json.loads(text)[1] == {"tag": "global_step2", "latest": True, "whole": True, "trouble": ""}
    assert zrun("diff", tmp_path / "a", tmp_path / "a", "--json") == (0, "[]\n")
    code, text = zrun("diff", tmp_path / "a", tmp_path / "a" / "trained", "--json")
    assert code == 1 and {"name", "text"} == set(json.loads(text)[0])
    part = next((tmp_path / "a" / "global_step2").glob("model-*"))
    data = bytearray(part.read_bytes())
    data[-5] ^= 4
    part.write_bytes(data)
    code, text = zrun("verify", tmp_path / "a")
    assert code == 2 and part.name in text and "checksum" in text and "the newest whole one is trained" in text
    assert zrun("export", tmp_path / "a", tmp_path / "out")[0] == 2
    assert not list((tmp_path / "out").glob("*")) if (tmp_path / "out").exists() else True

    code, text = zrun("inspect", tmp_path)
    assert code == 2 and "latest" in text and "manifest.json" in text
    code, text = zrun("inspect", tmp_path / "a", "--tag", "nothing")
    assert code == 2 and "global_step2" in text
    code, text = zrun("export", tmp_path / "b", tmp_path / "out2", "--max_shard_size", "many")
    assert code == 2 and "5GB" in text
