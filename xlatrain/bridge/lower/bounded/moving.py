"""Views, slices, joined and new tensors: what is true of the results comes first along each dim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xlatrain.bridge.host_draws import are_drawn_before
from xlatrain.bridge.lower.bounded.call import BoundedCall, Dims, Size
from xlatrain.bridge.lower.bounded.rules import rule
from xlatrain.bridge.lower.operands import canonical_dim
from xlatrain.bridge.lower.prng import step_key
from xlatrain.bridge.random import FILLED
from xlatrain.bridge.tensors.dtypes import jax_dtype


@rule("aten.t.default", "aten.transpose.int", "aten.permute.default", "aten.unsqueeze.default", "aten.squeeze.dims")
@rule("aten.empty.memory_format", sizes=("size",))
@rule("aten.arange.start_step", sizes=("end",))
def _as_it_is(call: BoundedCall) -> Any:
    return call.default()


@rule("aten.expand.default", sizes=("size",))
def _expand(call: BoundedCall) -> Any:
    call.refuse_broadcast(call.operand(0))
    return call.default()


@rule("aten.full.default", sizes=("size", "fill_value"))
@rule("aten.full_like.default", "aten.scalar_tensor.default", sizes=("fill_value", "s"))
def _filled(call: BoundedCall) -> Any:
    name = "s" if "scalar_tensor" in str(call.node.target) else "fill_value"
    if call.changing(name) is None:
        return call.default()
    call.refuse_rounding([jax_dtype(call.node.meta["val"].dtype)])
    return jnp.full(call.out_shape, call.number(name, 0))


@rule("aten.split_with_sizes.default")
def _split(call: BoundedCall) -> Any:
    x = call.args[0]
    if call.dims(call.operand(0))[canonical_dim(call.argument("dim", 0), x.ndim)] is not None:
        raise call.refuse("it is split where it changes")
    return call.default()


@rule("aten.repeat.default")
def _repeat(call: BoundedCall) -> Any:
    repeats = call.argument("repeats")
    dims = call.dims(call.operand(0))
    own = repeats[len(repeats) - len(dims) :]
    if any(one is not None and times != 1 for one, times in zip(dims, own, strict=True)):
        raise call.refuse("it is repeated where it changes")
    return call.default()


# -- views -----------------------------------------------------------------------------------------------------------------


@rule("aten.view.default", "aten._unsafe_view.default", "aten._reshape_copy.default", sizes=("size", "shape"))
def _view(call: BoundedCall) -> Any:
    x, shape = call.args[0], call.out_shape
    dims, out_dims = call.dims(call.operand(0)), call.out_dims
    if _keeps_beginnings(x.shape, dims, shape, out_dims):
        return x.reshape(shape)
    return relaid(call, x, call.sizes(x.shape, dims), shape, call.sizes(shape, out_dims))


def _keeps_beginnings(shape: Sequence[int], dims: Dims, new: Sequence[int], new_dims: Dims) -> bool:
    """Whether a view has the true elements where a view of the array has them.

    It does where each dim that changes stays, or is the first of those that are joined or split, in one place at most: since the
    numbers of elements of the others are equal, so are those of that one.
    """
    joined = 0
    for old, now in _factors(shape, new):
        if [(shape[a], dims[a]) for a in old if shape[a] != 1] == [(new[a], new_dims[a]) for a in now if new[a] != 1]:
            continue
        changing = [a for a in old if dims[a] is not None], [a for a in now if new_dims[a] is not None]
        if not any(changing):
            continue
        joined += 1
        for axes, sizes, found in ((old, shape, changing[0]), (now, new, changing[1])):
            if len(found) != 1 or any(sizes[a] != 1 for a in axes[: axes.index(found[0])]):
                return False
    return joined < 2


def _factors(shape: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The dims of both shapes in groups of as many elements."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(shape) or j < len(new):
        old, now = [], []
        a = b = 1
        if i < len(shape):
            old.append(i)
            a *= shape[i]
            i += 1
        if j < len(new):
            now.append(j)
            b *= new[j]
            j += 1
        while a != b:
            if a < b:
                old.append(i)
                a *= shape[i]
                i += 1
            else:
                now.append(j)
                b *= new[j]
                j += 1
        groups.append((old, now))
    return groups


def relaid(call: BoundedCall, x: jax.Array, sizes: Sequence[Size], shape: Sequence[int], new_sizes: Sequence[Size]) -> jax.Array:
    """A view of the tensor in ``x``, of true ``sizes``, as one of ``new_sizes`` in an array of ``shape``: one gather."""
    old_shape, shape = list(x.shape), list(shape)
    sizes, new_sizes, last = list(sizes), list(new_sizes), 1
    while old_shape and shape and old_shape[-1] == shape[-1] and isinstance(sizes[-1], int) and isinstance(new_sizes[-1], int):
        last *= old_shape.pop()  # rows stay as they are
        for one in (shape, sizes, new_sizes):
            one.pop()
    if max(math.prod(old_shape), math.prod(shape)) >= 2**31:
        raise call.refuse("a view of more elements than int32 counts")
    place: Any = jnp.zeros(shape, jnp.int32)
    stride: Size = 1
    for axis in reversed(range(len(shape))):
        place = place + lax.broadcasted_iota(jnp.int32, shape, axis) * stride
        stride = stride * new_sizes[axis]
    found: Any = jnp.zeros(shape, jnp.int32)
    stride = 1
    for bound, size in zip(reversed(old_shape), reversed(sizes), strict=True):
        found = found + jnp.clip(place % size, 0, bound - 1) * stride
        place = place // size
        stride = stride * bound
    return x.reshape(-1, last)[found].reshape(call.out_shape)


# -- slices ----------------------------------------------------------------------------------------------------------------


def _first(call: BoundedCall, size: Size) -> Size:
    """The first index of a slice, from the front."""
    start = call.number("start", 0)
    return start + size if isinstance(start, int) and start < 0 else start


@rule("aten.slice.Tensor", sizes=("start", "end"))
def _slice(call: BoundedCall) -> Any:
    x = call.args[0]
    axis = canonical_dim(call.argument("dim", 0), x.ndim)
    step, length = call.argument("step", 1), call.out_shape[axis]
    start = _first(call, call.size(x.shape[axis], call.dims(call.operand(0))[axis]))
    last = (length - 1) * step + 1
    if isinstance(start, int) and start + last <= x.shape[axis]:
        return lax.slice_in_dim(x, start, start + last, step, axis)
    behind = [(0, last if a == axis else 0) for a in range(x.ndim)]
    part = lax.dynamic_slice_in_dim(jnp.pad(x, behind), start, last, axis)
    return lax.slice_in_dim(part, 0, last, step, axis)


@rule("aten.select.int", sizes=("index",))
def _select(call: BoundedCall) -> Any:
    x = call.args[0]
    axis = canonical_dim(call.argument("dim"), x.ndim)
    index = call.number("index", 0)
    if isinstance(index, int) and index < 0:
        index = index + call.size(x.shape[axis], call.dims(call.operand(0))[axis])
    return lax.dynamic_index_in_dim(x, index, axis, keepdims=False)


@rule("aten.slice_scatter.default", sizes=("start", "end"))
def _slice_scatter(call: BoundedCall) -> Any:
    x = call.args[0]
    axis = canonical_dim(call.argument("dim", 0), x.ndim)
    return _written(call, x, call.args[1], axis, call.dims(call.operand(0))[axis], call.dims(call.operand(1)))


def _written(call: BoundedCall, x: jax.Array, source: jax.Array, axis: int, changing: Any, source_dims: Dims) -> jax.Array:
    """``x`` with ``source`` written into a slice."""
    step = call.argument("step", 1)
    others = tuple(one if place != axis else None for place, one in enumerate(source_dims))
    if any(one is not None and one != result for one, result in zip(others, call.out_dims, strict=True)):
        raise call.refuse("a value that broadcasts is written into a slice")
    if source.shape[:axis] != x.shape[:axis] or source.shape[axis + 1 :] != x.shape[axis + 1 :]:
        raise call.refuse("a value that broadcasts is written into a slice")
    start = _first(call, call.size(x.shape[axis], changing))
    wide = [x.shape[axis] if a == axis else 1 for a in range(x.ndim)]
    place = lax.broadcasted_iota(jnp.int32, wide, axis) - start
    inside = (place >= 0) & (place % step == 0) & (place // step < call.size(source.shape[axis], source_dims[axis]))
    moved = jnp.take(source, jnp.clip(place.reshape(-1) // step, 0, source.shape[axis] - 1), axis)
    return jnp.where(inside, moved.astype(x.dtype), x)


@rule("aten.cat.default")
def _cat(call: BoundedCall) -> Any:
    """Each is written where the one before it ends."""
    nodes: Any = call.node.args[0]
    arrays, shape = call.args[0], call.out_shape
    axis = canonical_dim(call.argument("dim", 0), len(shape))
    if any(x.ndim != len(shape) for x in arrays):
        raise call.refuse("one is an empty tensor of another number of dims")
    dtype = jnp.result_type(*arrays)
    joined, start = jnp.zeros(shape, dtype), jnp.int32(0)
    for node, x in zip(nodes, arrays, strict=True):
        joined = lax.dynamic_update_slice_in_dim(joined, x.astype(dtype), start, axis)
        start = start + call.size(x.shape[axis], call.dims(node)[axis])
    return joined


@rule("aten.flip.default")
def _flip(call: BoundedCall) -> Any:
    x, dims = call.args[0], call.dims(call.operand(0))
    for one in call.args[1]:
        axis = canonical_dim(one, x.ndim)
        size = call.size(x.shape[axis], dims[axis])
        x = jnp.take(x, jnp.clip(size - 1 - jnp.arange(x.shape[axis]), 0), axis)
    return x


@rule("aten.constant_pad_nd.default")
def _pad(call: BoundedCall) -> Any:
    first = call.args[0].ndim - len(call.args[1]) // 2
    call.mask_arg(0, call.argument("value", 0), set(range(first, call.args[0].ndim)))
    return call.default()


@rule("aten.cumsum.default", "aten.cumprod.default")
def _cumulative(call: BoundedCall) -> Any:
    call.mask_arg(0, 0, {canonical_dim(call.args[1], call.args[0].ndim)})
    return call.default()


# -- random numbers --------------------------------------------------------------------------------------------------------


@rule(*(f"xlatrain.{name}.default" for name in FILLED), sizes=("size", "strides"))
def _drawn(call: BoundedCall) -> Any:
    """The numbers that the true size would get: one draw after the other, whatever the size of the array is."""
    if are_drawn_before():  # for the true size, and padded
        return call.default()
    partitionable = jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
    if jax.random.key_impl(step_key()) != "threefry2x32" or not partitionable:
        raise call.refuse("numbers of this generator depend on how many there are")
    shape, dims = call.out_shape, call.out_dims
    if all(one is None for one in dims[1:]):
        return call.default()
    call.args[:2] = (math.prod(shape),), ()
    return relaid(call, call.default(), [math.prod(call.sizes(shape, dims))], shape, call.sizes(shape, dims))
