"""Gathers of parameters over the batch axes, just before the products that take them.

XLA's partitioner multiplies some split operands wrongly, and XLA:CPU gathers 16-bit floats in float32.

On a mesh of three axes (jaxlib 0.10.2, forward and backward alike) some products come out wrong where the operands are split
over all three axes, one of them over two in one dim: rows over ``("data", "fsdp")`` times a matrix over ``("tensor", "fsdp")``
is one of them. Of 8,748 ways to split the operands and the result of one product over 2 × 2 × 2 that were tried, 56 gave wrong
numbers; none of 2,187 on meshes of two axes; none of 2,572 of the products that are left (weights whole over ``data`` and
``fsdp``, gradients of weights, attention, experts). So a parameter that such an axis splits is gathered over it just before each
product, which is what ``fsdp`` means anyway.

It is done in the *jaxpr* of a step, after differentiation: whatever the user wrote (``x @ w``, ``einsum``, convolutions, a table
as output head) is one of few primitives there, and inside of a loop over layers the gather is inside of the loop. Parameters, and
optimizer state, are followed through what keeps their shape (casts, averages, weight normalisation) or only moves dims; what cuts
or reshapes them takes them gathered.

On meshes of CPUs large parameters of 16 bits are gathered so on any mesh, as integers of the same bits: half the bytes sent, and
half the memory beside the float32 that XLA:CPU multiplies.

Programs that are an update alone (Fabric's ``optimizer.step()``, :meth:`xlatrain.step.step.StepBuilder.apply`) get gradients that
are not followed, and Fabric's is not rewritten. Their products (Muon's, a captured optimizer's) are of tensors of one parameter:
of the 48 ways to split two square matrices alike over 2 × 2 × 2 none gave a wrong ``a @ b``, ``a.T @ b``, ``a @ b.T``, or product
of three of them. Nor did one of the 50 ways to place three axes on a matrix (square, wide or tall; parameter and state alike)
give wrong Newton–Schulz iterations, products as Shampoo's or GaLore's, or a wrong ``einsum`` of three.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from xlatrain.mesh.mesh import DATA_AXES, platform
from xlatrain.xla.jaxprs import bodies, rewrapped, spliced, with_bodies
from xlatrain.xla.passes import is_needed
from xlatrain.xla.passes.batch_groups import auto_axes, manual_axes

DimAxes: TypeAlias = tuple[tuple[str, ...], ...]
"""The mesh axes of each dim."""


def split_of(sharding: NamedSharding, ndim: int) -> DimAxes:
    """The mesh axes of each dim of an array of ``ndim`` dims."""
    dims = (*sharding.spec, *[None] * (ndim - len(sharding.spec)))
    return tuple(() if axes is None else (axes,) if isinstance(axes, str) else tuple(axes) for axes in dims)


def over_batch_axes(split: DimAxes | None) -> TypeGuard[DimAxes]:
    """Whether an axis that splits the batch is among them."""
    return split is not None and any(axis in DATA_AXES for axes in split for axis in axes)


LARGE = 1 << 20
"""Bytes of 16-bit floats from which on a parameter is worth an equation of its own."""


def needs_gathers(mesh: Mesh | AbstractMesh) -> bool:
    """Whether there are products on ``mesh`` that come out wrong, or gathers that take twice the bytes."""
    return _is_wrong(mesh) or _widens(mesh)


def _is_wrong(mesh: Mesh | AbstractMesh) -> bool:
    return is_needed("gathering") and sum(size > 1 for size in mesh.shape.values()) >= 3


def _widens(mesh: Mesh | AbstractMesh) -> bool:
    return is_needed("16-bit gathering") and isinstance(mesh, Mesh) and mesh.size > 1 and platform(mesh) == "cpu"


def with_gathers(closed: Any, splits: Sequence[DimAxes | None], mesh: Mesh | AbstractMesh) -> Any:
    """A closed jaxpr with products that take what its inputs hold whole over the batch axes.

    Args:
        splits: of each input over which axes its dims are split; None where it is no parameter.
    """
    return rewrapped(closed, lambda jaxpr: _Rewriting(mesh)(jaxpr, splits)[0])


_PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"}
_MOVES = {
    "transpose", "slice", "dynamic_slice", "concatenate", "pad", "rev", "split", "broadcast_in_dim", "squeeze",
    "gather", "reduce_sum", "reduce_max", "reduce_min", "reduce_prod",
}  # fmt: skip
"""Primitives whose results have other dims than their operands: see :func:`_moved`."""


class _Rewriting:
    """Rewrites jaxprs for one mesh."""

    def __init__(self, mesh: Any) -> None:
        self._mesh, self._all, self._as_integers = mesh, _is_wrong(mesh), _widens(mesh)

    def __call__(self, jaxpr: Any, splits: Sequence[DimAxes | None]) -> tuple[Any, list[DimAxes | None]]:
        """An open jaxpr with gathers in it, and how its results are split, given how its inputs are.

        None: not over a batch axis, or not known.
        """
        known = {var: split for var, split in zip(jaxpr.invars, splits, strict=True) if split and over_batch_axes(split)}
        if not known:
            return jaxpr, [None] * len(jaxpr.outvars)
        equations = [new for equation in jaxpr.eqns for new in self._equation(equation, known)]
        results = [None if isinstance(var, core.Literal) else known.get(var) for var in jaxpr.outvars]
        return jaxpr.replace(eqns=equations), results

    def _equation(self, equation: Any, known: dict[Any, DimAxes]) -> Iterator[Any]:
        """The equations that replace an equation; ``known`` gets its results that are still split."""
        splits = [None if isinstance(var, core.Literal) else known.get(var) for var in equation.invars]
        name = equation.primitive.name
        if not any(splits):
            yield equation
        elif bodies(equation):
            equation, results = self._inside(equation, splits)
            known.update((out, split) for out, split in zip(equation.outvars, results, strict=True) if split)
            yield equation
        elif name == "optimization_barrier":
            known.update((out, split) for out, split in zip(equation.outvars, splits, strict=True) if split)
            yield equation
        elif name == "shard_map" and len(auto_axes(equation)) > 2:
            yield self._in_shard_map(equation, splits)
        elif name in _PRODUCTS or _holds_products(equation):
            yield from self._gathered(equation, splits)
        elif name == "reshape" and splits[0]:
            yield from self._reshaped(equation, splits[0], known)
        elif name in _MOVES:
            moved = _moved(equation, splits)
            if moved is None:
                yield from self._gathered(equation, splits)
            else:
                known.update((out, moved) for out in equation.outvars if moved and over_batch_axes(moved))
                yield equation
        else:
            for out in equation.outvars:  # casts, arithmetic: of the shape of a parameter, and split as it is
                same = [
                    split
                    for var, split in zip(equation.invars, splits, strict=True)
                    if split and getattr(var.aval, "shape", None) == getattr(out.aval, "shape", ())
                ]
                if same:
                    known[out] = same[0]
            yield equation

    def _inside(self, equation: Any, splits: Sequence[DimAxes | None]) -> tuple[Any, list[DimAxes | None]]:
        """``equation`` with gathers inside of its jaxprs, and how its results are split."""
        inner = bodies(equation)
        rewritten = [self(body.jaxpr, body.inputs(splits, lambda split: split and split[1:])) for body in inner]
        results = [
            body.results(found, lambda split: split and ((), *split))
            for body, (_, found) in zip(inner, rewritten, strict=True)
            if body.gives_results
        ]
        merged = [next(filter(None, of_bodies), None) for of_bodies in zip(*results, strict=True)]
        return with_bodies(equation, [jaxpr for jaxpr, _ in rewritten]), merged

    def _in_shard_map(self, equation: Any, splits: Sequence[DimAxes | None]) -> Any:
        """A ``shard_map`` that leaves three axes or more to the partitioner, such as a pipeline's, with gathers inside."""
        mesh, manual = equation.params["mesh"], manual_axes(equation)
        types = tuple(AxisType.Manual if axis in manual else AxisType.Auto for axis in mesh.axis_names)
        inside = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types)
        left = [split and tuple(tuple(axis for axis in axes if axis not in manual) for axes in split) for split in splits]
        rewritten = rewrapped(equation.params["jaxpr"], lambda jaxpr: _Rewriting(inside)(jaxpr, left)[0])
        return equation.replace(params={**equation.params, "jaxpr": rewritten})

    def _reshaped(self, equation: Any, split: DimAxes, known: dict[Any, DimAxes]) -> Iterator[Any]:
        """A reshape, behind a gather over the dims that it does not leave as they are; its result is split along the others."""
        (out,), operand = equation.outvars, equation.invars[0]
        kept = _dims_left(operand.aval.shape, out.aval.shape)
        lost = tuple(() if dim in kept else axes for dim, axes in enumerate(split))
        if over_batch_axes(lost):
            others = tuple(axes if dim in kept else () for dim, axes in enumerate(split))
            gather, operand = self._gather(operand, lost, others)
            yield from gather
        moved = [()] * out.aval.ndim
        for dim, place in kept.items():
            moved[place] = split[dim]
        if over_batch_axes(tuple(moved)):
            known[out] = tuple(moved)
        yield equation.replace(invars=[operand, *equation.invars[1:]])

    def _gathered(self, equation: Any, splits: Sequence[DimAxes | None]) -> Iterator[Any]:
        """``equation`` behind gathers of its split operands."""
        operands = list(equation.invars)
        for i, split in enumerate(splits):
            if split and (self._all or (self._is_half(operands[i]) and operands[i].aval.size * 2 >= LARGE)):
                gather, operands[i] = self._gather(operands[i], split)
                yield from gather
        yield equation.replace(invars=operands)

    def _is_half(self, var: Any) -> bool:
        """Whether XLA would gather it in float32."""
        return self._as_integers and var.aval.dtype in (jnp.bfloat16, jnp.float16)

    def _gather(self, var: Any, split: DimAxes, others: DimAxes = ()) -> tuple[list[Any], Any]:
        """The equations that gather ``var``, and what they give: for one product, so that backward gathers it anew.

        Args:
            others: dims that stay split, beside those of ``split``.
        """
        whole = [tuple(axis for axis in axes if axis not in DATA_AXES) for axes in split]
        whole = [axes + more for axes, more in zip(whole, others or [()] * len(whole), strict=True)]
        sharding = NamedSharding(self._mesh, PartitionSpec(*(axes or None for axes in whole)))

        def gathered(x: jax.Array) -> jax.Array:
            return lax.with_sharding_constraint(lax.optimization_barrier(x), sharding)

        def gathered_as_integers(x: jax.Array) -> jax.Array:
            return lax.bitcast_convert_type(gathered(lax.bitcast_convert_type(x, jnp.uint16)), x.dtype)

        return spliced(gathered_as_integers if self._is_half(var) else gathered, [var])


