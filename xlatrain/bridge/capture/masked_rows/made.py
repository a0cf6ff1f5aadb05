"""Where user code gets rows by a mask: indexing, ``masked_select``, ``nonzero``, ``torch.where`` of a mask alone."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from xlatrain.bridge.capture.cut import UnknownValueError, ask, cut_to
from xlatrain.bridge.capture.masked_rows import by_index as _by_index  # noqa: F401  rules
from xlatrain.bridge.capture.masked_rows import reductions as _reductions  # noqa: F401
from xlatrain.bridge.capture.masked_rows.masked_rows import MaskedRows, beside, exactly, take, valid_of
from xlatrain.bridge.patches import patched
from xlatrain.bridge.torchscript import scripting_with

_TRACED = (FakeTensor, FunctionalTensor)
_TORCH = f"{Path(torch.__file__).parent / '_'}"
"""What torch calls itself, as an op's shape is looked for, is no user code."""


def _is_unknown(mask: Any) -> bool:
    """Whether this is a mask of the run, and not computed from constants alone."""
    if not (isinstance(mask, _TRACED) and mask.dtype == torch.bool and mask.ndim > 0 and mask.numel() > 0):
        return False
    frame: Any = sys._getframe(1)
    while frame.f_code.co_filename == __file__:
        frame = frame.f_back
    if frame.f_code.co_filename.startswith(_TORCH):
        return False
    found: tuple[int, bool] | None = getattr(mask, "_xlatrain_unknown", None)
    if found is None or found[0] != mask._version:
        try:
            found = mask._version, bool(cut_to(mask).inputs)
        except UnknownValueError:
            found = mask._version, True
        mask._xlatrain_unknown = found  # pyright: ignore[reportAttributeAccessIssue]
    return found[1]


def _mask_of(x: torch.Tensor, index: Any) -> tuple[torch.Tensor, tuple[Any, ...], int] | None:
    """The mask of ``x[:, mask, :2]``, all parts of the index, and the place of the mask in it; None for any other index."""
    parts = index if type(index) is tuple else (index,)
    masks = [place for place, one in enumerate(parts) if isinstance(one, _TRACED) and one.dtype == torch.bool]
    if len(masks) != 1 or not isinstance(x, torch.Tensor) or isinstance(x, MaskedRows):
        return None
    (place,) = masks
    mask = parts[place]
    basic = all(type(one) in (slice, int) for one in (*parts[:place], *parts[place + 1 :]))
    if not basic or tuple(x.shape[place : place + mask.ndim]) != tuple(mask.shape) or not _is_unknown(mask):
        return None
    return mask, parts, place


def _selected(x: torch.Tensor, mask: torch.Tensor, parts: tuple[Any, ...], place: int) -> MaskedRows:
    """``x[parts]``: by the numbers and slices first, as torch does it, then by the mask."""
    before, after = parts[:place], parts[place + 1 :]
    if not all(map(_is_whole, (*before, *after))):
        x = take(x, (*before, *[slice(None)] * mask.ndim, *after))
    return MaskedRows.of_mask(x, mask, sum(type(one) is slice for one in before))


def _is_whole(part: Any) -> bool:
    return type(part) is slice and part == slice(None)


def _places(mask: torch.Tensor) -> list[MaskedRows]:
    """The indices of the True elements, for each dim of the mask."""
    count, found = mask.numel(), []
    for dim, size in enumerate(mask.shape):
        after = math.prod(mask.shape[dim + 1 :])
        every = torch.arange(count, device=mask.device)
        found.append(MaskedRows.of_mask(every.div(after, rounding_mode="floor").remainder(size), mask.reshape(-1)))
    for one in found:
        one.valid = valid_of(mask)
    return found


