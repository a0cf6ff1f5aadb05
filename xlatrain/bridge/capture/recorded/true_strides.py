"""Fake tensors whose strides are those of torch's CPU kernels, also where a dim of size 1 leaves the order of memory open.

Images of one channel, or of one pixel, are contiguous and in ``channels_last`` at once. Which of the two a convolution or a
pooling goes on with is told by strides of dims that have one element, and kernels choose them otherwise than the functions by
which torch describes results on fake tensors. The order of memory is the order in which dropout behind it draws.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from xlatrain.bridge.capture.cut import really
from xlatrain.bridge.capture.onednn import with_onednn
from xlatrain.bridge.errors import CaptureError
from xlatrain.bridge.random import drawn_by_torch
from xlatrain.bridge.tensors.strides import Strides, channels_last_strides, contiguous_strides

_KNOWN: dict[Hashable, tuple[Strides, ...] | None] = {}
_MOST_KNOWN = 4096
_META = torch.device("meta")


class TrueStrides(FakeTensorMode):
    """A mode of fake tensors that has ops with such images run on zeros of their size, for the strides of their results.

    This happens once for each form of an op, where torch draws the numbers of the step, on this very CPU.
    """

    def dispatch(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        found = super().dispatch(func, types, args, kwargs or {})
        return _laid(func, args, kwargs or {}, found, self._with_strides)

    def _with_strides(self, value: Any, strides: Strides) -> Any:
        if not isinstance(value, FakeTensor) or value.stride() == strides:
            return value
        with torch._C._DisableTorchDispatch():
            meta = torch.empty(0, dtype=value.dtype, device=_META)
            storage, offset = value.untyped_storage(), value.storage_offset()
            meta.set_(storage, offset, value.shape, strides)  # pyright: ignore[reportCallIssue, reportArgumentType]
            return FakeTensor(self, meta, value.fake_device)


_Decomposition = Callable[..., Any]


def laid_out(table: Mapping[torch._ops.OpOverload, _Decomposition]) -> dict[torch._ops.OpOverload, _Decomposition]:
    """Decompositions whose results have the strides of the op itself, which those of their last op may not have.

    Draws are left as they are: they stand for methods that fill a tensor, whose strides they keep. So is the backward pass,
    behind which nothing draws; oneDNN of torch 2.13 writes beside its memory in that of some layouts.
    """
    return {op: one if _is_left(op) else functools.partial(_decomposed, op, one) for op, one in table.items()}


def _is_left(op: torch._ops.OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags or "backward" in op._schema.name


def _decomposed(op: torch._ops.OpOverload, decomposition: _Decomposition, *args: Any, **kwargs: Any) -> Any:
    return _laid(op, args, kwargs, decomposition(*args, **kwargs), _in_order)


def _in_order(value: Any, strides: Strides) -> Any:
    """The tensor with its dims in another order of memory.

    Raises:
        CaptureError: the strides are those of no order.
    """
    if not isinstance(value, torch.Tensor) or len(strides) != value.dim() or value.stride() == strides:
        return value  # what the op leaves out
    shape = value.shape
    order = sorted(range(len(strides)), key=lambda dim: (-strides[dim], shape[dim] == 1, dim))
    places = [order.index(dim) for dim in range(len(order))]
    dense = contiguous_strides([shape[dim] for dim in order])
    if strides != tuple(dense[place] for place in places):
        raise CaptureError(
            f"no order of memory gives a tensor of the shape {tuple(shape)} the strides {strides}, as torch's op does"
        )
    return value.permute(order).clone(memory_format=torch.contiguous_format).permute(places)


def _laid(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], found: Any, with_strides: Callable[[Any, Strides], Any]
) -> Any:
    """The results of an op, with the strides that torch's kernel gives."""
    if func.namespace != "aten" or func._schema.is_mutable or not drawn_by_torch():
        return found
    results = found if isinstance(found, tuple | list) else (found,)
    if not any(isinstance(one, FakeTensor) and one.dim() in (4, 5) for one in results):
        return found
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not any(map(_is_open, (*tensors, *results))):
        return found
    true = _true_strides(func, leaves, spec)
    if true is None:
        return found
    made = [with_strides(one, strides) for one, strides in zip(results, true, strict=True)]
    return made if isinstance(found, list) else tuple(made) if isinstance(found, tuple) else made[0]


def _is_open(value: Any) -> bool:
    """Whether an image lies in memory in neither of torch's two orders, or not clearly in one."""
    if not isinstance(value, torch.Tensor) or value.dim() not in (4, 5):
        return False
    shape, strides = value.shape, value.stride()
    if shape[1] == 1 or max(shape[2:]) <= 1:
        return True
    return strides != contiguous_strides(shape) and (shape[0] == 1 or strides != channels_last_strides(shape))


def _true_strides(func: Any, leaves: Sequence[Any], spec: Any) -> tuple[Strides, ...] | None:
    """The strides of each result of an op; None where it cannot run on zeros."""
    try:
        key = (func, spec, *(_form(leaf) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf) for leaf in leaves))
        if key in _KNOWN:
            return _KNOWN[key]
    except TypeError:  # a leaf that has no hash
        return None
    if len(_KNOWN) >= _MOST_KNOWN:
        _KNOWN.clear()
    _KNOWN[key] = found = None
    with contextlib.suppress(Exception), really(), with_onednn():
        args, kwargs = pytree.tree_unflatten([_zeros(one) if isinstance(one, torch.Tensor) else one for one in leaves], spec)
        state = torch.get_rng_state()
        try:
            results = func(*args, **kwargs)
        finally:
            torch.set_rng_state(state)
        results = results if isinstance(results, tuple | list) else (results,)
        _KNOWN[key] = found = tuple(one.stride() if isinstance(one, torch.Tensor) else () for one in results)
    return found


def _form(tensor: torch.Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).zero_()
