"""An op of a graph whose sizes are bounds (:mod:`xlatrain.bridge.capture.bounds`), with the true sizes at hand.

Of each array the first elements along each dim are the tensor; what comes after them may be anything, NaN too. A rule computes
an op so that this holds for its results: their true part depends on the true parts of its operands alone, and is what torch
computes of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.utils._pytree as pytree
from jax import lax
from torch.fx.node import Node

from xlatrain.bridge.capture.bounds import Bounds, Changing
from xlatrain.bridge.errors import LoweringError
from xlatrain.bridge.lower.index_checks import IndexFindings
from xlatrain.bridge.lower.registry import Lowering

Dims = tuple[Changing | None, ...]
Size = int | jax.Array


class TrueNumbers:
    """The numbers that change in a graph, in one run of its program.

    Args:
        bounds: of the graph.
        wholes: int32 (n,).
        fractions: float32 (n,).
    """

    def __init__(self, bounds: Bounds, wholes: jax.Array, fractions: jax.Array) -> None:
        self.bounds = bounds
        self._wholes, self._fractions = wholes, fractions

    def value(self, one: Changing) -> jax.Array:
        """A scalar."""
        return (self._wholes if one.whole else self._fractions)[one.index]

    def concerns(self, node: Node) -> bool:
        """Whether something changes of an op's operands, arguments or results."""
        of = (node, *node.all_input_nodes)
        return any(any(dims) for one in of for dims in self.bounds.sizes[one]) or any(self.bounds.arguments[node])


