"""What a parameter is while its values are elsewhere: its name and shape remain, its values cannot be read.

[Note: placeholders]
A resharded parameter keeps its identity (optimizers, hooks and tied modules hold it) and its shape, but its data is one
NaN seen through strides of zero, and its class is ShardedParameter. Every torch function that meets one comes here
first. During a forward the owner may bring the values back (a module that reads another module's weight:
`F.linear(x, self.embedding.weight)`); outside, it is an error that names the parameter. Questions about its kind
(shape, dtype, device, grad) are answered, and what is detached from it (as `state_dict` does) is a placeholder, too.
The right shape matters to autograd, which may deliver a gradient to a parameter whose values are no longer needed; and
whatever slips past Python reads NaN, never freed memory.

[Note: version guard]
Autograd saved views of the full values. Their memory is freed between uses, so reading one then would crash. The
parameter's version is therefore raised when it is resharded and put back when it is unsharded: autograd itself refuses
to read in between, and after a step, where the old values no longer exist.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from zrun_runtime.errors import ParameterError


class ZeroParamStatus(IntEnum):
    """Where the values of a parameter are, in DeepSpeed's words."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class Owner(Protocol):
    """Whoever can bring a parameter's values back."""

    def recall(self, parameter: nn.Parameter) -> bool:
        """Unshard the parameter if this is a moment at which that is right; say whether it was."""
        ...

    def give_up(self, parameter: nn.Parameter) -> Tensor:
        """The full values, for a new owner."""
        ...


@runtime_checkable
class Lender(Owner, Protocol):
    """An owner that lets values be compared and written between uses, too."""

    def lend(self, parameter: nn.Parameter, writes: bool) -> AbstractContextManager[bool]:
        """The values for one call, which all ranks make. Gives False if it is to be left out.

        Args:
            writes: the call is an in-place one; otherwise it compares.
        """
        ...


@dataclass(frozen=True)
class _Record:
    label: str  # the parameter's name in the model
    view: Tensor  # its full-size values; their storage is empty while it is sharded
    blank: Tensor  # what it shows instead then
    owner: Callable[[], Owner | None]  # a weak reference, as it holds the parameter, which then would hold itself


_records = WeakIdKeyDictionary()  # parameter -> _Record; an entry goes when its parameter does

_calls = itertools.count()
_call = 0  # the number of the call that met placeholders last

_set_version = torch._C._autograd._unsafe_set_version_counter

# Answered from the placeholder itself: they do not read values.
_HARMLESS = {
    "__hash__", "__len__", "__setstate__", "_has_compatible_shallow_copy_type", "_is_view", "dim", "element_size",
    "get_device", "is_complex", "is_floating_point", "is_pinned", "ndimension", "nelement", "numel", "register_hook",
    "register_post_accumulate_grad_hook", "requires_grad_", "size",
}  # fmt: skip
_HARMLESS_PROPERTIES = {
    "_backward_hooks", "_base", "_cdata", "_grad", "_grad_fn", "_post_accumulate_grad_hooks", "_version", "device",
    "dtype", "grad", "grad_fn", "is_cpu", "is_cuda", "is_hpu", "is_ipu", "is_leaf", "is_maia", "is_meta", "is_mkldnn",
    "is_mps",
    "is_mtia", "is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "is_vulkan", "is_xla", "is_xpu", "itemsize",
    "layout", "name", "names", "nbytes", "ndim", "output_nr", "requires_grad", "retains_grad", "shape",
}  # fmt: skip
_CASTS = {"to", "type", "float", "double", "half", "bfloat16", "cuda", "cpu"}
_OF_THE_VIEW = {"stride", "is_contiguous", "storage_offset", "is_non_overlapping_and_dense"}


