"""Gradients of parameters that are split, summed as the devices keep them, because XLA:CPU sums them whole.

The gradient of a weight is a product over the rows of the batch, of which each device has some. Where the weight is split over
the same axes, a device needs its part of the sum alone. Compilers for GPU and TPU make a *reduce-scatter* of it; XLA:CPU (jaxlib
0.10.2) sums all of it on every device, out of place, and then cuts the device's part out: twice the memory, and twice the bytes
sent (``benchmarks/notes/memory_on_cpu.md``).

It is done in the *jaxpr* of a step, after differentiation. A product whose result is split like a parameter in the end, behind
arithmetic and transpositions, in a loop too, becomes a ``shard_map``: each device multiplies its rows, and keeps its part of the
sum. That is right whatever the operands are, and sends least where devices have rows of them. Large ones are multiplied and
summed in pieces, of which one is there at a time. 16-bit floats are summed in float32, as XLA:CPU does.

Several processes exchange the parts (*all-to-all*), and each adds up its own: gloo's reduce-scatter copies all of its operand
twice, and takes twice the time of a sum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from xlatrain.mesh.mesh import batch_axes, is_multiprocess, platform
from xlatrain.xla.jaxprs import LOOPS, bodies, rewrapped, spliced, with_bodies
from xlatrain.xla.passes import is_needed
from xlatrain.xla.passes.gathering import DimAxes, over_batch_axes, split_of

LARGE = 4 << 20
"""Bytes of a gradient in float32 from which on it is worth a collective of its own."""

PIECE = 16 << 20
"""Bytes of what is summed at once: larger gradients are multiplied, and summed, in pieces."""


def needs_reduce_scatters(mesh: Mesh | AbstractMesh) -> TypeGuard[Mesh]:
    """Whether XLA makes none on ``mesh``, which has only axes that split the batch."""
    parallel = {axis for axis, size in mesh.shape.items() if size > 1}
    if not isinstance(mesh, Mesh) or not is_needed("reduce_scatters"):
        return False
    return platform(mesh) == "cpu" and 0 < len(parallel) == len(parallel & {*batch_axes(mesh)})


def with_reduce_scatters(closed: Any, splits: Sequence[DimAxes | None], mesh: Mesh) -> Any:
    """A closed jaxpr with reduce-scatters of large gradients.

    Args:
        splits: of each input over which axes its dims are split; None where it is no parameter. A result of such a shape that is
            constrained to be split so is one, or its gradient.
    """
    given, results = closed.jaxpr.invars, closed.jaxpr.outvars
    parameters = {(var.aval.shape, split) for var, split in zip(given, splits, strict=True) if over_batch_axes(split)}
    constraints = {equation.outvars[0]: equation for equation in closed.jaxpr.eqns if _constrains(equation)}
    found = [None if _is_literal(var) else _split(constraints.get(var)) for var in results]
    wanted = [split if (var.aval.shape, split) in parameters else None for var, split in zip(results, found, strict=True)]
    return rewrapped(closed, lambda jaxpr: _Rewriting(mesh)(jaxpr, wanted)[0]) if any(wanted) else closed


def _constrains(equation: Any) -> bool:
    return equation.primitive.name == "sharding_constraint"


def _split(constraint: Any) -> DimAxes | None:
    """The split that a ``sharding_constraint`` demands; None if there is none, or it leaves dims open."""
    sharding = constraint and constraint.params["sharding"]
    if not isinstance(sharding, NamedSharding) or PartitionSpec.UNCONSTRAINED in sharding.spec:
        return None
    return split_of(sharding, constraint.outvars[0].aval.ndim)


_Wanted: TypeAlias = Sequence[DimAxes | None]


class _Rewriting:
    """Rewrites jaxprs for one mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._parallel = tuple(axis for axis in batch_axes(mesh) if mesh.shape[axis] > 1)

    def __call__(self, jaxpr: Any, wanted: _Wanted) -> tuple[Any, list[DimAxes | None]]:
        """An open jaxpr with reduce-scatters in it, and how its inputs will be split, given how its results will.

        None: not over a batch axis, or not known.
        """
        known = {var: split for var, split in zip(jaxpr.outvars, wanted, strict=True) if split and not _is_literal(var)}
        followed = [self._followed(equation, known) for equation in reversed(jaxpr.eqns)]
        equations = [new for equation in reversed(followed) for new in self._product(equation, known)]
        return jaxpr.replace(eqns=equations), [known.get(var) for var in jaxpr.invars]

    def _followed(self, equation: Any, known: dict[Any, DimAxes]) -> Any:
        """``equation``, rewritten inside; ``known`` gets how its operands will be split."""
        name, wanted = equation.primitive.name, [known.get(out) for out in equation.outvars]
        inputs: _Wanted = []
        if bodies(equation):
            equation, inputs = self._inside(equation, wanted)
        elif _constrains(equation):
            inputs = wanted if _split(equation) in wanted else []
        elif name == "optimization_barrier":
            inputs = wanted
        elif name == "transpose":
            order = equation.params["permutation"]
            inputs = [wanted[0] and tuple(wanted[0][order.index(dim)] for dim in range(len(order)))]
        elif name not in _PRODUCTS and len(wanted) == 1:  # casts, arithmetic: split as its result
            shape = equation.outvars[0].aval.shape
            inputs = [wanted[0] if getattr(var.aval, "shape", None) == shape else None for var in equation.invars]
        for var, split in zip(equation.invars, inputs, strict=False):
            if over_batch_axes(split) and not _is_literal(var):
                known.setdefault(var, split)
        return equation

    def _inside(self, equation: Any, wanted: _Wanted) -> tuple[Any, _Wanted]:
        """``equation`` with reduce-scatters inside of its jaxprs, and how its operands will be split, but those of a loop."""
        inner = bodies(equation)
        rewritten = [self(body.jaxpr, body.outputs(wanted, lambda split: split and split[1:])) for body in inner]
        inputs: dict[int, DimAxes] = {}
        if equation.primitive.name not in LOOPS:
            for body, (_, splits) in zip(inner, rewritten, strict=True):
                for operand, split in zip(body.operands, splits, strict=True):
                    if split:
                        inputs.setdefault(operand, split)
        return with_bodies(equation, [jaxpr for jaxpr, _ in rewritten]), [inputs.get(at) for at in range(len(equation.invars))]

    def _product(self, equation: Any, known: dict[Any, DimAxes]) -> list[Any]:
        """The equations that replace an equation: itself, if it is not a large gradient."""
        out = equation.outvars[0] if equation.primitive.name == "dot_general" else None
        split = known.get(out)
        if out is None or split is None or out.aval.size * 4 < LARGE or _is_placed(equation):
            return [equation]
        if any(var in known for var in equation.invars):  # of parameters, as in Muon's iterations, not of rows
            return [equation]
        dims = [dim for dim, axes in enumerate(split) if {*axes} & {*self._parallel}]
        gradient = _Gradient(equation.params, *(var.aval.shape for var in equation.invars))
        rows = gradient.rows(math.prod(self._mesh.shape[axis] for axis in self._parallel))
        if len(dims) != 1 or rows is None:
            return [equation]
        equations, _ = spliced(self._scattered(gradient, rows, dims[0], split[dims[0]], out.aval.dtype), equation.invars)
        return [*equations[:-1], equations[-1].replace(outvars=[out])]

    def _scattered(
        self, gradient: _Gradient, rows: tuple[int, int], dim: int, axes: tuple[str, ...], dtype: Any
    ) -> Callable[..., jax.Array]:
        """The product as a function of its operands."""
        if dim not in gradient.leading():  # what is scattered stands in front, or all of it would be transposed before
            turned, order = gradient.turned()
            function = self._scattered(turned, (rows[1], rows[0]), order.index(dim), axes, dtype)
            return lambda x, y: lax.transpose(function(y, x), [order.index(at) for at in range(len(order))])
        wide = jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
        product = functools.partial(lax.dot_general, **{**gradient.params, "preferred_element_type": wide, "out_sharding": None})
        cut = gradient.longest(dim)
        pieces = min(cut.size, _pieces(math.prod(gradient.shape) * wide.itemsize)) if cut else 1
        others = tuple(axis for axis in self._parallel if axis not in axes)

        def piece(*operands: jax.Array) -> jax.Array:
            total = self._summed(product(*operands), dim, axes)
            return (lax.psum(total, others) if others else total).astype(dtype)

        def local(*operands: jax.Array) -> jax.Array:
            if cut is None or pieces == 1:
                return piece(*operands)
            parts = jnp.array_split(operands[cut.side], pieces, axis=cut.dim)
            before, after = operands[: cut.side], operands[cut.side + 1 :]
            return jnp.concatenate([piece(*before, part, *after) for part in parts], axis=cut.along)

        given = tuple(PartitionSpec(*[None] * row, self._parallel) for row in rows)
        result = PartitionSpec(*[None] * dim, axes)
        return jax.shard_map(local, mesh=self._mesh, in_specs=given, out_specs=result, check_vma=False)

    def _summed(self, x: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
        """A device's part along ``dim`` of the sum over ``axes``."""
        if not is_multiprocess(self._mesh):
            return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
        parts = math.prod(self._mesh.shape[axis] for axis in axes)
        x = x.reshape(*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :])
        return lax.all_to_all(x, axes, dim, dim, tiled=True).sum(dim)


