"""Ops whose result has a size that depends on values, in terms of ops that are told the size.

The size is a value that the step's Python asks for (:mod:`xlatrain.bridge.capture.cut`). All else is computed in the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from xlatrain.bridge.capture.cut import UnknownValueError, ask, assume

_aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)

Call: TypeAlias = Callable[..., Any]
"""``(op, *args, **kwargs)``: runs an op as a part of the run."""


def answered(func: Any, call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute the result of an op that needs values; NotImplemented where it does not need them, or no value helps.

    Args:
        func: the op.
        call: runs others.

    Raises:
        UnknownValueError: the values are not known.
    """
    made = _OPS.get(func)
    return NotImplemented if made is None else made(call, *args, **kwargs)


def _item(call: Call, x: torch.Tensor) -> Any:
    try:
        return ask(x, torch.Tensor.item, "the value")
    except UnknownValueError:
        if x.is_floating_point() or x.is_complex():
            raise
    return assume(x, lambda: _cast(call, call(_aten.view.default, x, []), torch.int32))


def _equal(call: Call, x: torch.Tensor, other: torch.Tensor) -> bool:
    if x.shape != other.shape:
        return False
    return _item(call, call(_aten.all.default, call(_aten.eq.Tensor, x, other)))


def _allclose(
    call: Call, x: torch.Tensor, other: torch.Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> bool:
    difference = call(_aten.abs.default, call(_aten.sub.Tensor, x, other))
    allowed = call(_aten.add.Scalar, call(_aten.abs.default, call(_aten.mul.Scalar, other, rtol)), atol)
    near = call(_aten.bitwise_and.Tensor, call(_aten.le.Tensor, difference, allowed), call(_aten.ne.Scalar, difference, math.inf))
    close = call(_aten.bitwise_or.Tensor, call(_aten.eq.Tensor, x, other), near)
    if equal_nan:
        both = call(_aten.bitwise_and.Tensor, call(_aten.ne.Tensor, x, x), call(_aten.ne.Tensor, other, other))
        close = call(_aten.bitwise_or.Tensor, close, both)
    return _item(call, call(_aten.all.default, close))


def _count(x: torch.Tensor) -> int:
    return ask(x, _count_nonzero, "the number of non-zero elements")


def _count_nonzero(x: torch.Tensor) -> int:
    return int(torch.count_nonzero(x))


def _nonzero(call: Call, x: torch.Tensor) -> torch.Tensor:
    return call(_aten.nonzero_static.default, x, size=_count(x))


def _places(call: Call, mask: torch.Tensor) -> list[torch.Tensor]:
    """The indices of the true elements of a mask, one tensor for each of its dims."""
    found = _nonzero(call, mask)
    return [call(_aten.select.int, found, 1, dim) for dim in range(mask.ndim)]


def _without_masks(call: Call, x: torch.Tensor, indices: Sequence[Any]) -> Any:
    """``x`` and indices that are numbers; NotImplemented where they are so already."""
    if not any(index is not None and index.dtype in _MASKS for index in indices):
        return NotImplemented
    found: list[Any] = []
    for index in indices:
        if index is None or index.dtype not in _MASKS:
            found.append(index)
            continue
        start = len(found)
        if index.shape != x.shape[start : start + index.ndim] or index.ndim == 0:
            raise UnknownValueError("a mask of another shape")  # torch says so, with its own words
        found += _places(call, index)
    return found


def _index(call: Call, x: torch.Tensor, indices: Sequence[Any]) -> Any:
    found = _without_masks(call, x, indices)
    return NotImplemented if found is NotImplemented else call(_aten.index.Tensor, x, found)


def _put_by(op: Any) -> Callable[..., Any]:
    def put(call: Call, x: torch.Tensor, indices: Sequence[Any], values: torch.Tensor, accumulate: bool = False) -> Any:
        if values.numel() == 1 and all(index is None or index.dtype in _MASKS for index in indices):
            return NotImplemented  # a select
        found = _without_masks(call, x, indices)
        return NotImplemented if found is NotImplemented else call(op, x, found, values, accumulate)

    return put


def _masked_select(call: Call, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    x, mask = call(_aten.expand.default, x, shape), call(_aten.expand.default, mask, shape)
    if not shape:
        x, mask = call(_aten.unsqueeze.default, x, 0), call(_aten.unsqueeze.default, mask, 0)
    return call(_aten.index.Tensor, x, _places(call, mask))


def _repeat_interleave(call: Call, repeats: torch.Tensor, output_size: int | None = None) -> Any:
    if output_size is not None:
        return NotImplemented
    return call(_aten.repeat_interleave.Tensor, repeats, output_size=ask(repeats, _total, "the sum"))


def _total(x: torch.Tensor) -> int:
    return int(x.sum())


def _bincount(call: Call, x: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    try:
        size = max(minlength, ask(x, _one_more, "the largest value"))
    except UnknownValueError:
        if not minlength or not x.numel() or _item(call, call(_aten.ge.Scalar, call(_aten.max.default, x), minlength)):
            raise
        size = minlength  # assumed, and checked: the first guess is False
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype == torch.float32 else torch.float64
    added = call(_aten.ones.default, x.shape, dtype=dtype) if weights is None else _cast(call, weights, dtype)
    return call(_aten.index_add.default, call(_aten.zeros.default, [size], dtype=dtype), 0, _cast(call, x, torch.int64), added)


def _cast(call: Call, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return call(_aten._to_copy.default, x, dtype=dtype)


def _one_more(x: torch.Tensor) -> int:
    return int(x.max()) + 1 if x.numel() else 0


def _unique(
    call: Call, x: torch.Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[torch.Tensor, ...]:
    flat = call(_aten.reshape.default, x, [-1]) if x.ndim != 1 else x
    values, order = call(_aten.sort.default, flat)
    return _runs(call, values, order, x.shape, return_inverse, return_counts)


def _unique_consecutive(
    call: Call, x: torch.Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    if dim is not None and x.ndim != 1:
        return NotImplemented
    flat = call(_aten.reshape.default, x, [-1]) if x.ndim != 1 else x
    return _runs(call, flat, None, x.shape, return_inverse, return_counts)


def _runs(
    call: Call,
    values: torch.Tensor,
    order: torch.Tensor | None,
    shape: Sequence[int],
    return_inverse: bool,
    return_counts: bool,
) -> tuple[torch.Tensor, ...]:
    """The first of each run of equal values, and for each value, at its place before it was put in ``order``, its run."""
    size = values.shape[0]
    empty = call(_aten.zeros.default, [0], dtype=torch.int64)
    if size == 0:
        return values, call(_aten.zeros.default, list(shape), dtype=torch.int64) if return_inverse else empty, empty
    other = call(_aten.ne.Tensor, call(_aten.slice.Tensor, values, 0, 1, size), call(_aten.slice.Tensor, values, 0, 0, size - 1))
    first = call(_aten.cat.default, [call(_aten.ones.default, [1], dtype=torch.bool), other])
    (starts,) = _places(call, first)
    found = call(_aten.index.Tensor, values, [starts])
    inverse = counts = empty
    if return_inverse:
        run = call(_aten.sub.Tensor, call(_aten.cumsum.default, call(_aten._to_copy.default, first, dtype=torch.int64), 0), 1)
        if order is not None:
            run = call(_aten.scatter.src, call(_aten.zeros.default, [size], dtype=torch.int64), 0, order, run)
        inverse = call(_aten.view.default, run, list(shape))
    if return_counts:
        end = call(_aten.full.default, [1], size, dtype=torch.int64)
        ends = call(_aten.cat.default, [call(_aten.slice.Tensor, starts, 0, 1, starts.shape[0]), end])
        counts = call(_aten.sub.Tensor, ends, starts)
    return found, inverse, counts


_OPS: dict[Any, Callable[..., Any]] = {
    _aten._local_scalar_dense.default: _item,
    _aten.equal.default: _equal,
    _aten.allclose.default: _allclose,
    _aten.nonzero.default: _nonzero,
    _aten.index.Tensor: _index,
    _aten.index_put.default: _put_by(_aten.index_put.default),
    _aten.index_put_.default: _put_by(_aten.index_put_.default),
    _aten._index_put_impl_.default: _put_by(_aten.index_put_.default),
    _aten.masked_select.default: _masked_select,
    _aten.repeat_interleave.Tensor: _repeat_interleave,
    _aten.bincount.default: _bincount,
    _aten._unique2.default: _unique,
    _aten.unique_consecutive.default: _unique_consecutive,
}
NEEDS_VALUES = frozenset(_OPS)
"""Ops that may need values."""