def _select(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return MaskedRows.of_mask(x, mask) if x.shape == mask.shape else MaskedRows.of_mask(*torch.broadcast_tensors(x, mask))


def _select_written(x: torch.Tensor, index: Any, value: Any) -> bool:
    """``x[mask] = value`` where the mask selects the value; False where it does not."""
    found = _mask_of(x, index) if type(value) is MaskedRows else None
    if found is None or value.axis != found[2] or value.rows.ndim != x.ndim - found[0].ndim + 1:
        return False
    mask, parts, axis = found
    if not all(map(_is_whole, (*parts[:axis], *parts[axis + 1 :]))):
        return False
    if not value.is_beside(MaskedRows.of(value.rows, valid_of(mask))):
        return False
    kept = beside(value.valid, value.rows, axis).reshape(*[1] * axis, *mask.shape, *[1] * (x.ndim - axis - mask.ndim))
    x.copy_(torch.where(kept, value.rows.reshape(x.shape).to(x.dtype), x))
    return True


def _put(x: torch.Tensor, index: Any, value: Any) -> bool:
    """``x[index] = value`` where the index is made of selected rows; False where it is any other."""
    parts = index if type(index) is tuple else (index,)
    if type(x) is MaskedRows or not any(type(one) is MaskedRows for one in parts):
        return False
    found: list[MaskedRows] = []
    for one in parts:
        found += _places(one) if type(one) is not MaskedRows and _is_unknown(one) else [one]
    first, *others = [*found, *([value] if type(value) is MaskedRows else [])]
    if any(type(one) is not MaskedRows or one.rows.ndim != 1 or one.dtype == torch.bool for one in found):
        return False
    if not all(one.is_beside(first) and one.axis == 0 for one in others):
        return False
    if type(value) is not MaskedRows and isinstance(value, torch.Tensor) and value.ndim > x.ndim - len(found):
        return False
    size = x.shape[0]
    place = torch.where(first.valid, first.rows.remainder(size), size)  # a row more, for what is not selected
    wide = torch.cat([x, x[:1].detach()])
    rows = value.rows if type(value) is MaskedRows else value
    wide[(place, *(one.rows for one in found[1:]))] = rows
    x.copy_(wide[:-1])
    return True


def _put_in_order(x: torch.Tensor, index: Any, value: Any) -> bool:
    """``x[mask] = value`` where the k-th place that the mask selects gets the k-th row of the value; False for any other index.

    It is torch's own where the number of places is known before the step.
    """
    found = _mask_of(x, index)
    if found is None or found[2] != 0 or not isinstance(value, torch.Tensor) or value.dtype != x.dtype:
        return False
    mask, parts, _ = found
    rows, valid, axis = (value.rows, value.valid, value.axis) if type(value) is MaskedRows else (value, None, 0)
    if len(parts) > 1 or axis or tuple(rows.shape[1:]) != tuple(x.shape[mask.ndim :]) or (valid is None and len(rows) < 2):
        return False
    chosen = valid_of(mask)
    if valid is None and _number_is_known(chosen):
        return False
    order = chosen.to(torch.int64).cumsum(0) - 1
    if valid is None:
        differs = chosen.sum() != len(rows)
    else:
        count = valid.sum()
        differs = (chosen.sum() != count) & (count != 1)  # one row goes everywhere
        order = torch.argsort(~valid, stable=True)[torch.minimum(order, count - 1).clamp(min=0)]
    if differs:  # assumed not to, and checked
        raise RuntimeError("shape mismatch: value tensor cannot be broadcast to the indexing result, which has other rows")
    placed = rows.index_select(0, order.clamp(0, len(rows) - 1)).reshape(x.shape)
    x.copy_(torch.where(mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim)), placed, x))
    return True


def _number_is_known(mask: torch.Tensor) -> bool:
    """Whether the number of selected places is known before the step, which then is one for as many."""
    try:
        return ask(mask, lambda value: int(value.sum()), "the number of selected places") is not None
    except UnknownValueError:
        return False


@contextlib.contextmanager
def masked_rows() -> Iterator[None]:
    """Within the block what masks select are :class:`MaskedRows`."""
    originals: dict[str, Callable[..., Any]] = {
        name: getattr(torch, name) for name in ("masked_select", "nonzero", "where", "argwhere")
    }
    assign = torch.Tensor.__setitem__
    apply = torch.autograd.Function.__dict__["apply"].__func__

    def get_item(self: torch.Tensor, index: Any) -> Any:
        found = _mask_of(self, index)
        return take(self, index) if found is None else _selected(self, *found)

    def set_item(self: torch.Tensor, index: Any, value: Any) -> None:
        if not any(put(self, index, value) for put in (_select_written, _put, _put_in_order)):
            assign(self, *((index, value) if type(self) is MaskedRows else exactly((index, value))))

    def masked_select(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs or isinstance(args[0], MaskedRows) or not _is_unknown(args[1]):
            return originals["masked_select"](*args, **kwargs)
        return _select(*args)

    def nonzero(*args: Any, as_tuple: bool = False, **kwargs: Any) -> Any:
        mask: Any = args[0] if args else None
        if isinstance(mask, _TRACED) and mask.dtype != torch.bool and mask.ndim:
            mask = mask.ne(0)
        if kwargs or not _is_unknown(mask):
            return originals["nonzero"](*args, as_tuple=as_tuple, **kwargs)
        places = _places(mask)
        return tuple(places) if as_tuple else places[0].like(torch.stack([one.rows for one in places], 1))

    def where(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and not isinstance(args[0], MaskedRows):
            return nonzero(args[0], as_tuple=True)
        return originals["where"](*args, **kwargs)

    def argwhere(*args: Any, **kwargs: Any) -> Any:
        return originals["argwhere"](*args, **kwargs) if kwargs else nonzero(*args)

    def apply_exactly(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return apply(cls, *exactly(args), **exactly(kwargs))  # torch asks no subclass there

    with patched(
        [
            (torch.Tensor, "__getitem__", get_item),
            (torch.Tensor, "__setitem__", set_item),
            (torch, "masked_select", masked_select),
            (torch.Tensor, "masked_select", masked_select),
            (torch, "nonzero", nonzero),
            (torch.Tensor, "nonzero", nonzero),
            (torch, "where", where),
            (torch, "argwhere", argwhere),
            (torch.Tensor, "argwhere", argwhere),
            (torch.autograd.Function, "apply", classmethod(apply_exactly)),
            (torch.jit, "script", scripting_with([(torch, name, value) for name, value in originals.items()])),
        ]
    ):
        yield