def _dims_left(before: Sequence[int], after: Sequence[int]) -> dict[int, int]:
    """The dims of a reshape that are dims of its result, too: the same size, behind as many elements."""
    places = {(math.prod(after[:dim]), size): dim for dim, size in enumerate(after) if size > 1}
    found = {dim: places.get((math.prod(before[:dim]), size)) for dim, size in enumerate(before)}
    return {dim: place for dim, place in found.items() if place is not None}


def _holds_products(equation: Any) -> bool:
    """Whether there are products inside of an equation that cannot be rewritten in place."""
    if equation.primitive.name == "shard_map":
        return False
    return any(
        inner.primitive.name in _PRODUCTS or _holds_products(inner)
        for jaxpr in core.jaxprs_in_params(equation.params)
        for inner in jaxpr.eqns
    )


def _moved(equation: Any, splits: Sequence[DimAxes | None]) -> DimAxes | None:
    """The split of the result of one of ``_MOVES``; empty: no matter. None: it cannot be said, so gather before."""
    name, params, split = equation.primitive.name, equation.params, splits[0]
    if not split:
        return None
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    if name == "transpose":
        return tuple(split[dim] for dim in params["permutation"])
    if name in ("slice", "dynamic_slice"):
        kept = all(old == new or not axes for old, new, axes in zip(before, after, split, strict=True))
        return split if kept else None
    if name == "squeeze" or name.startswith("reduce_"):
        gone = params["dimensions" if name == "squeeze" else "axes"]
        return tuple(axes for dim, axes in enumerate(split) if dim not in gone)
    if name == "gather":
        return () if len(before) < 3 else None  # rows of an embedding; matrices out of a stack, for products
    if name == "broadcast_in_dim":
        if equation.outvars[0].aval.size != equation.invars[0].aval.size:
            return () if len(before) == 1 else None  # a bias; a matrix for each row of the batch
        dims = params["broadcast_dimensions"]
        return tuple(split[dims.index(dim)] if dim in dims else () for dim in range(len(after)))
    return None
