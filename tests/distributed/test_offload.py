"""State off the device trains the same and takes no device memory. What disks do is in test_offload_disks.py.

By default each pair of (stage, tiers, accumulation, dtype, world, ...) occurs at least once; ZRUN_TEST_FULL=1 runs the
whole product.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import zrun_runtime
from zrun_runtime.commands.plan import plan
from zrun_runtime.config import load_config

from . import offload_uses as uses
from .compare import distance, flat
from .disk_uses import trained_on_an_odd_disk
from .offload_uses import Job
from .pairwise import Row, cover
from .training import digest
from .worlds import World

pytestmark = pytest.mark.slow

Worlds = Callable[..., World]
MIB = 2**20
COLUMNS: dict[str, Any] = {
    "stage": (1, 2, 3),
    "optimizer_tier": ("cpu", "nvme", "none"),
    "param_tier": ("none", "nvme", "cpu"),
    "accumulation": (1, 4),
    "dtype": ("fp32", "bf16", "fp16"),
    "apart": (False, True),
    "world": (2, 1),
    "strip": (10**9, 128),
}


def _rows() -> list[Row]:
    if os.environ.get("ZRUN_TEST_FULL"):
        rows = [dict(zip(COLUMNS, values, strict=True)) for values in product(*COLUMNS.values())]
    else:
        rows = cover(COLUMNS)
    return [r for r in rows if r["stage"] == 3 or r["param_tier"] == "none"]


def _label(row: Row) -> str:
    return "-".join(f"{name}_{value}" for name, value in row.items())


_references: dict[tuple[Job, int], list[uses.Found]] = {}


def reference(job: Job, size: int, world: Worlds) -> list[uses.Found]:
    """The run without offload."""
    key = repr(job.resident), size
    if key not in _references:
        _references[key] = world(size).run(uses.train, job=job.resident)
    return _references[key]


def same(job: Job, size: int, world: Worlds) -> list[uses.Found]:
    """Run a job, and hold it to the run without offload: to the bit where sums are taken in the same order."""
    wanted = reference(job, size, world)
    found = world(size).run(uses.train, job=job)
    assert len({one.weights for one in found}) == 1, "the ranks do not have the same weights"
    assert set(found[0].states) == set(wanted[0].states)
    exact = not job.apart or size == 1 or (job.dtype == "fp32" and job.accumulation == 1)
    if exact:
        assert [one.losses for one in found] == [one.losses for one in wanted]
        for ours, theirs in ((found[0].masters, wanted[0].masters), (found[0].states, wanted[0].states)):
            unequal = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
            assert not unequal, unequal
        assert found[0].weights == wanted[0].weights
    else:  # gradients travel to the host in their own dtype before they are added up
        limit = 1e-6 if job.dtype == "fp32" else 1e-3
        assert distance(flat(found[0].masters), flat(wanted[0].masters)) < limit
    return found


@pytest.mark.parametrize("row", _rows(), ids=_label)
def test_offload_changes_nothing(row: Row, world: Worlds, tmp_path: Path) -> None:
    row = dict(row)
    size, strip = row.pop("world"), row.pop("strip")
    on_disk = "nvme" in (row["optimizer_tier"], row["param_tier"])
    job = Job(path=str(tmp_path) if on_disk else "", zero={"sub_group_size": strip}, **row)
    found = same(job, size, world)
    assert (found[0].on_disk > 0) == on_disk
    assert not os.listdir(tmp_path), "something is left on the disk"


@pytest.mark.parametrize("kind", [*sorted(uses.CLIENTS), "Lion", "Lamb"])
@pytest.mark.parametrize("tier", ("cpu", "nvme"))
def test_every_kind_of_optimizer_can_be_offloaded(kind: str, tier: str, world: Worlds, tmp_path: Path) -> None:
    dtype = "bf16" if tier == "nvme" else "fp32"
    zero = {"sub_group_size": 256}
    same(Job(kind=kind, optimizer_tier=tier, dtype=dtype, path=str(tmp_path), zero=zero, steps=3), 2, world)


@pytest.mark.parametrize("stage", (1, 2, 3))
@pytest.mark.parametrize("tier", ("cpu", "nvme"))
@pytest.mark.parametrize("model", ("unused_on_all_ranks", "unused_on_some_ranks"))
def test_parameters_without_a_gradient(model: str, tier: str, stage: int, world: Worlds, tmp_path: Path) -> None:
    same(Job(stage=stage, optimizer_tier=tier, model=model, clip=0.1, path=str(tmp_path)), 2, world)


@pytest.mark.parametrize("tier", ("cpu", "nvme"))
def test_a_ratio_keeps_a_share_on_the_device(tier: str, world: Worlds, tmp_path: Path) -> None:
    half = {"offload_optimizer": {"ratio": 0.5}}
    job = Job(optimizer_tier=tier, path=str(tmp_path), dtype="bf16", zero=half)
    some = same(job, 2, world)[0].on_disk
    everything = same(Job(optimizer_tier=tier, path=str(tmp_path), dtype="bf16"), 2, world)[0].on_disk
    assert (0 < some < everything) if tier == "nvme" else some == everything == 0


ODD_OPTIONS: list[dict[str, Any]] = [
    *({"zero": {"sub_group_size": size}} for size in (0, 1, 65, 1e9)),
    *({"zero": {"offload_optimizer": {"buffer_count": count}}} for count in (1, 2, 1000)),
    *({"zero": {"offload_optimizer": {"buffer_size": size}}} for size in (1, 12_345, 10**12)),
    *({"zero": {"offload_optimizer": {"ratio": ratio}}} for ratio in (0, 0.3)),
    *({"zero": {"offload_optimizer": {f"pipeline_{verb}": True, "pin_memory": True}}} for verb in ("read", "write")),
    *({"zero": {"offload_param": {"max_in_cpu": count}}} for count in (1, 3000, 1e9)),
    {"zero": {"offload_param": {"buffer_count": 1, "buffer_size": 1, "pin_memory": True}}},
    {"more": {"aio": {"block_size": 1, "queue_depth": 1}}},
    {"more": {"aio": {"block_size": 1_048_577, "thread_count": 8, "queue_depth": 32, "single_submit": True}}},
]


@pytest.mark.parametrize("options", ODD_OPTIONS, ids=str)
def test_no_option_changes_results(options: dict[str, Any], tmp_path: Path) -> None:
    job = Job(stage=3, optimizer_tier="nvme", param_tier="nvme", dtype="bf16", path=str(tmp_path), steps=3, **options)
    assert trained_on_an_odd_disk("", job) == trained_on_an_odd_disk("", job.resident)


# ---- memory


@pytest.mark.parametrize(("stage", "param_tier"), [(2, "none"), (3, "cpu"), (3, "nvme")])
@pytest.mark.parametrize("tier", ("cpu", "nvme"))
def test_the_device_holds_weights_and_buckets_only(
    stage: int, param_tier: str, tier: str, world: Worlds, tmp_path: Path
) -> None:
    """Counted by storages, with the CPU as a device whose memory is apart from the host's."""
    job = Job(stage=stage, optimizer_tier=tier, param_tier=param_tier, apart=True, dtype="bf16", path=str(tmp_path))
    for held in world(2).run(uses.hold, job=job):
        weights = 2 * held.parameters if stage == 2 else 0
        assert held.device <= 1.05 * weights + MIB
        # Two groups of weights and of gradients, and what gloo receives. See test_far_device.py for a GPU's, exactly.
        group = 2 * (held.block if stage == 3 else held.parameters // 8)
        assert held.device_most <= weights + 1.05 * (5 * group) + 2 * MIB


def test_nvme_takes_no_more_of_the_host_than_its_buffers(world: Worlds, tmp_path: Path) -> None:
    count, tile = 3, 16_384
    zero = {"sub_group_size": tile, "offload_optimizer": {"buffer_count": count}}
    job = Job(optimizer_tier="nvme", dtype="bf16", apart=True, path=str(tmp_path), zero=zero)
    for held in world(2).run(uses.hold, job=job):
        gradients = 2 * held.parameters / 2  # this rank's slices, until the update
        assert held.host <= 1.1 * count * 12 * tile + 2 * MIB / 8
        assert held.host_most <= gradients + 1.1 * count * 12 * tile + MIB


# ---- what scripts write, what is saved


@pytest.mark.parametrize(
    ("how", "stage", "tier", "param_tier", "apart"),
    [
        *product(("gathered", "in place"), (2,), ("cpu", "nvme"), ("none",), (False, True)),
        *product(("gathered", "set"), (3,), ("nvme", "none"), ("nvme",), (False,)),
    ],
)
def test_edits_of_weights_reach_their_masters(
    how: str, stage: int, tier: str, param_tier: str, apart: bool, world: Worlds, tmp_path: Path
) -> None:
    job = Job(
        stage=stage, optimizer_tier=tier, param_tier=param_tier, apart=apart, dtype="bf16", path=str(tmp_path), clip=0.0
    )
    found = world(2).run(uses.edited, job=job, how=how)
    assert found[0][0] == [True, True]
    if not apart:
        assert found == world(2).run(uses.edited, job=job.resident, how=how)


@pytest.mark.parametrize(
    ("stage", "tier", "param_tier", "apart", "which"),
    [
        (1, "cpu", "none", True, "full"),
        (1, "nvme", "none", False, "local"),
        (2, "cpu", "none", False, "full"),
        (2, "nvme", "none", True, "local"),
        (3, "cpu", "cpu", True, "local"),
        (3, "nvme", "nvme", False, "full"),
        (3, "none", "nvme", False, "local"),
    ],
)
def test_what_is_set_is_what_is_used(
    stage: int, tier: str, param_tier: str, apart: bool, which: str, world: Worlds, tmp_path: Path
) -> None:
    """State, master weights and gradients that scripts set, to the last digit, as without offload."""
    job = Job(
        stage=stage, optimizer_tier=tier, param_tier=param_tier, apart=apart, dtype="bf16",
        path=str(tmp_path), zero={"sub_group_size": 512},
    )  # fmt: skip
    found = world(2).run(uses.set_by_hand, job=job, which=which)
    assert all(kept == [True] * 4 for kept, *_ in found)
    for (_, norm, *marks), (_, wanted, *others) in zip(
        found, world(2).run(uses.set_by_hand, job=job.resident, which=which), strict=True
    ):
        assert norm == pytest.approx(wanted, rel=1e-2 if apart else 1e-12)
        assert apart or marks == others  # gradients that travel to the host do so in their own dtype


@pytest.mark.parametrize(("one", "other"), [(("nvme", "nvme"), ("none", "none")), (("cpu", "none"), ("nvme", "nvme"))])
def test_checkpoints_do_not_know_of_tiers(
    one: tuple[str, str], other: tuple[str, str], world: Worlds, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()

    def job(tiers: tuple[str, str]) -> Job:
        return Job(
            stage=3, optimizer_tier=tiers[0], param_tier=tiers[1], dtype="bf16", path=str(tmp_path / "disk"), clip=0.0
        )

    how = {"job": job(one), "other": job(other), "directory": str(tmp_path / "saved")}
    for saved, loaded in world(2).run(uses.saved_and_loaded, **how):
        assert saved == loaded


@pytest.mark.parametrize("stage", (1, 3))
def test_state_is_moved_for_a_phase_and_back(stage: int, world: Worlds) -> None:
    job = Job(stage=stage, dtype="bf16", apart=True)
    wanted = reference(job, 2, world)[0].masters
    for before, after, said, mark in world(2).run(uses.parked, job=job):
        assert after - before >= 12 * sum(value.numel() for value in wanted.values()) / 2  # masters and two moments
        assert "reload_states" in said
        assert mark == digest(wanted)


# ---- what configs say


def test_what_has_no_effect_is_said() -> None:
    def notes(zero: dict[str, Any]) -> dict[str, tuple[str, str]]:
        config = load_config({"train_batch_size": 1, "zero_optimization": zero}, world_size=1)
        return {note.path.removeprefix("zero_optimization."): (note.kind, note.text) for note in config.notes}

    assert notes({"stage": 2, "offload_param": {"device": "cpu"}})["offload_param"] == (
        "no_effect",
        "it has a meaning at stage 3 only",
    )
    assert notes({"stage": 0, "offload_optimizer": {"device": "cpu"}})["offload_optimizer"][0] == "no_effect"
    assert notes({"stage": 2, "offload_optimizer": {"device": "none"}})["offload_optimizer"][1] == "it is off"
    assert notes({"stage": 2, "cpu_offload": True})["cpu_offload"] == (
        "migrated",
        "is now zero_optimization.offload_optimizer",
    )
    with pytest.raises(zrun_runtime.ConfigError, match="device nvme needs a directory"):
        notes({"stage": 2, "offload_optimizer": {"device": "nvme"}})


@pytest.mark.parametrize(
    ("gpu_memory", "host_memory", "tiers"),
    [("80GB", "512GB", ()), ("24GB", "256GB", ("cpu",)), ("24GB", "36GB", ("nvme",))],
)
def test_what_zrun_plan_recommends_is_pasted_and_trains(
    gpu_memory: str, host_memory: str, tiers: tuple[str, ...], tmp_path: Path
) -> None:
    asked = ["--params", "2.7b", "--num_gpus", 1, "--gpu_memory", gpu_memory, "--host_memory", host_memory]
    done = CliRunner().invoke(plan, [*map(str, asked), "--nvme_path", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    zero = json.loads(done.stdout)["recommended"]["zero_optimization"]
    sections = [section for key, section in zero.items() if key.startswith("offload")]
    assert {section["device"] for section in sections} == set(tiers)
    engine = uses.make(Job(dtype="bf16", zero=zero))
    assert uses.run_steps(engine, Job(), 0, range(2))
    engine.destroy()


@pytest.mark.parametrize("stage", (1, 2))
@pytest.mark.parametrize("zero", [{"cpu_offload": True}, {"offload_param": {"device": "cpu"}}])
def test_what_people_write_at_lower_levels_trains(stage: int, zero: dict[str, Any], world: Worlds) -> None:
    job = Job(stage=stage, dtype="bf16", accumulation=4, zero=zero, more={"data_types": {"grad_accum_dtype": "fp32"}})
    plain = Job(stage=stage, dtype="bf16", accumulation=4, more=job.more)
    assert world(2).run(uses.train, job=job)[0].weights == world(2).run(uses.train, job=plain)[0].weights
