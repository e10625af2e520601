"""Bytes that a rank holds for a model under a plan. Pure arithmetic: the one formula of `zrun plan`, of the start of a
run, of the estimators and of the tests.

[Note: what is held when]
- Between steps: parameters; master weights where they are a copy (16-bit parameters, or an optimizer in another tier);
  the optimizer's moments. This is what `engine.state_bytes()` counts then.
- Between micro-batches, where gradients accumulate, and from the end of a backward to the end of its step: gradients.
  Where each rank keeps its own whole sum until the boundary it is of grad_accum_dtype, reduced ones are fp32.
- Within a forward and backward, the working set: whole weights of two groups where parameters come and go, and the
  buffers in which gradients of groups become whole before they are reduced; where they leave for the host, slices on
  their way. All other buffers of the runtime are smaller than a group. gloo, which trains on CPUs, receives into one
  more group than is counted here.
Activations are the model's, not the runtime's: see model_size.py.

Every group is padded to a multiple of 64 bytes a rank (layout.py), which counts for small models in large worlds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from zrun_runtime.config import Config
from zrun_runtime.layout import SHARD_BYTES, group_limit, round_up, small_enough_to_keep
from zrun_runtime.plan import StatePlan, TierKind

MASTER = 4  # bytes of a master weight, of a reduced gradient and of one moment: fp32
# Groups whose gradients are under way at a time. Two: one that moves and one that waits for a slower peer. One where
# parameters come and go: a group is a block there, its gradients take as much as its weights, and memory is why one
# shards.
FLYING, FLYING_SHARDED = 2, 1
FILLING = 1  # a group that still gets gradients
NVME_TILE = 2**22  # elements read at once: 48 MiB of AdamW's three tensors
STRIP = 2**19  # elements updated at once where something is cast: what was cast is still in the cache then
_WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}
_ONE_MOMENT = ("Adagrad", "Lion")
_NO_MOMENT = ("SGD",)


@dataclass(frozen=True)
class UnitSize:
    """Parameters that are gathered together where parameters come and go (see grouping.py), in elements.

    twice: also for the backward; an embedding is not, nor is the unit that ends the forward, which stays.
    """

    numel: int
    twice: bool = True


@dataclass(frozen=True)
class ModelSize:
    """How many numbers a model has, and how they lie together. All in elements.

    trained, frozen: parameters with and without a gradient, together as many as those of all units.
    apart: parameters that form a group of their own where parameters stay: embeddings, and those above a group's size.
    """

    trained: int
    units: tuple[UnitSize, ...]
    frozen: int = 0
    apart: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        return self.trained + self.frozen

    @property
    def two_largest(self) -> int:
        """Elements of the two largest units: as much as is whole at once."""
        return sum(sorted(unit.numel for unit in self.units)[-2:])


@dataclass(frozen=True)
class Widths:
    """Bytes of one number: of a weight, of all moments together, of a gradient while it is summed and on the wire."""

    weight: int = 2
    moments: int = 8
    grad: int = 2
    wire: int = 2
    accumulates: bool = False  # over several micro-batches

    @property
    def copies_master(self) -> bool:
        """fp32 training needs no second copy of the weights: they are the master."""
        return self.weight < MASTER

    @classmethod
    def of(cls, config: Config) -> Widths:
        """As a config has it; a model of the program's own types is taken as fp32."""
        weight = _WIDTHS[config.precision]
        several = config.accumulation_steps > 1 or not config.managed_gradient_accumulation
        grad = _WIDTHS[config.grad_accum_dtype] if config.grad_accum_dtype else 4 if several else weight
        wire = _WIDTHS[config.communication_data_type] if config.communication_data_type else grad
        kind = config.optimizer
        moments = moment_bytes(kind.type, kind.params) if kind is not None else 2 * MASTER
        return cls(weight, moments, grad, wire, several)


def moment_bytes(kind: str, options: dict[str, object]) -> int:
    """Bytes a parameter of an optimizer's state: of a class of torch.optim, or of ours, with these options.

    A class that is not known here is taken as one with two moments, as Adam.
    """
    if kind == "RMSprop":
        return MASTER * (1 + bool(options.get("momentum")) + bool(options.get("centered")))
    if kind in _NO_MOMENT:
        return MASTER * bool(options.get("momentum"))
    if kind in _ONE_MOMENT:
        return MASTER
    return MASTER * (2 + bool(options.get("amsgrad")))


