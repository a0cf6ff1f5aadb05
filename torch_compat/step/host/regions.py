"""Slices and entries whose places are others for each step, while it is captured: a queue's, CutMix's boxes, random crops.

``x[:, start : start + 16]`` and ``x[start]`` have one size, and only the place is an input of the program: a counter, a number
that a buffer tells before the step, one that is drawn. It is a copy, where torch gives a view: a step that would see the
difference is captured with the place as a constant, or refused where that is drawn. So is ``x[:count]`` with a count that only
the running step knows: a mask selects these rows. Where the size is drawn too, as of
``x[:, :, y1:y2, x1:x2] = x[perm, :, y1:y2, x1:x2]``, the region is known by a mask over the whole tensor (:class:`Region`): what
goes element by element, and what is written to the same region, needs no size. Any other use needs it, and is refused.
"""

from __future__ import annotations

import contextlib
import operator
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import torch
import torch.utils._pytree as pytree

from torch_compat.step.host.calls import is_traced
from torch_compat.step.host.host_future import HostFuture
from torch_compat.step.host.offsets import MovingOffsets, offset_of, width
from torch_compat.step.host.scalars import HostScalar, was_written
from xlatrain.bridge.capture.masked_rows.masked_rows import MaskedRows, derived
from xlatrain.bridge.capture.recorded.tape import have_parted, ops_so_far
from xlatrain.bridge.errors import CaptureError, user_line
from xlatrain.bridge.patches import patched


@dataclass(frozen=True)
class _Bounds:
    """A slice with bounds that are others for each step, along a dim of the result.

    Attributes:
        dim: from the end of the dims: -1 is the last one.
        size: the tensor's, along it.
        start, stop: the slice's.
        length: the number of elements where that is always the same; the whole slice lies within the tensor then.
    """

    dim: int
    size: int
    start: Any
    stop: Any
    length: int | None

    @property
    def key(self) -> tuple[Any, ...]:
        """The words for its elements: the same ones are the same elements, whatever is drawn."""
        return (self.dim, self.size, _text(self.start), _text(self.stop))

    def mask(self, device: torch.device) -> torch.Tensor:
        """A bool tensor (size, 1, …): the elements of the slice, with dims for those after it."""
        every = torch.arange(self.size, device=device)
        found = (every >= self._place(self.start, 0)) & (every < self._place(self.stop, self.size))
        return found.reshape(-1, *[1] * (-1 - self.dim))

    def _place(self, bound: Any, default: int) -> Any:
        if bound is None:
            return default
        if type(bound) is not HostScalar:
            return min(max(bound + self.size if bound < 0 else bound, 0), self.size)
        given = bound.tensor()
        return torch.where(given < 0, given + self.size, given).clamp(0, self.size)

    def elements(self, device: torch.device) -> torch.Tensor:
        """The elements of a slice of one length, as an index."""
        assert self.length is not None
        start = self.start.tensor().to(torch.int64)
        return torch.arange(self.length, device=device) + torch.where(start < 0, start + self.size, start)


def _text(bound: Any) -> Any:
    if type(bound) is HostFuture:
        return bound.as_offset or id(bound)
    return bound.as_offset or bound.text if type(bound) is HostScalar else bound


