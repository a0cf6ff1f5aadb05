"""Tensors whose values are still on the tape after their block has ended.

They keep the identity, the class (a subclass of it, for a time) and the look of ordinary CPU tensors. Initialising, converting
and copying are recorded as inside the block; anything that needs values gives them values in host memory, and they are ordinary
tensors from then on. A mesh takes them without that: :func:`xlatrain.bridge.lazy_init.evaluate.born`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from xlatrain.bridge.lazy_init.evaluate import host_values
from xlatrain.bridge.lazy_init.recorder import recording
from xlatrain.bridge.lazy_init.slices import resolve
from xlatrain.bridge.lazy_init.tape import Operand, Storage, forget, operand_of
from xlatrain.bridge.tensors.lazy import NEEDS_NO_VALUES

_T: Any = torch.Tensor
_COMPATIBLE: Any = torch._has_compatible_shallow_copy_type  # pyright: ignore[reportPrivateImportUsage]
_ONLY_LOOKS = NEEDS_NO_VALUES | {_COMPATIBLE, _T.grad.__get__, _T.grad.__set__}
_CONVERSIONS = ("to", "type", "float", "double", "half", "bfloat16", "cpu", "clone", "detach", "contiguous", "type_as")
_VIEWS = ("view", "reshape", "t", "transpose", "narrow", "select", "__getitem__", "__setitem__", "view_as", "chunk", "split")
_RECORDED = frozenset(
    [
        *(getattr(_T, name) for name in (*_CONVERSIONS, *_VIEWS)),
        *(getattr(_T, name) for name in dir(_T) if name.endswith("_") and not name.endswith("__") and not name.startswith("_")),
        *(_T.data.__get__, _T.data.__set__, _T.T.__get__),
        *(torch.clone, torch.detach, torch.t, torch.transpose),
    ]
) - {_T.share_memory_, _T.apply_, _T.map_, _T.map2_, _T.requires_grad_}  # fmt: skip


class Deferred:
    """The class of a tensor without values."""

    _deferred: Storage

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ONLY_LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _RECORDED or getattr(func, "__module__", None) == "torch.nn.init":
            return _record(func, args, kwargs)
        for tensor in pytree.tree_leaves((tuple(args), kwargs)):
            if isinstance(tensor, Deferred):
                settle(tensor)  # pyright: ignore[reportArgumentType]
        # other subclasses among the arguments (live tensors) still have their say
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        kind = type(self).__bases__[1]
        values = self.detach().clone()  # pyright: ignore[reportAttributeAccessIssue]
        undefer(values)
        with torch._C.DisableTorchFunctionSubclass():
            copy = values if kind is torch.Tensor else kind(values, requires_grad=self.requires_grad)  # pyright: ignore
        defer([copy])
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        settle(self)  # pyright: ignore[reportArgumentType]
        return self.__reduce_ex__(protocol)


def _record(func: Any, args: Any, kwargs: Any) -> Any:
    """Go on with the tape of the first deferred argument; one of another block is given values unless it is only looked at."""
    deferred = [leaf for leaf in pytree.tree_leaves((tuple(args), kwargs)) if isinstance(leaf, Deferred)]
    with recording(deferred[0]._deferred.tape, settle), torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
        defer([*(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)), *deferred])  # pyright: ignore
    return result


def is_deferred(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has no values yet."""
    return operand_of(tensor) is not None


def defer(tensors: Iterable[torch.Tensor]) -> None:
    """Make those of ``tensors`` that have no values :class:`Deferred`."""
    for tensor in tensors:
        with torch._C.DisableTorchFunctionSubclass():
            operand = operand_of(tensor)
            if operand is None:
                continue
            if not isinstance(tensor, Deferred):
                tensor.__class__ = _deferred_class(type(tensor))
            elif tensor._deferred is operand.storage:
                continue
            tensor._deferred = operand.storage  # pyright: ignore[reportAttributeAccessIssue]
            operand.storage.holders.append(weakref.ref(tensor))


def defer_all() -> None:
    """Find every tensor without values that is alive, wherever user code keeps it."""
    # A tensor may be in a list, a closure, a C structure: the collector is the only one that knows them all.
    defer([found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)])


def undefer(tensor: torch.Tensor) -> None:
    """Give ``tensor`` its own class back; the caller gives it values."""
    if isinstance(tensor, Deferred):
        holders = tensor._deferred.holders
        holders[:] = [reference for reference in holders if reference() is not tensor]
        del tensor._deferred
        tensor.__class__ = type(tensor).__bases__[1]


def settle(tensor: torch.Tensor) -> None:
    """Give a tensor, and all that share its storage, values in host memory."""
    with _disable_current_modes(), torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        operand = operand_of(tensor)
        if operand is None:
            return
        storage = operand.storage
        values = host_values(Operand(storage, storage.root))
        memory = torch.empty_strided(storage.root.size, storage.root.stride, dtype=storage.root.dtype)
        memory.copy_(values)
        tensors = {(storage, storage.root): memory}
        for holder in _holders(storage):
            view = resolve(Operand(storage, operand_of(holder).geometry), tensors)  # pyright: ignore[reportOptionalMemberAccess]
            undefer(holder)
            holder.data = view
        forget(storage)


def _holders(storage: Storage) -> list[torch.Tensor]:
    """The deferred tensors whose memory ``storage`` is."""
    known = [tensor for reference in storage.holders if (tensor := reference()) is not None]
    if known:
        return [tensor for tensor in known if isinstance(tensor, Deferred) and tensor._deferred is storage]
    everything = (found for found in gc.get_objects() if issubclass(type(found), torch.Tensor))  # inside the block
    return [tensor for tensor in everything if (operand := operand_of(tensor)) is not None and operand.storage is storage]


_CLASSES: dict[type, type] = {}


def _deferred_class(kind: type) -> type:
    """The deferred subclass of a tensor class; its bases are Deferred and the class itself."""
    if kind not in _CLASSES:
        _CLASSES[kind] = type(kind)(f"Deferred{kind.__name__}", (Deferred, kind), {"__module__": __name__})
    return _CLASSES[kind]
