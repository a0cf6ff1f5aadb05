"""Slices whose bounds are drawn at random for each step, while it is captured: CutMix's boxes, random crops.

``x[:, start : start + 16]`` has one size, and only its place is an input of the program. It is a copy, where torch gives a view:
a step that would see the difference is refused. Where the size is drawn too, as of
``x[:, :, y1:y2, x1:x2] = x[perm, :, y1:y2, x1:x2]``, the region is known by a mask over the whole tensor (:class:`Region`): what
goes element by element, and what is written to the same region, needs no size. Any other use needs it, and is refused.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree

from torch_compat.step.host.scalars import HostScalar, was_written
from xlatrain.bridge.capture.masked_rows.masked_rows import REPLACED
from xlatrain.bridge.capture.recorded.tape import have_parted
from xlatrain.bridge.errors import CaptureError, user_line
from xlatrain.bridge.patches import patched


@dataclass(frozen=True)
class _Bounds:
    """A slice with bounds that are drawn, along a dim of the result.

    Attributes:
        dim: from the end of the dims: -1 is the last one.
        size: the tensor's, along it.
        start, stop: the slice's.
    """

    dim: int
    size: int
    start: Any
    stop: Any

    @property
    def key(self) -> tuple[Any, ...]:
        """The words for its elements: the same ones are the same elements, whatever is drawn."""
        return (self.dim, self.size, _text(self.start), _text(self.stop))

    @property
    def length(self) -> int | None:
        """The number of elements where that is always the same; the whole slice lies within the tensor then."""
        if type(self.start) is not HostScalar or type(self.stop) is not HostScalar:
            return None
        begin = re.escape(self.start.text)
        found = re.fullmatch(rf"\({begin} \+ (\d+)\)|\((\d+) \+ {begin}\)", self.stop.text)
        count = int(found[1] or found[2]) if found is not None else 0
        return count if 0 < count <= self.size and 0 <= self.start <= self.size - count else None

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

    def elements(self, count: int, device: torch.device) -> torch.Tensor:
        """The ``count`` elements of a slice of that length, as an index."""
        return torch.arange(count, device=device) + self.start.tensor()


def _text(bound: Any) -> Any:
    return bound.text if type(bound) is HostScalar else bound


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
    """An index with slices whose bounds are drawn.

    Attributes:
        rest: the index with whole dims in their place.
        bounds: theirs.
        is_view: whether the rest of it gives a view.
    """

    rest: tuple[Any, ...]
    bounds: tuple[_Bounds, ...]
    is_view: bool


def _is_drawn(part: Any) -> bool:
    return type(part) is slice and any(type(one) is HostScalar and one.is_drawn for one in (part.start, part.stop))


def _sliced(x: torch.Tensor, index: Any) -> _Sliced | None:
    """The parts of an index; None where no slice of it has a bound that is drawn, or it is a kind that is not followed."""
    parts = list(index) if type(index) is tuple else [index]
    if not any(map(_is_drawn, parts)):
        return None
    if any(type(part) is slice and part.step not in (None, 1) for part in parts if _is_drawn(part)):
        return None
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    numbers = [part for part in parts if type(part) is int]
    known = all(part is None or part is Ellipsis or type(part) in (int, slice) or part in tensors for part in parts)
    if not known or len(tensors) > 1 or (tensors and numbers) or any(one.dtype in (torch.bool, torch.uint8) for one in tensors):
        return None
    given = sum(part is not None and part is not Ellipsis for part in parts)
    if Ellipsis not in [part for part in parts if not isinstance(part, torch.Tensor)]:
        parts.append(Ellipsis)
    place = next(place for place, part in enumerate(parts) if part is Ellipsis)
    parts[place : place + 1] = [slice(None)] * (x.ndim - given)
    rest: list[Any] = []
    found: list[tuple[int, int, slice]] = []
    dim, made = 0, 0  # of x, and of the result
    for part in parts:
        if _is_drawn(part):
            found.append((made, x.shape[dim], part))
        rest.append(slice(None) if _is_drawn(part) else part)
        made += part.ndim if isinstance(part, torch.Tensor) else type(part) is not int
        dim += part is not None
    bounds = tuple(_Bounds(place - made, size, part.start, part.stop) for place, size, part in found)
    return _Sliced(tuple(rest), bounds, not tensors)


def _refuse_parted(copies: list[tuple[torch.Tensor, torch.Tensor, str | None]]) -> None:
    for copy, source, where in copies:
        as_it_runs = hasattr(copy, "elem")  # in which order is not known
        if was_written(copy) or was_written(source) if as_it_runs else have_parted(copy, source):
            raise CaptureError(
                f"{where or 'the step'}\n  cannot be captured: a slice whose place is drawn at random is written to in place, "
                "or used after its tensor was; in a compiled step it is a copy.\n  Fix: assign what it shall become "
                "(x[:, start : start + 4] = values), and take slices after other changes of the tensor."
            )


@contextlib.contextmanager
def slicing_at_drawn_bounds() -> Iterator[None]:
    """Within the block tensors take slices whose bounds are drawn.

    Raises:
        CaptureError: at the end of the block, where a slice of one size is written to in place, or used after its tensor was.
    """
    copies: list[tuple[torch.Tensor, torch.Tensor, str | None]] = []  # of what, and the user's line
    take: Callable[[Any, Any], Any] = torch.Tensor.__getitem__
    assign: Callable[[Any, Any, Any], None] = torch.Tensor.__setitem__

    def get_item(self: torch.Tensor, index: Any) -> Any:
        found = None if isinstance(self, Region) else _sliced(self, index)
        if found is None:
            return take(self, index)
        rest = take(self, found.rest)
        lengths = [one.length for one in found.bounds]
        if None in lengths:
            return Region.of(rest, found.bounds)
        for one, length in zip(found.bounds, lengths, strict=True):
            assert length is not None
            rest = rest.index_select(rest.ndim + one.dim, one.elements(length, rest.device))
        if found.is_view:
            copies.append((rest, self, user_line(traceback.extract_stack())))
        return rest

    def set_item(self: torch.Tensor, index: Any, value: Any) -> None:
        found = None if isinstance(self, Region) else _sliced(self, index)
        if found is None or not found.is_view:
            assign(self, index, value)
            return
        whole = take(self, found.rest)
        if type(value) is Region:
            if value.keys != frozenset(one.key for one in found.bounds):
                value.refuse()
            _write(whole, found.bounds, value.whole)
        elif not isinstance(value, torch.Tensor) or _spreads(value, found.bounds):
            _write(whole, found.bounds, value.tensor() if type(value) is HostScalar else value)
        elif len(found.bounds) == 1 and (length := found.bounds[0].length) is not None:
            (one,) = found.bounds
            whole.index_copy_(
                whole.ndim + one.dim,
                one.elements(length, whole.device),
                value.to(whole.dtype).expand(
                    *[length if dim == whole.ndim + one.dim else size for dim, size in enumerate(whole.shape)]
                ),
            )
        else:
            assign(self, index, value)  # which asks for the bounds

    # torch passes what stands in the place of its own to overrides, which ask for its own
    standing = {get_item: REPLACED.get(take, take), set_item: REPLACED.get(assign, assign)}
    REPLACED.update(standing)
    try:
        with patched([(torch.Tensor, "__getitem__", get_item), (torch.Tensor, "__setitem__", set_item)]):
            yield
        _refuse_parted(copies)
    finally:
        for function in standing:
            REPLACED.pop(function, None)
