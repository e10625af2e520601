"""Checkpoints of DeepSpeed come in, whole weights go out, and `zrun checkpoint` tells of both."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner

from zrun_runtime.checkpoint import export as exporting
from zrun_runtime.checkpoint.deepspeed import _load
from zrun_runtime.checkpoint.open import open_checkpoint
from zrun_runtime.checkpoint.restore import read_whole
from zrun_runtime.commands.checkpoint import checkpoint

from . import checkpoint_foreign as foreign
from .checkpoint_harm import Boom
from .training import digest
from .worlds import World

pytestmark = pytest.mark.slow
Worlds = Callable[..., World]
DEEPSPEED = Path(__file__).resolve().parents[1] / "data" / "deepspeed"


def zrun(*arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(checkpoint, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.output


def consolidated(place: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Kind of state -> name -> values, put together from DeepSpeed's files as its documentation describes them."""
    model = _load(next(iter(sorted(place.glob("*model_states.pt")))))
    names = [name for group in model["param_shapes"] or () for name in group]
    shapes = {name: tuple(shape) for group in model["param_shapes"] or () for name, shape in group.items()}
    if (place / "zero").is_dir():
        kinds = ("fp32", "exp_avg", "exp_avg_sq")
        return {kind: {n: _load(place / "zero" / n / f"{kind}.pt")["param"] for n in names} for kind in kinds}
    ranks = [_load(path)["optimizer_state_dict"] for path in sorted(place.glob("*optim_states.pt"))]
    if not ranks:
        base = model["optimizer"].get("optimizer_state_dict", model["optimizer"])["state"]
        trained = [n for n in model["module"] if n not in ("seen", "frozen.weight", "head.weight")]
        names = sorted(trained, key=lambda n: model["module"][n].dim() == 1)
        masters = [value for group in model["optimizer"].get("fp32_groups", ()) for value in group]
        found = {kind: {n: base[i][kind] for i, n in enumerate(names)} for kind in ("exp_avg", "exp_avg_sq")}
        return {"fp32": dict(zip(names, masters or [model["module"][n] for n in names], strict=True)), **found}
    if "fp32_flat_groups" in ranks[0]:
        inner = [rank["optimizer_state_dict"]["state"] for rank in ranks]
        flats = {"fp32": [torch.cat(rank["fp32_flat_groups"]) for rank in ranks]}
        for kind in ("exp_avg", "exp_avg_sq"):
            flats[kind] = [torch.cat([one[number][kind] for number in sorted(one)]) for one in inner]
        found, start = {kind: {} for kind in flats}, 0
        for name, shape in shapes.items():
            each = -(-torch.Size(shape).numel() // len(ranks))
            for kind, values in flats.items():
                whole = torch.cat([flat[start : start + each] for flat in values])
                found[kind][name] = whole[: torch.Size(shape).numel()].view(shape)
            start += each
        return found
    found = {kind: {} for kind in ("fp32", "exp_avg", "exp_avg_sq")}
    for number, group in enumerate(model["param_shapes"]):
        states = [rank["base_optimizer_state"]["state"][number] for rank in ranks]
        masters = [rank["single_partition_of_fp32_groups"][number] for rank in ranks]
        for kind in found:
            whole = torch.cat(masters if kind == "fp32" else [state[kind] for state in states])
            sizes = [torch.Size(shape).numel() for shape in group.values()]
            for name, part in zip(group, whole[: sum(sizes)].split(sizes), strict=True):
                found[kind][name] = part.view(tuple(group[name]))
    return found


@pytest.mark.parametrize("name", sorted(p.name for p in DEEPSPEED.iterdir() if p.is_dir()))
def test_training_goes_on_from_deepspeed(name: str, world: Worlds, tmp_path: Path) -> None:
    """Fixtures: three steps of DeepSpeed 0.19.8 on two ranks, saved, and its losses at the steps after.

    Weights and moments come over to the bit, so the next loss is to the bit that of plain torch at the weights in the
    file. With bf16, DeepSpeed's own losses are these to the bit as well on the kind of CPU that made the fixtures; on
    another one matrix products may round otherwise.
    """
    stage, dtype = int(name[4]), re.findall("fp32|bf16", name)[0]
    theirs = name in ("zero1-bf16", "zero3-bf16")  # made after a run at stage 3 in the same process: see make.py
    code, text = zrun("import", DEEPSPEED / name, tmp_path)
    assert code == 0, text
    steps = 4.0 if name == "zero0-bf16" else 3.0  # that optimizer makes a step of zeros when it is built
    stored = consolidated(next(p for p in (DEEPSPEED / name).iterdir() if p.is_dir()))
    with open_checkpoint(tmp_path) as reader:
        for kind, values in stored.items():
            for parameter, wanted in values.items():
                held = reader.index.held[parameter]
                assert torch.equal(read_whole(reader, held, "master" if kind == "fp32" else kind), wanted), parameter
                assert held.group is not None and held.group.scalars["step"]["v"] == steps
        weights = {n: v.bfloat16() if dtype == "bf16" else v.clone() for n, v in stored["fp32"].items()}
        frozen = read_whole(reader, reader.index.held["frozen.weight"])
        weights |= {"frozen.weight": frozen.bfloat16() if dtype == "bf16" else frozen}
    marks = {"masters": digest(stored["fp32"])}
    marks["moments"] = digest({f"{n}/{k}": v for k in ("exp_avg", "exp_avg_sq") for n, v in stored[k].items()})
    how = {"directory": str(tmp_path), "stage": stage, "dtype": dtype, "theirs": theirs}
    for rank, found in enumerate(world(2).run(foreign.after_import, **how)):
        recorded = json.loads((DEEPSPEED / f"{name.replace('-universal', '')}.rank{rank}.json").read_text())
        assert found["mark"] == marks
        assert found["losses"][0] == foreign.next_loss(weights, rank, theirs)
        limit = 1e-5 if dtype == "fp32" else 2e-3
        assert found["losses"] == pytest.approx(recorded["losses"][3:], rel=limit)
        assert found["client"] == {"note": "rank 0", "epoch": 7}
        assert found["lr"] == pytest.approx(recorded["lr"])
        assert found["counters"] == (6, 48)
        assert found["seen"] == [3.0, 6.0, 9.0]


def test_a_checkpoint_of_deepspeed_that_leaves_doubt_is_refused(tmp_path: Path) -> None:
    """At stage 0 it does not say which optimizer state is whose: never a guess."""
    file = "global_step3/mp_rank_00_model_states.pt"
    model = _load(DEEPSPEED / "zero0-fp32" / file)
    del model["ds_config"]
    (tmp_path / "global_step3").mkdir()
    (tmp_path / "latest").write_text("global_step3")
    groups = model["optimizer"]["param_groups"]
    groups[0]["params"], groups[1]["params"] = [0, 1, 2], list(range(3, 11))
    torch.save(model, tmp_path / file)
    code, text = zrun("import", tmp_path, tmp_path / "out")
    assert code == 2 and "2 parameters of shape (13, 8) are in optimizer groups [0, 1]" in text
    assert "blocks.0.0.weight, blocks.1.0.weight" in text and "stage 1" in text
    groups[0]["params"], groups[1]["params"] = list(range(5)), list(range(5, 11))
    model["optimizer"]["state"][5]["step"] = torch.tensor(2.0)
    torch.save(model, tmp_path / file)
    code, text = zrun("import", tmp_path, tmp_path / "out")
    assert code == 2 and "different numbers of steps" in text
    del model["optimizer"], model["buffer_names"]
    torch.save(model, tmp_path / file)
    code, text = zrun("import", tmp_path, tmp_path / "out")
    assert code == 2 and "buffer_names" in text and "0.19" in text and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "named"),
    (
        ("layer_0_expert_3_mp_rank_00_model_states.pt", "experts"),
        ("layer_01-model_00-model_states.pt", "pipeline"),
        ("mp_rank_01_model_states.pt", "model parallelism"),
        ("offloaded_tensors", "NVMe"),
    ),
)
def test_kinds_of_deepspeed_that_are_not_read_are_named(file: str, named: str, tmp_path: Path) -> None:
    shutil.copytree(DEEPSPEED / "zero1-fp32", tmp_path / "in")
    (tmp_path / "in" / "global_step3" / file).touch()
    code, text = zrun("import", tmp_path / "in", tmp_path / "out")
    assert code == 2 and named in text and not (tmp_path / "out").exists()


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