class Region(torch.Tensor):
    """The elements of a tensor within bounds that are drawn; user code takes it for these.

    Attributes:
        whole: the tensor, whole along the dims of the region. A view of what the user has sliced, where torch's would be one.
        bounds: one for each dim that is bounded.
    """

    whole: torch.Tensor
    bounds: tuple[_Bounds, ...]

    @staticmethod
    def of(whole: torch.Tensor, bounds: tuple[_Bounds, ...]) -> Region:
        made = torch.Tensor._make_wrapper_subclass(Region, (0,) * whole.ndim, dtype=whole.dtype, device=whole.device)
        made.whole, made.bounds = whole, bounds
        return made

    @property
    def keys(self) -> frozenset[Any]:
        return frozenset(one.key for one in self.bounds)

    def mask(self) -> torch.Tensor:
        """A bool tensor that broadcasts to ``whole``."""
        return _mask(self.bounds, self.whole.device)

    def refuse(self) -> NoReturn:
        """Refuse a use that needs the size.

        Raises:
            CaptureError: it is drawn at random.
        """
        for one in self.bounds:
            for bound in (one.start, one.stop):
                if type(bound) is HostScalar:
                    bound.item()
        raise AssertionError("a region has a bound that is drawn")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = next(one for one in pytree.tree_leaves((args, kwargs)) if type(one) is Region)
        name = getattr(func, "__name__", "")
        if func in _KNOWN:
            return func(first.whole)
        if name in ("sum", "mean") and len(args) == 1 and not kwargs:
            return _reduced(first, mean=name == "mean")
        if not all(_goes_with(one, first) for one in pytree.tree_leaves((args, kwargs))):
            first.refuse()
        if name in _IN_PLACE and type(args[0]) is Region:
            changed = first.whole.clone()
            func(changed, *map(_whole, args[1:]), **{key: _whole(one) for key, one in kwargs.items()})
            _write(first.whole, first.bounds, changed)
            return first
        if name not in _POINTWISE:
            first.refuse()
        made = func(*map(_whole, args), **{key: _whole(one) for key, one in kwargs.items()})
        return Region.of(made, first.bounds)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        next(one for one in pytree.tree_leaves((args, kwargs or {})) if type(one) is Region).refuse()


