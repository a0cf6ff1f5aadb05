"""Reading and writing at places that index tensors give.

An index is looked at where the tensor is alone, against the true size; what is beyond that reads NaN and writes nothing, as it
does in a program for these sizes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlatrain.bridge.lower.bounded.call import BoundedCall, Dims
from xlatrain.bridge.lower.bounded.rules import rule
from xlatrain.bridge.lower.operands import canonical_dim


def _true_size(call: BoundedCall, axis: int) -> jax.Array | None:
    """The true size of a dim of the first operand, if it changes."""
    dims = call.dims(call.operand(0))
    size = call.size(0, dims[axis]) if axis < len(dims) else 0
    return None if isinstance(size, int) else size


def _note(call: BoundedCall) -> None:
    call.note(lambda axis: _true_size(call, axis))


def _within(index: jax.Array, bound: int, size: jax.Array | None, *, wraps: bool) -> jax.Array:
    """Indices from the front; those out of range beyond the array."""
    if size is None:
        return index
    size = size.astype(index.dtype)
    if wraps:
        index = jnp.where(index < 0, index + size, index)
    return jnp.where((index < 0) | (index >= size), jnp.asarray(bound, index.dtype), index)


@rule("aten.index_select.default", "aten.gather.default", notes=True)
def _read_along(call: BoundedCall) -> Any:
    x = call.args[0]
    axis = canonical_dim(call.args[1], x.ndim)
    call.mask_arg(2)
    _note(call)
    call.args[2] = _within(call.args[2], x.shape[axis] if x.ndim else 1, _true_size(call, axis), wraps=False)
    return call.default()


@rule("aten.embedding.default", notes=True)
def _embedding(call: BoundedCall) -> Any:
    call.mask_arg(1)
    _note(call)
    call.args[1] = _within(call.args[1], call.args[0].shape[0], _true_size(call, 0), wraps=False)
    return call.default()


@rule("aten.index.Tensor", notes=True)
def _read(call: BoundedCall) -> Any:
    _mask_indices(call)
    _note(call)
    _put_within(call)
    return call.default()


def _mask_indices(call: BoundedCall) -> None:
    nodes: Any = call.node.args[1]
    call.args[1] = [
        None if index is None else call.masked(index, call.dims(node)) for node, index in zip(nodes, call.args[1], strict=True)
    ]
    if any(index is not None and index.dtype in (np.bool_, np.uint8) for index in call.args[1]):
        raise call.refuse("a mask selects from it")
    call.refuse_broadcast(*nodes, of=_index_dims(call))


def _index_dims(call: BoundedCall) -> Dims:
    """The sizes that change among the dims that the indices have together."""
    nodes: Any = [node for node in call.node.args[1] if node is not None]  # pyright: ignore
    longest = max((call.dims(node) for node in nodes), key=len)
    found = []
    for place in range(1, len(longest) + 1):
        here = [dims[-place] for node in nodes if len(dims := call.dims(node)) >= place]
        found.append(next((one for one in here if one is not None), None))
    return tuple(reversed(found))


def _places_dims(call: BoundedCall) -> Dims:
    """The sizes that change of what indices select: theirs in place of those that they index, or first if these are apart."""
    dims, nodes = call.dims(call.operand(0)), call.node.args[1]
    given = [axis for axis, node in enumerate(nodes) if node is not None]  # pyright: ignore
    together = given == list(range(given[0], given[-1] + 1))
    first = given[0] if together else 0
    rest = [one for axis, one in enumerate(dims) if axis not in given]
    return (*rest[:first], *_index_dims(call), *rest[first:])


def _put_within(call: BoundedCall) -> None:
    x = call.args[0]
    call.args[1] = [
        None if index is None else _within(index, x.shape[axis], _true_size(call, axis), wraps=True)
        for axis, index in enumerate(call.args[1])
    ]


@rule("aten.index_put.default", notes=True)
def _write(call: BoundedCall) -> Any:
    x, nodes = call.args[0], call.node.args[1]
    _mask_indices(call)
    call.refuse_broadcast(call.operand(2), of=_places_dims(call))
    _note(call)
    _put_within(call)
    call.args[1] = [
        None if index is None else call.masked(index, call.dims(node), x.shape[axis])
        for axis, (node, index) in enumerate(zip(nodes, call.args[1], strict=True))  # pyright: ignore
    ]
    return call.default()


@rule("aten.scatter_add.default", "aten.scatter.src", "aten.scatter.value", "aten.scatter_reduce.two", notes=True)
@rule("aten.index_add.default", "aten.index_copy.default", notes=True)
def _write_along(call: BoundedCall) -> Any:
    x = call.args[0]
    axis = canonical_dim(call.args[1], x.ndim)
    bound = x.shape[axis] if x.ndim else 1
    call.mask_arg(2)
    _note(call)
    call.args[2] = _within(call.args[2], bound, _true_size(call, axis), wraps=False)
    call.mask_arg(2, bound)
    return call.default()
