"""Indexing with :class:`MaskedRows`, and scatters of them."""

from __future__ import annotations

from typing import Any

import torch

from xlatrain.bridge.capture.masked_rows.masked_rows import MaskedRows, derived, take
from xlatrain.bridge.capture.masked_rows.rules import all_rows, extreme, goes_beside, rule_of, together

# By index


@rule_of("__getitem__", (torch.Tensor,))
def _getitem(func: Any, args: Any, kwargs: Any) -> Any:
    x, index = args
    if type(x) is MaskedRows:
        return _part(x, index)
    one = together(index if isinstance(index, tuple) else (index,))
    if one is None or one.rows.ndim != 1:
        return NotImplemented
    if type(index) is MaskedRows:
        return NotImplemented if one.dtype == torch.bool else one.like(take(x, one.rows), 0)
    if any(not (part is None or part is Ellipsis or type(part) in (MaskedRows, slice, int)) for part in index):
        return NotImplemented
    if any(type(part) is MaskedRows and (part.dtype == torch.bool or part.rows.ndim != 1) for part in index):
        return NotImplemented
    dims = [part for part in index if type(part) is not int]  # torch takes numbers out first
    places = [place for place, part in enumerate(dims) if type(part) is MaskedRows]
    adjacent = places[-1] - places[0] + 1 == len(places)
    if Ellipsis in [part for part in index if type(part) is not MaskedRows]:
        return NotImplemented
    return one.like(take(x, tuple(map(all_rows, index))), places[0] if adjacent else 0)


def _part(x: MaskedRows, index: Any) -> Any:
    parts = list(index) if type(index) is tuple else [index]
    if type(parts[0]) is MaskedRows and len(parts) == 1 and parts[0].dtype == torch.bool and parts[0].is_beside(x):
        mask = parts[0]
        if x.axis == 0 and mask.rows.ndim == 1:  # some of those selected
            return MaskedRows.of_mask(x.rows, derived(x.valid, (mask.rows,), lambda: mask.rows & x.valid))
        return NotImplemented
    if any(not (part is None or part is Ellipsis or type(part) in (int, slice)) for part in parts):
        return NotImplemented
    given = sum(part is not None and part is not Ellipsis for part in parts)
    if any(part is Ellipsis for part in parts):
        place = next(place for place, part in enumerate(parts) if part is Ellipsis)
        parts[place : place + 1] = [slice(None)] * (x.rows.ndim - given)
    dim, axis = 0, 0
    for part in parts:
        if part is None:
            axis += 1
            continue
        if dim == x.axis:
            if part != slice(None):
                return NotImplemented
            break
        dim += 1
        axis += type(part) is slice
    else:
        axis += x.axis - dim
    return x.like(take(x.rows, tuple(parts)), axis)


@rule_of("__setitem__", (torch.Tensor,))
def _setitem(func: Any, args: Any, kwargs: Any) -> Any:
    """Parts of each selected row, as ``x[mask][..., 0] = 1``."""
    x, index, value = args
    if type(x) is not MaskedRows or any(isinstance(part, torch.Tensor) for part in (index if type(index) is tuple else (index,))):
        return NotImplemented
    part = _part(x, index)
    if part is NotImplemented or not goes_beside(part, value):
        return NotImplemented
    func(part.rows, (), all_rows(value))
    return None


def _go_to(x: Any, index: Any, source: Any) -> bool:
    """Whether the rows of ``source`` and those of their ``index`` have one mask, and the tensor where they go has none."""
    masked = type(index) is MaskedRows and type(source) is MaskedRows and type(x) is not MaskedRows
    return masked and together((index, source)) is not None


def _added(x: MaskedRows) -> torch.Tensor:
    return x.filled(0)


@rule_of("index_add index_add_")
def _index_add(func: Any, args: Any, kwargs: Any) -> Any:
    x, dim, index, source = (
        args if len(args) == 4 else (*args, *[kwargs[name] for name in ("dim", "index", "source")[len(args) - 1 :]])
    )
    if not _go_to(x, index, source) or index.rows.ndim != 1 or source.axis != int(dim) % x.ndim:
        return NotImplemented
    alpha = {"alpha": kwargs["alpha"]} if "alpha" in kwargs else {}
    return func(x, dim, index.rows, _added(source), **alpha)


@rule_of("scatter_add scatter_add_ scatter_reduce scatter_reduce_")
def _scatter(func: Any, args: Any, kwargs: Any) -> Any:
    given: tuple[Any, ...] = args if len(args) > 3 else (*args, None, None)
    x, dim, index, source, *reduce = given
    reduce = reduce[0] if reduce else kwargs.get("reduce", "sum")
    if (
        not _go_to(x, index, source)
        or index.axis != source.axis
        or index.axis != int(dim) % x.ndim
        or reduce not in ("sum", "add", "amax", "amin")
    ):
        return NotImplemented
    rows = _added(source) if reduce in ("sum", "add") else source.filled(extreme(source, largest=reduce == "amin"))
    return func(x, dim, index.rows, rows, *args[4:], **kwargs)


@rule_of("scatter scatter_")
def _scatter_number(func: Any, args: Any, kwargs: Any) -> Any:
    """``x.scatter_(0, rows, 1)``, also with ``reduce="add"``: a number goes to the places that selected rows name."""
    x, dim, index, value = args if len(args) == 4 else (*args, kwargs.get("value"))
    reduce = kwargs.get("reduce")
    if type(index) is not MaskedRows or type(x) is MaskedRows or type(value) not in (int, float) or reduce not in (None, "add"):
        return NotImplemented
    if index.axis != int(dim) % x.ndim or not kwargs.keys() <= {"value", "reduce"}:
        return NotImplemented
    chosen = index.like(torch.ones_like(index.rows, dtype=x.dtype)).filled(0)
    if reduce == "add":
        made = x.scatter_add(dim, index.rows, chosen * value)
    else:
        made = torch.where(torch.zeros_like(x).scatter_add(dim, index.rows, chosen) != 0, value, x)
    return x.copy_(made) if func.__name__.endswith("_") else made