@dataclass(frozen=True)
class Held:
    """Bytes in one place, by kind. `working` and `grads` exist within a step only."""

    params: int = 0
    master: int = 0
    optimizer: int = 0
    grads: int = 0
    working: int = 0

    @property
    def resident(self) -> int:
        """Between steps."""
        return self.params + self.master + self.optimizer

    @property
    def peak(self) -> int:
        """The most of a step, activations left out."""
        return self.resident + self.grads + self.working


@dataclass(frozen=True)
class Footprint:
    """Bytes that one rank holds, by tier."""

    device: Held = field(default_factory=Held)
    host: Held = field(default_factory=Held)
    disk: Held = field(default_factory=Held)


@dataclass(frozen=True)
class TierSettings:
    """How state that is not on the device is kept. Sizes in elements.

    tiles, tile: buffers between the optimizer's state and a disk. blocks: buffers between parameters and a disk, each
    of a rank's share of a group. in_memory: of a rank's parameters that stay on the host all the same. share: of the
    optimizer's state that is offloaded at all. one_memory: the device is the host, and moving there copies nothing.
    """

    tiles: int = 4
    tile: int = NVME_TILE
    blocks: int = 5
    in_memory: int = 1_000_000_000
    share: float = 1.0
    one_memory: bool = False

    @classmethod
    def of(cls, config: Config, one_memory: bool = False) -> TierSettings:
        """As a config has it."""
        zero = config.zero
        return cls(
            tiles=zero.offload_optimizer.buffer_count,
            tile=min(zero.sub_group_size, NVME_TILE),
            blocks=zero.offload_param.buffer_count,
            in_memory=zero.offload_param.max_in_cpu,
            share=zero.offload_optimizer.ratio,
            one_memory=one_memory,
        )


@dataclass(frozen=True)
class Keep:
    """What is never sharded, in elements: groups of at most `most`, at most `total` together; see layout.py."""

    most: int = 100_000
    total: int = 2**63

    def of(self, units: Sequence[UnitSize]) -> set[int]:
        """The numbers of these units that stay whole."""
        return small_enough_to_keep([unit.numel for unit in units], self.most, self.total)


KEEP = Keep()


@dataclass(frozen=True)
class Spread:
    """How many elements a rank holds: of all weights, of the slices that it updates, and of whole groups in use."""

    params: int
    owned: int
    whole: int  # of the weights of groups in use, where parameters come and go
    group: int  # of the largest group whose gradients become whole


def spread(model: ModelSize, weight: int, plan: StatePlan, world: int, keep: Keep = KEEP) -> Spread:
    """Count elements, paddings included."""
    multiple = world * SHARD_BYTES // weight
    share = model.trained / model.numel if model.numel else 0.0
    if not plan.shards_params:
        groups = _stay(model, weight)
        trained = sum(count * round_up(numel, multiple) for numel, count in groups)
        owned = trained // world if plan.shards_optimizer else trained
        return Spread(trained + model.frozen, owned, 0, max((numel for numel, _ in groups), default=0))
    numels = [unit.numel for unit in model.units]
    padded = [round_up(numel, multiple) for numel in numels]
    slices = sum(padded) // world
    full = sum(padded[index] for index in keep.of(model.units)) * (world - 1) // world
    whole = model.two_largest if world > 1 or plan.params.tier is not TierKind.DEVICE else 0
    return Spread(slices + full, int(slices * share), whole, max(numels, default=0))


def _stay(model: ModelSize, weight: int) -> list[tuple[int, int]]:
    """Sizes of the groups of trained parameters that stay, and how many there are of each."""
    limit = group_limit(model.trained * weight) // weight
    full, left = divmod(max(0, model.trained - sum(model.apart)), limit)
    groups = [*((numel, 1) for numel in model.apart), (limit, full), (left, 1)]
    return [(numel, count) for numel, count in groups if numel and count]