class BoundedCall:
    """An op, with arrays in place of the nodes among its arguments.

    Attributes:
        node: of the graph.
        args, kwargs: of the lowering.
        lowering: of the op, which takes all of an array for the tensor.
    """

    def __init__(
        self, node: Node, args: Sequence[Any], kwargs: dict[str, Any], lowering: Lowering, true: TrueNumbers, found: IndexFindings
    ) -> None:
        self.node, self.args, self.kwargs, self.lowering = node, list(args), dict(kwargs), lowering
        self._true, self._found = true, found
        _, structure = pytree.tree_flatten((node.args, node.kwargs))
        self._changing_args, self._changing_kwargs = pytree.tree_unflatten(true.bounds.arguments[node], structure)
        assert isinstance(node.target, torch._ops.OpOverload)
        self._places = {one.name: place for place, one in enumerate(node.target._schema.arguments)}

    def default(self) -> Any:
        """The results that the op's lowering makes of the arrays."""
        return self.lowering(*self.args, **self.kwargs)

    # -- arguments ---------------------------------------------------------------------------------------------------

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument by the name that it has in the op's schema."""
        place = self._places[name]
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)

    def changing(self, name: str) -> Any:
        """The parts of an argument that change: one for each leaf of it."""
        place = self._places[name]
        return self._changing_args[place] if place < len(self._changing_args) else self._changing_kwargs.get(name)

    def number(self, name: str, default: int) -> Size:
        """A whole number among the arguments."""
        one = self.changing(name)
        value = self.argument(name)
        return self._true.value(one) if one is not None else default if value is None else value

    def with_true_numbers(self) -> None:
        """Put the numbers that change in place of those of the graph."""
        put = self._true.value

        def true(value: Any, one: Any) -> Any:
            return put(one) if isinstance(one, Changing) else value

        self.args = [true(value, one) for value, one in zip(self.args, self._changing_args, strict=True)]
        self.kwargs = {name: true(value, self._changing_kwargs[name]) for name, value in self.kwargs.items()}

    def refuse_rounding(self, dtypes: Sequence[Any]) -> None:
        """Refuse a fraction that changes, in float32, where torch computes with it in another precision."""
        changing = (one for name in self.changing_names() for one in pytree.tree_leaves(self.changing(name), _is_one))
        fraction = any(isinstance(one, Changing) and not one.whole for one in changing)
        wide = [np.dtype(one).itemsize for one in dtypes if jnp.issubdtype(one, jnp.inexact)]
        if any(size < 4 for size in wide) or (fraction and any(size > 4 for size in wide)):
            raise self.refuse("a number in it changes, in another precision than float32")

    def changing_names(self) -> set[str]:
        """The arguments with numbers that change."""
        given = [name for name, place in self._places.items() if place < len(self.args) or name in self.kwargs]
        return {
            name for name in given if any(isinstance(one, Changing) for one in pytree.tree_leaves(self.changing(name), _is_one))
        }

    def operand(self, place: int) -> Node | None:
        """The node that is an argument; None where a number is."""
        one = self.node.args[place]
        return one if isinstance(one, Node) else None

    def operand_named(self, name: str) -> Node | None:
        """:meth:`operand` by the name that it has in the op's schema."""
        return self.operand(self._places[name])

    # -- sizes -------------------------------------------------------------------------------------------------------

    def dims(self, of: Any) -> Dims:
        """The sizes that change among the dims of an operand."""
        return self._true.bounds.sizes[of][0] if isinstance(of, Node) and self._true.bounds.sizes[of] else ()

    @property
    def out_dims(self) -> Dims:
        """The sizes that change among the dims of the result, or of the first one."""
        return self.dims(self.node)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The bounds of the result's sizes."""
        value = self.node.meta["val"]
        return tuple((value[0] if isinstance(value, list | tuple) else value).shape)

    def size(self, bound: int, one: Changing | None) -> Size:
        """The true size of a dim."""
        return bound if one is None else self._true.value(one)

    def sizes(self, shape: Sequence[int], dims: Dims) -> list[Size]:
        """The true sizes of all dims."""
        return [self.size(bound, one) for bound, one in zip(shape, dims, strict=True)]

    def count(self, shape: Sequence[int], dims: Dims, axes: Collection[int], dtype: Any) -> jax.Array:
        """The true number of elements along some dims, in a floating dtype: it may be beyond int32."""
        sizes = self.sizes([shape[a] for a in axes], tuple(dims[a] for a in axes))
        whole = math.prod(size for size in sizes if isinstance(size, int))
        return math.prod(
            (jnp.asarray(size, dtype) for size in sizes if not isinstance(size, int)), start=jnp.asarray(whole, dtype)
        )

    def refuse_broadcast(self, *operands: Any, of: Dims | None = None) -> None:
        """Refuse a dim of an operand that is not the same as that of the result, from the last dim on.

        Where it is 1, torch repeats it, which the larger array does not show.

        Args:
            operands: nodes; what is no node is left out.
            of: the dims of the result.
        """
        dims = self.out_dims if of is None else of
        for operand in operands:
            for one, result in zip(reversed(self.dims(operand)), reversed(dims), strict=False):
                if one is not None and one != result:
                    raise self.refuse("one is repeated where its size is 1")

    # -- masks -------------------------------------------------------------------------------------------------------

    def inside(self, shape: Sequence[int], dims: Dims, axes: Collection[int] | None = None) -> jax.Array | None:
        """Where the tensor is, looking at some dims or all; None where it is everywhere. It broadcasts to ``shape``."""
        mask = None
        for axis, one in enumerate(dims):
            if one is not None and (axes is None or axis in axes):
                wide = [shape[axis] if a == axis else 1 for a in range(len(shape))]
                along = lax.broadcasted_iota(jnp.int32, wide, axis) < self._true.value(one)
                mask = along if mask is None else mask & along
        return mask

    def masked(self, x: jax.Array, dims: Dims, fill: Any = 0, axes: Collection[int] | None = None) -> jax.Array:
        """``x`` with ``fill`` where the tensor is not."""
        mask = self.inside(x.shape, dims, axes)
        return x if mask is None else jnp.where(mask, x, jnp.asarray(fill, x.dtype))

    def mask_arg(self, place: int, fill: Any = 0, axes: Collection[int] | None = None) -> None:
        """Put :meth:`masked` in place of an argument, if it is an array."""
        if place < len(self.args) and (node := self.operand(place)) is not None:
            self.args[place] = self.masked(self.args[place], self.dims(node), fill, axes)

    # -- indices -----------------------------------------------------------------------------------------------------

    def note(self, size: Callable[[int], jax.Array | None] | None = None) -> None:
        """Look for indices out of range among the arguments.

        Args:
            size: gives the true size of a dim of the first operand; None where it is that of the graph.
        """
        self._found.note(self.node, self.args, size)

    @property
    def is_checked(self) -> bool:
        """Whether indices among the arguments are looked at."""
        return self._found.looks_at(self.node)

    def refuse(self, why: str) -> LoweringError:
        """The error for what has no rule."""
        return LoweringError(f"{self.node.target} of tensors whose sizes change: {why}")


def _is_one(leaf: Any) -> bool:
    return isinstance(leaf, Changing)
