"""Parameters that communicate together: one flat buffer, one slice a rank, and the life cycle between the two.

[Note: the five tensors of a group]
- the parameters: what the model sees; `p.data` is a view into `full`, or a placeholder
- full: (padded_numel,) param dtype; all values. At stages 0-2 it is permanent, and an all-gather lands in it in place
- shard: (shard_numel,) param dtype; this rank's slice: of `full` itself, or of its own where `full` comes and goes
- owned: what this rank's optimizer updates: the shard, or all of `full` where optimizer state is replicated
- master: `owned` itself in fp32, a copy in fp32 of 16-bit values; the optimizer's parameter is this tensor
so master -> owned is a cast (or nothing; see master.py) and owned -> full an all-gather (or nothing).

[Note: why storage is resized]
Autograd keeps views of `full` alive from forward to backward. Dropping our reference would therefore free nothing, so
its storage is resized to zero and back: every saved view sees the regathered values again. Reads in between are caught
by the placeholders and the version guard (sharded_parameter.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from zrun_runtime.collectives import Collectives, Pending
from zrun_runtime.errors import DistributedError
from zrun_runtime.layout import Layout, lay_out
from zrun_runtime.master import MasterWeights
from zrun_runtime.plan import StatePlan
from zrun_runtime.residence import GroupSpec, Residence, ScriptsWrite
from zrun_runtime.sharded_parameter import Owner, adopt, become_placeholder, become_readable, move_view, take_values
from zrun_runtime.shards import MemoryShard, Shard, leaves_device, make_shard
from zrun_runtime.tiers import FileStore
from zrun_runtime.tiers.host import Courier


class FlatGroup(ScriptsWrite):
    """See the notes above. Built on every rank in the same order; takes rank 0's values."""

    def __init__(
        self,
        spec: GroupSpec,
        plan: StatePlan,
        collectives: Collectives,
        owner: Owner,
        file: FileStore | None = None,  # for the shard, where the plan keeps it on a disk
    ) -> None:
        self.spec = spec
        self.collectives = collectives
        first = spec.parameters[0]
        world = collectives.world
        leaves = leaves_device(plan.params.tier, first.device)
        self.comes_and_goes = plan.shards_params and not spec.keep_full and (world.size > 1 or leaves)
        self.layout = lay_out([p.numel() for p in spec.parameters], first.element_size(), world.size)
        self.full = torch.empty(self.layout.padded_numel, dtype=first.dtype, device=first.device)
        self.views = self._take_over(spec.parameters)
        self.home: Shard = MemoryShard(self.own, is_view=True)
        if self.comes_and_goes:
            self.home = make_shard(self.own, plan.params.tier, file)
        self.plan = plan
        self.weights: MasterWeights | None = None
        if spec.optimizer_group is not None:
            values = self.own if self.owned is self.shard else self.full
            self.weights = MasterWeights(self.owned, values, plan, self.comes_and_goes)
        self.ticket = collectives.register(f"a gather of {spec.label}")
        collectives.register(f"a reduction of {spec.label}")
        collectives.register(f"the edits of {spec.label} in a gathering")
        self.residence = Residence.UNSHARDED
        self.frozen = False  # has master weights and state, but is left out of steps for now
        self._pending = Pending()
        self._places = [(0, int(view.storage_offset()), view.stride()) for view in self.views]
        self._versions = [p._version for p in spec.parameters]
        if self.comes_and_goes:
            for parameter, name, view in zip(spec.parameters, spec.names, self.views, strict=True):
                adopt(parameter, name, view, owner)
            self.reshard()

    def _take_over(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Move the values into the buffer, take rank 0's, and make each parameter a view of its place."""
        for start, stop in self.layout.gaps():
            self.full[start:stop].zero_()
        views = []
        for parameter, offset in zip(parameters, self.layout.offsets, strict=True):
            views.append(view_like(self.full, parameter, offset))
            views[-1].copy_(take_values(parameter))
        self.collectives.broadcast(self.full)
        for parameter, view in zip(parameters, views, strict=True):
            parameter.data = view
        return views

    @property
    def own(self) -> Tensor:
        """This rank's place in the full values."""
        start, stop = self.layout.shard_bounds(self.collectives.world.rank)
        return self.full[start:stop]

    @property
    def shard(self) -> Tensor:
        """This rank's slice; on a disk: not its values (see `home.opened`)."""
        return self.home.values

    @property
    def owned(self) -> Tensor:
        """What this rank's optimizer updates, or shows: see [Note: the five tensors of a group]."""
        return self.shard if self.plan.shards_optimizer else self.full

    @property
    def master(self) -> nn.Parameter | None:
        """The optimizer's parameter; None if none updates the group. Its values may be elsewhere (MasterWeights)."""
        return self.weights.parameter if self.weights is not None else None

    @property
    def reduction_ticket(self) -> int:
        """The one registered after `ticket`."""
        return self.ticket + 1

    @property
    def edit_ticket(self) -> int:
        """The one registered after that."""
        return self.ticket + 2

    @property
    def trains(self) -> bool:
        """Steps update it."""
        return self.master is not None and not self.frozen

    # ---- parameters: SHARDED <-> UNSHARDED

    # Inside torch.func's transforms tensors are wrapped, and have no memory that could be sent or resized.
    @temporarily_clear_interpreter_stack()
    def start_unshard(self) -> None:
        """Begin to gather the values; nothing if they are here or on their way."""
        if self.residence is Residence.SHARDED:
            self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
            self.residence = Residence.GATHERING
            self._pending = self._gather()

    def _gather(self) -> Pending:
        courier, device = Courier.of(self.full.device), self.full.device
        with courier.issuing(device):
            pending = self.collectives.checked_all_gather(self.full, self.home.bring(self.own), self.ticket)

        def complete() -> None:
            pending.wait()
            courier.join(device)

        return Pending(complete)

    @temporarily_clear_interpreter_stack()
    def unshard(self) -> None:
        """Make the parameters readable.

        Raises:
            RanksDivergedError: another rank is gathering something else.
        """
        self.start_unshard()
        if self.residence is Residence.GATHERING:
            self._arrive()
            self.residence = Residence.UNSHARDED
            for parameter, view, version in zip(self.spec.parameters, self.views, self._versions, strict=True):
                become_readable(parameter, view, version)

    def _arrive(self) -> None:
        """Wait for the gather under way. If ranks diverged, some may still send: they get the memory, we take other."""
        try:
            self._pending.wait()
        except DistributedError:
            self._renew_storage()
            raise

    @temporarily_clear_interpreter_stack()
    def reshard(self, leave_aliases: bool = False) -> None:
        """Free the full values. What was written into them since `unshard` is lost; see `store`.

        leave_aliases: others may keep tensors that share the full values' memory (a state dict): leave it to them.
        """
        if not self.comes_and_goes or self.residence is Residence.SHARDED:
            return
        if self.residence is Residence.GATHERING:
            self._arrive()  # its memory cannot be freed while it is being written
        else:
            self._versions = [p._version for p in self.spec.parameters]
            for parameter in self.spec.parameters:
                become_placeholder(parameter)
        if leave_aliases:
            self._renew_storage()
        self.full.untyped_storage().resize_(0)
        self.residence = Residence.SHARDED

    def _renew_storage(self, keep_values: bool = False) -> None:
        """Part from the memory of `full`: it lives on as long as anyone else holds it."""
        with torch.inference_mode(False):  # what is made inside that mode cannot be trained on after it
            before, self.full = self.full, torch.empty_like(self.full)
            if keep_values:
                self.full.copy_(before)
            for index, offset in enumerate(self.layout.offsets):
                self.views[index] = view_like(self.full, self.views[index], offset)
        if self.comes_and_goes:
            for parameter, view in zip(self.spec.parameters, self.views, strict=True):
                move_view(parameter, view)
            return
        self.home.values = self.own
        if self.weights is not None:
            self.weights.move(self.owned)

    # ---- values: master -> owned -> full

    def publish(self) -> Pending:
        """Give the model what `owned` holds now. `wait()` on the result before a parameter is read."""
        if self.residence is Residence.GATHERING:
            self.reshard()  # what is on its way is old
        courier, device = Courier.of(self.full.device), self.full.device
        if self.residence is Residence.SHARDED:
            courier.join(device)
            self._versions = [version + 1 for version in self._versions]
            return Pending()
        torch.autograd.graph.increment_version(self.spec.parameters)
        self._versions = [p._version for p in self.spec.parameters]
        if self.owned is self.full:
            return Pending()
        own = self.home.bring(self.own)
        courier.join(device)
        return self.collectives.all_gather(self.full, own, self.ticket)

    def store(self, source: int | None = None) -> None:
        """Take edits of the full values into shard and master. What was not edited keeps the digits of its master.

        source: the rank whose edits count; None: every rank keeps what it wrote into its own slice.
        """
        if source is not None:
            self.collectives.broadcast(self.full, source)
        if self.comes_and_goes:
            self.home.keep(self.own)
        if self.weights is not None:
            self.weights.take_edits(self.own if self.comes_and_goes else None)
        self._versions = [p._version for p in self.spec.parameters]

    def edited(self) -> bool:
        """This rank's slice of the full values is no longer what the shard, or the master weights, say it is."""
        if self.comes_and_goes:
            with self.home.opened(changed=False) as values:
                return not torch.equal(self.own, values.to(self.own.device))
        return self.weights is not None and self.weights.differ()

    @property
    def wanted_grads(self) -> Layout:
        """How this group's reduced gradients are laid out."""
        return Layout.REPLICATED if self.owned is self.full and self.layout.world_size > 1 else Layout.SHARDED

    def nbytes(self) -> dict[str, int]:
        """Bytes that this rank holds now, by kind of state."""
        params = self.full.untyped_storage().nbytes() + self.home.nbytes
        return {"params": params, "master": self.weights.nbytes if self.weights is not None else 0}


def view_like(flat: Tensor, parameter: Tensor, offset: int) -> Tensor:
    """The place of a parameter in a flat buffer, with the parameter's own strides where those are dense."""
    if is_dense(parameter):
        return flat.as_strided(parameter.size(), parameter.stride(), flat.storage_offset() + offset)
    return flat[offset : offset + parameter.numel()].view(parameter.size())


def is_dense(tensor: Tensor) -> bool:
    """Every element has a place of its own and there are no holes, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(tensor.stride(), tensor.size(), strict=True) if sz != 1):
        if stride != expected:
            return False
        expected *= size
    return True