def footprint(
    model: ModelSize,
    widths: Widths,
    plan: StatePlan,
    world: int,
    keep: Keep = KEEP,
    tiers: TierSettings | None = None,
) -> Footprint:
    """What one of `world` ranks holds, by tier. See [Note: what is held when]."""
    counts, tiers = spread(model, widths.weight, plan, world, keep), tiers or TierSettings()
    on = {tier: dict.fromkeys(("params", "master", "optimizer", "grads", "working"), 0) for tier in TierKind}
    _lay_params(on, counts, widths, plan, tiers)
    away = plan.optimizer.tier
    moved = int(tiers.share * counts.owned) if away is not TierKind.DEVICE else 0
    copies_here, copies_away = (
        widths.copies_master or not _updated_where_it_is(plan.params.tier, tier, tiers.one_memory)
        for tier in (TierKind.DEVICE, away)
    )
    _lay_state(on[TierKind.DEVICE], counts.owned - moved, widths, copies_here)
    _lay_state(on[away], moved, widths, copies_away)
    whole_sums = widths.accumulates and not plan.reduces_each_backward
    own_sums = widths.grad * _trained_here(counts, plan, world) if whole_sums else 0
    on[TierKind.DEVICE]["grads"] = max(own_sums, MASTER * (counts.owned - moved))
    on[TierKind.CPU]["grads"] = (MASTER if widths.accumulates else widths.grad) * moved
    flying, slice_ = FLYING_SHARDED if plan.shards_params else FLYING, -(-counts.group // world)
    on[TierKind.DEVICE]["working"] = widths.weight * counts.whole
    if not whole_sums:
        on[TierKind.DEVICE]["working"] += widths.grad * min((flying + FILLING) * counts.group, model.trained)
    if moved:
        # Slices that were reduced, or are being reduced, until they have arrived on the host; one rank moves the whole.
        on[TierKind.DEVICE]["working"] += widths.grad * 2 * flying * slice_ if world > 1 else 0
        on[TierKind.CPU]["working"] += MASTER * min(STRIP, slice_)  # a gradient that is being cast
    if away is TierKind.NVME:
        each = widths.moments + (MASTER if copies_away else 0)
        on[TierKind.CPU]["working"] += tiers.tiles * min(tiers.tile, slice_) * each
    if plan.params.tier is TierKind.NVME:
        on[TierKind.CPU]["working"] += tiers.blocks * slice_ * widths.weight
    return Footprint(Held(**on[TierKind.DEVICE]), Held(**on[TierKind.CPU]), Held(**on[TierKind.NVME]))


_Layout = dict[TierKind, dict[str, int]]


def _lay_params(on: _Layout, counts: Spread, widths: Widths, plan: StatePlan, tiers: TierSettings) -> None:
    on_disk = max(0, counts.params - tiers.in_memory) if plan.params.tier is TierKind.NVME else 0
    memory = TierKind.DEVICE if plan.params.tier is TierKind.DEVICE else TierKind.CPU
    on[memory]["params"] += widths.weight * (counts.params - on_disk)
    on[TierKind.NVME]["params"] += widths.weight * on_disk


def _updated_where_it_is(params: TierKind, optimizer: TierKind, one_memory: bool) -> bool:
    """The update works in the memory where a rank's share of the weights is between uses: in fp32 they are the master
    themselves, and on a disk only the moments are kept."""
    if params is TierKind.NVME:
        return False
    return one_memory or (params is TierKind.DEVICE) == (optimizer is TierKind.DEVICE)


def _lay_state(kinds: dict[str, int], numel: int, widths: Widths, with_master: bool) -> None:
    kinds["master"] += MASTER * numel if with_master else 0
    kinds["optimizer"] += widths.moments * numel


def _trained_here(counts: Spread, plan: StatePlan, world: int) -> int:
    """Elements of all trained parameters, paddings included."""
    return counts.owned * (world if plan.shards_optimizer else 1)


def sent_bytes(
    model: ModelSize, widths: Widths, plan: StatePlan, world: int, accumulation: int = 1, keep: Keep = KEEP
) -> tuple[int, int]:
    """Bytes that a rank sends in an optimizer step: (reducing gradients, gathering parameters).

    Gathers where parameters come and go: each unit for the forward of every micro-batch, and again for its backward.
    """
    counts = spread(model, widths.weight, plan, world, keep)
    share, trained = (world - 1) / world, _trained_here(counts, plan, world)
    times = accumulation if plan.reduces_each_backward else 1
    reduced = times * trained * widths.wire * share
    if not plan.shards_optimizer:
        return int(reduced), int(reduced)  # an all-reduce gathers what was reduced
    if not plan.shards_params:
        return int(reduced), int(trained * widths.weight * share)
    kept, multiple = keep.of(model.units), world * SHARD_BYTES // widths.weight
    gathered = sum(
        round_up(unit.numel, multiple) * (1 if index in kept else accumulation * (1 + unit.twice))
        for index, unit in enumerate(model.units)
    )
    return int(reduced), int(gathered * widths.weight * share)