class ShardedParameter(nn.Parameter):
    """See [Note: placeholders]."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        is_property = name in ("__get__", "__set__", "__delete__")
        prop = getattr(getattr(func, "__self__", None), "__name__", "") if is_property else ""
        with torch._C.DisableTorchFunctionSubclass():
            if name in _HARMLESS or prop in _HARMLESS_PROPERTIES:
                return func(*args, **kwargs)
            if name in _OF_THE_VIEW:
                return func(_records[args[0]].view, *args[1:], **kwargs)
            if name in _CASTS and _keeps_dtype(func, args, kwargs):
                return args[0]  # Module.to(device): its slices stay where they are. It ...
            if prop == "data" and name == "__set__" and args[0] is args[1]:
                return None  # ... ends with this
        global _call
        _call = next(_calls)
        with ExitStack() as stack:
            for parameter in _placeholders(args, kwargs):
                owner = _records[parameter].owner()
                if owner is not None and owner.recall(parameter):
                    continue
                if name == "detach":
                    return _detached(parameter)
                if prop == "data" and name == "__get__" and isinstance(owner, Lender):
                    return parameter  # so that `p.data.normal_()` comes back here
                writes = name.endswith("_") and not name.endswith("__")
                if not (isinstance(owner, Lender) and (writes or name == "equal")):
                    raise _unreadable(_records[parameter].label, prop or name)
                if not stack.enter_context(owner.lend(parameter, writes)):
                    return parameter
                stack.enter_context(torch.no_grad())
            return func(*args, **kwargs)

    # Names by which DeepSpeed's scripts know a sharded parameter and ask it for its true size.

    @property
    def ds_id(self) -> int:
        """A number of its own."""
        return id(self)

    @property
    def ds_status(self) -> ZeroParamStatus:
        """NOT_AVAILABLE, as long as it is a placeholder."""
        return ZeroParamStatus.NOT_AVAILABLE

    @property
    def ds_numel(self) -> int:
        """Elements of the whole parameter."""
        return self.numel()

    @property
    def ds_shape(self) -> torch.Size:
        """Shape of the whole parameter."""
        return self.shape

    def partition_numel(self) -> int:
        """Elements of a rank's part."""
        return -(-self.numel() // dist.get_world_size())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedParameter({_records[self].label!r}, shape={tuple(self.shape)}, values elsewhere)"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        owner = _records[self].owner()
        if owner is None or not owner.recall(self):
            raise _unreadable(_records[self].label, "deepcopy")
        return self.__deepcopy__(memo)  # now that of nn.Parameter

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _unreadable(_records[self].label, "pickle")


def name_as_whole(parameter: nn.Parameter) -> None:
    """Give a parameter that may be sharded the names of a placeholder, which hides them while it is one."""
    status = int(ZeroParamStatus.AVAILABLE)  # a plain number: these go into whatever saves the parameter with its state
    vars(parameter).update(ds_id=id(parameter), ds_status=status, ds_numel=parameter.numel(), ds_shape=parameter.shape)


def adopt(parameter: nn.Parameter, label: str, view: Tensor, owner: Owner) -> None:
    """Manage a parameter whose full-size values are `view`."""
    blank = torch.full((), float("nan"), dtype=view.dtype, device=view.device).expand(view.shape)
    _records[parameter] = _Record(label, view, blank, weakref.ref(owner))


def _detached(parameter: ShardedParameter) -> Tensor:
    """A placeholder of the same name, for ever: nobody brings its values back."""
    with torch._C.DisableTorchFunctionSubclass():
        blank = torch.Tensor._make_subclass(ShardedParameter, parameter.detach().as_subclass(Tensor), False)
    _records[blank] = replace(_records[parameter], owner=_nobody)
    return blank


def _nobody() -> None:
    return None


def move_view(parameter: nn.Parameter, view: Tensor) -> None:
    """The full-size values of a managed parameter will be here from now on."""
    _records[parameter] = replace(_records[parameter], view=view)


def become_placeholder(parameter: nn.Parameter) -> None:
    """Take the values away. Their memory is the caller's to free."""
    parameter.data = _records[parameter].blank
    parameter.__class__ = ShardedParameter
    torch.autograd.graph.increment_version(parameter)


def become_readable(parameter: nn.Parameter, view: Tensor, version: int) -> None:
    """Show the values again, at the version that they had (see [Note: version guard])."""
    parameter.__class__ = nn.Parameter
    parameter.data = view
    _set_version((parameter,), (version,))


def take_values(parameter: nn.Parameter) -> Tensor:
    """The full values of a parameter that gets a new owner; the old one, if any, lets go of it.

    Raises:
        ParameterError: the old owner does not let go.
    """
    if type(parameter) is not ShardedParameter:
        return parameter.detach()
    owner = _records[parameter].owner()
    if owner is None:
        raise _unreadable(_records[parameter].label, "its engine is gone")
    return owner.give_up(parameter)


def call_number() -> int:
    """A number for the torch call under way that met placeholders; it never falls."""
    return _call


def _keeps_dtype(cast: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """The cast makes of a tensor like this parameter one of the same dtype; maybe elsewhere."""
    like = torch.empty((0,) * args[0].dim(), dtype=args[0].dtype, device=args[0].device)
    return bool(cast(like, *args[1:], **kwargs).dtype is like.dtype)


def _placeholders(args: Any, kwargs: Any) -> list[ShardedParameter]:
    """The placeholders among a function's arguments, those within lists too, each once."""
    found: dict[int, ShardedParameter] = {}
    waiting = [*args, *kwargs.values()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (list, tuple)):
            waiting.extend(value)
        elif type(value) is ShardedParameter:
            found[id(value)] = value
    return sorted(found.values(), key=lambda p: _records[p].label)


def _unreadable(label: str, what: str) -> ParameterError:
    return ParameterError(
        f"{label}: its values are sharded over the ranks and cannot be read here ({what})",
        "read or edit it inside `with zrun_runtime.zero.GatheredParameters([parameter]):`, on every rank; "
        "engine.state_dict() gathers a whole model",
    )