_KNOWN = frozenset(
    getattr(torch.Tensor, name).__get__ for name in ("dtype", "device", "requires_grad", "layout", "ndim", "is_cuda")
) | {torch.Tensor.dim, torch.Tensor.is_floating_point}
"""Questions that the whole tensor answers."""
_POINTWISE = frozenset(
    (
        *("add", "sub", "rsub", "mul", "div", "true_divide", "neg", "negative", "abs", "pow", "square", "sqrt", "exp", "log"),
        *("sigmoid", "tanh", "relu", "clamp", "clip", "clone", "detach", "to", "float", "half", "bfloat16", "double", "type_as"),
        *("contiguous", "lerp", "round", "floor", "ceil", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__neg__"),
        *("__pow__", "__rpow__", "__rdiv__", "__abs__"),
    )
)
_IN_PLACE = frozenset(
    (
        *("add_", "sub_", "mul_", "div_", "neg_", "zero_", "fill_", "copy_", "clamp_", "clip_", "lerp_", "pow_", "normal_"),
        *("uniform_", "random_", "bernoulli_", "__iadd__", "__isub__", "__imul__", "__itruediv__"),
    )
)


def _whole(value: Any) -> Any:
    return value.whole if type(value) is Region else value


def _goes_with(value: Any, region: Region) -> bool:
    """Whether an argument has the same region, or no size of its own along its dims."""
    if type(value) is Region:
        return value.keys == region.keys
    return not isinstance(value, torch.Tensor) or _spreads(value, region.bounds)


def _spreads(value: torch.Tensor, bounds: tuple[_Bounds, ...]) -> bool:
    """Whether one element of the value goes along all bounded dims."""
    return all(value.ndim < -one.dim or value.shape[one.dim] == 1 for one in bounds)


def _mask(bounds: tuple[_Bounds, ...], device: torch.device) -> torch.Tensor:
    first, *others = [one.mask(device) for one in bounds]
    for one in others:
        first = first & one
    return first


def _reduced(region: Region, *, mean: bool) -> torch.Tensor:
    mask = region.mask().expand(region.whole.shape)
    total = torch.where(mask, region.whole, 0).sum()
    return total / mask.sum() if mean else total


def _write(whole: torch.Tensor, bounds: tuple[_Bounds, ...], values: Any) -> None:
    """Put ``values``, which broadcast to ``whole``, into the region of it."""
    values = values.to(whole.dtype) if isinstance(values, torch.Tensor) else values
    whole.copy_(torch.where(_mask(bounds, whole.device), values, whole))


@dataclass(frozen=True)
class _Sliced:
    """An index with places that are others for each step.

    Attributes:
        rest: the index with whole dims in their place.
        bounds: theirs.
        entries: the dims of those that are entries, which the result does not have; from the end.
        is_view: whether the rest of it gives a view.
    """

    rest: tuple[Any, ...]
    bounds: tuple[_Bounds, ...]
    entries: tuple[int, ...]
    is_view: bool

    @property
    def key(self) -> tuple[Any, ...]:
        """The words for the elements."""
        return (repr(self.rest), *(one.key for one in self.bounds))

    @property
    def is_of_one_size(self) -> bool:
        """Whether the result has always the same size."""
        return all(one.length is not None for one in self.bounds)

    def taken_of(self, whole: torch.Tensor) -> torch.Tensor:
        """The elements, a copy that has the dims of ``whole``."""
        for one in self.bounds:
            whole = whole.index_select(whole.ndim + one.dim, one.elements(whole.device))
        return whole

    def without_entries(self, taken: torch.Tensor) -> torch.Tensor:
        """A view of ``taken`` with the dims that the index gives."""
        kept = [size for dim, size in enumerate(taken.shape) if dim - taken.ndim not in self.entries]
        return taken.reshape(kept) if self.entries else taken

    def write(self, whole: torch.Tensor, value: Any) -> None:
        """Write ``value`` to the elements of ``whole``.

        Args:
            value: a tensor that broadcasts to what the index gives, or a number.
        """
        value = value.to(whole.dtype) if isinstance(value, torch.Tensor) else whole.new_full((), value)
        sizes = {whole.ndim + one.dim: one.length for one in self.bounds}
        full = [sizes.get(dim, size) for dim, size in enumerate(whole.shape)]
        while value.ndim > whole.ndim - len(self.entries) and value.shape[0] == 1:
            value = value.squeeze(0)
        value = value.expand([size for dim, size in enumerate(full) if dim - whole.ndim not in self.entries]).reshape(full)
        _put(whole, self.bounds, value)


def _put(whole: torch.Tensor, bounds: tuple[_Bounds, ...], value: torch.Tensor) -> None:
    first, *others = bounds
    dim, elements = whole.ndim + first.dim, first.elements(whole.device)
    if others:
        part = whole.index_select(dim, elements)
        _put(part, tuple(others), value)
        value = part
    whole.index_copy_(dim, elements, value)


def _is_drawn(part: Any) -> bool:
    return type(part) is slice and any(type(one) is HostScalar and one.is_drawn for one in (part.start, part.stop))


def _is_entry(part: Any) -> bool:
    return offset_of(part) is not None or _is_found(part)


def _is_found(part: Any) -> bool:
    """Whether it is an entry that only the running step knows: its program looks whether there is such a one."""
    return type(part) is HostFuture and part.stays_a_number() and type(part.example()) in (int, np.int64)


def _as_it_is(index: Any) -> Any:
    """An index with the places in it as constants, and a list of numbers that are drawn as a tensor."""
    if type(index) is tuple:
        return tuple(map(_as_it_is, index))
    if type(index) is list and any(type(one) is HostScalar and one.is_drawn for one in index):
        return torch.as_tensor(index)
    if type(index) is not HostFuture:
        return index
    if isinstance(index, np.ndarray | list) and (read := index.read_of()) is not None:
        return read
    return operator.index(index) if _is_entry(index) else index


def _length(part: Any, size: int) -> int | None:
    """The number of elements of a part of an index where that is always the same; they lie within ``size`` then."""
    if type(part) is not slice:
        return 1 if _is_found(part) or (_is_entry(part) and -size <= part < size) else None
    count = width(part.start, part.stop)
    return count if count is not None and count <= size and 0 <= part.start <= size - count else None


def _sliced(x: torch.Tensor, index: Any, offsets: MovingOffsets) -> _Sliced | None:
    """The parts of an index; None where no place of it is another for each step, or it is a kind that is not followed."""
    parts = list(index) if type(index) is tuple else [index]
    drawn = any(map(_is_drawn, parts))
    if not drawn and (
        not any(_is_entry(part) or (type(part) is slice and width(part.start, part.stop)) for part in parts)
        or not (is_traced(x) or type(x) in (torch.Tensor, torch.nn.Parameter))
        or not offsets.meet()
    ):
        return None
    if any(type(part) is slice and part.step not in (None, 1) for part in parts if _is_drawn(part)):
        return None
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    numbers = [part for part in parts if type(part) is int or _is_entry(part)]
    given = sum(part is not None and part is not Ellipsis for part in parts)
    known = sum(type(part) is slice for part in parts) + len(tensors) + len(numbers) == given <= x.ndim
    if not known or len(tensors) > 1 or (tensors and numbers) or any(one.dtype in (torch.bool, torch.uint8) for one in tensors):
        return None
    if not any(part is Ellipsis for part in parts):
        parts.append(Ellipsis)
    at = next(at for at, part in enumerate(parts) if part is Ellipsis)
    parts[at : at + 1] = [slice(None)] * (x.ndim - given)
    rest: list[Any] = []
    found: list[tuple[int, _Bounds]] = []
    entries: list[int] = []
    dim, made = 0, 0  # of x, and of the result
    for part in parts:
        length = _length(part, x.shape[dim]) if part is not None and not isinstance(part, torch.Tensor) else None
        if length is not None or _is_drawn(part):
            start, stop = (part.start, part.stop) if type(part) is slice else (part, None)
            found.append((made, _Bounds(0, x.shape[dim], start, stop, length)))
            entries += [] if type(part) is slice else [made]
            part = slice(None)
        rest.append(part)
        made += part.ndim if isinstance(part, torch.Tensor) else part is None or type(part) is slice
        dim += part is not None
    if not found or (entries and any(one.length is None for _, one in found)):
        return None
    bounds = tuple(replace(one, dim=place - made) for place, one in found)
    return _Sliced(tuple(rest), bounds, tuple(place - made for place in entries), not tensors)


def _first_rows(x: torch.Tensor, index: Any, offsets: MovingOffsets) -> MaskedRows | None:
    """``x[:count]``, ``x[:2, :count]`` with a number that only the running step knows; None for any other index."""
    parts = index if type(index) is tuple else (index,)
    places = [place for place, one in enumerate(parts) if type(one) is slice and _comes_later(one.stop)]
    if len(places) != 1 or type(x) is MaskedRows or not is_traced(x) or len(parts) > x.ndim:
        return None
    (place,) = places
    last = parts[place]
    plain = all(type(one) in (slice, int) for one in parts) and last.start in (None, 0) and last.step in (None, 1)
    if not plain or not offsets.meet():
        return None
    axis = sum(type(one) is slice for one in parts[:place])
    rest = x if len(parts) == 1 else x[(*parts[:place], slice(None), *parts[place + 1 :])]
    number, size = last.stop.tensor(), rest.shape[axis]

    def within() -> torch.Tensor:
        return torch.arange(size, device=x.device) < torch.where(number < 0, number + size, number)

    return MaskedRows.of_mask(rest, derived(number, (size,), within), axis) if size else None


def _comes_later(number: Any) -> bool:
    return type(number) is HostFuture and number.stays_a_number() and type(number.example()) is int


@dataclass
class _Copy:
    """A copy in the place of a view.

    Attributes:
        taken: the copy.
        given: what the user got, a view of it.
        source, index: of what, and where in it.
        where: the user's line.
        since: after how many ops of the run the two had the same elements.
    """

    taken: torch.Tensor
    given: torch.Tensor
    source: torch.Tensor
    index: tuple[Any, ...]
    where: str | None
    since: int

    def has_parted(self) -> bool:
        """Whether the run would see that it is no view."""
        if hasattr(self.taken, "elem"):  # as it runs: in which order is not known
            return was_written(self.taken) or was_written(self.source)
        return have_parted(self.taken, self.source, self.since)

    def may_be_put_back(self, value: Any, source: torch.Tensor, index: tuple[Any, ...]) -> bool:
        """Whether ``source[index] = value`` puts it back as it is, after ``source[index] += 1``."""
        if value is not self.given or hasattr(self.taken, "elem") or source is not self.source or index != self.index:
            return False
        return not have_parted(self.taken, self.source, self.since, put_back=True)


def _refuse_parted(copies: list[_Copy]) -> None:
    for copy in copies:
        if copy.has_parted():
            raise CaptureError(
                f"{copy.where or 'the step'}\n  cannot be captured: a slice whose place is drawn at random is written to in "
                "place, or used after its tensor was; in a compiled step it is a copy.\n  Fix: assign what it shall become "
                "(x[:, start : start + 4] = values), and take slices after other changes of the tensor."
            )


@contextlib.contextmanager
def slicing_at_moving_bounds(offsets: MovingOffsets) -> Iterator[None]:
    """Within the block tensors take slices and entries whose places are others for each step.

    Args:
        offsets: how those are taken that are not drawn.

    Raises:
        CaptureError: at the end of the block, where one of one size is written to in place, or used after its tensor was.
    """
    copies: list[_Copy] = []
    take: Callable[[Any, Any], Any] = torch.Tensor.__getitem__
    assign: Callable[[Any, Any, Any], None] = torch.Tensor.__setitem__

    def get_item(self: torch.Tensor, index: Any) -> Any:
        found = None if isinstance(self, Region) else _sliced(self, index, offsets)
        if found is None:
            first = _first_rows(self, index, offsets)
            if first is None:
                return take(self, _as_it_is(index))
            copies.append(_Copy(first.rows, first, self, (), user_line(traceback.extract_stack()), ops_so_far()))
            return first
        rest = take(self, found.rest)
        if not found.is_of_one_size:
            return Region.of(rest, found.bounds)
        taken = found.taken_of(rest)
        given = found.without_entries(taken)
        if found.is_view:
            copies.append(_Copy(taken, given, self, found.key, user_line(traceback.extract_stack()), ops_so_far()))
        return given

    def set_item(self: torch.Tensor, index: Any, value: Any) -> None:
        found = None if isinstance(self, Region) else _sliced(self, index, offsets)
        if found is None or not found.is_view:
            assign(self, _as_it_is(index), value)
            return
        put_back = [one for one in copies if one.may_be_put_back(value, self, found.key)]
        whole = take(self, found.rest)
        number = type(value) in (bool, int, float, HostScalar)
        value = value.tensor() if type(value) is HostScalar else value
        if type(value) is HostFuture and (traced := value.in_graph()) is not None:
            value = traced
        if type(value) is Region:
            if value.keys != frozenset(one.key for one in found.bounds):
                value.refuse()
            _write(whole, found.bounds, value.whole)
        elif found.is_of_one_size and (number or is_traced(value) or type(value) in (torch.Tensor, torch.nn.Parameter)):
            found.write(whole, value)
            for one in put_back:
                one.since = ops_so_far()
        elif not isinstance(value, torch.Tensor) or _spreads(value, found.bounds):
            _write(whole, found.bounds, value)
        else:
            assign(self, index, value)  # which asks for the bounds

    with patched([(torch.Tensor, "__getitem__", get_item), (torch.Tensor, "__setitem__", set_item)]):
        yield
    _refuse_parted(copies)