@dataclass(frozen=True)
class _Cut:
    """A dim of one operand, ``dim`` of number ``side``, that is ``along`` in the result."""

    side: int
    dim: int
    along: int
    size: int


@dataclass(frozen=True)
class _Gradient:
    """A ``dot_general`` with ``params`` of operands of two shapes."""

    params: Mapping[str, Any]
    left: tuple[int, ...]
    right: tuple[int, ...]

    def rows(self, parts: int) -> tuple[int, int] | None:
        """The dim of each operand that the batch axes split, of those that are summed over: the first that can be."""
        summed, _ = self.params["dimension_numbers"]
        return next(((i, j) for i, j in zip(*summed, strict=True) if self.left[i] % parts == 0), None)

    @property
    def shape(self) -> list[int]:
        """The shape of the result: dims of both operands, then of the left one, then of the right one."""
        _, shared = self.params["dimension_numbers"]
        return [self.left[dim] for dim in shared[0]] + [cut.size for cut in self._cuts()]

    def _cuts(self) -> list[_Cut]:
        summed, shared = self.params["dimension_numbers"]
        own = [
            (side, dim)
            for side, shape in enumerate((self.left, self.right))
            for dim in range(len(shape))
            if dim not in summed[side] and dim not in shared[side]
        ]
        return [_Cut(side, dim, len(shared[0]) + i, (self.left, self.right)[side][dim]) for i, (side, dim) in enumerate(own)]

    def leading(self) -> range:
        """The result's dims in front of those that the right operand alone has."""
        return range(len(self.shape) - sum(cut.side == 1 for cut in self._cuts()))

    def longest(self, but: int) -> _Cut | None:
        """The longest dim that only one operand has, other than the result's dim ``but``."""
        return max((cut for cut in self._cuts() if cut.along != but), key=lambda cut: cut.size, default=None)

    def turned(self) -> tuple[_Gradient, list[int]]:
        """The product of the operands in the other order, and which of this one's dims its dims are."""
        summed, shared = self.params["dimension_numbers"]
        turned = _Gradient({**self.params, "dimension_numbers": (summed[::-1], shared[::-1])}, self.right, self.left)
        ours = [cut.along for side in (1, 0) for cut in self._cuts() if cut.side == side]
        return turned, [*range(len(shared[0])), *ours]


def _is_placed(product: Any) -> bool:
    """Whether its author says how the result is split."""
    sharding = product.params["out_sharding"]
    return sharding is not None and not sharding.mesh.are_all_axes_auto


def _pieces(size: int) -> int:
    """A power of two, so that pieces of a round dim are round."""
    return 1 << (math.ceil(size / PIECE) - 1).bit_length()


_PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"}


def _is_literal(var: Any) -> bool:
    return isinstance(var, core.Literal)
