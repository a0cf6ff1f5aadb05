"""Convolutions by groups of the batch as contractions, because XLA's partitioner gets them wrong.

They are what the gradient of a grouped or depthwise convolution by its kernel is. XLA's partitioner (jaxlib 0.10.2) sums one over
devices that have the same rows, too, and so multiplies it by their number: those of a ``tensor`` axis, but on any mesh also where
a step makes its batch smaller; or it ends the process. How rows lie is the partitioner's choice, so that no mesh can be told
safe. For captured torch modules the lowering avoids them (``xlatrain/bridge/lower/lowerings/convolution.py``); here it is done in
the *jaxpr*, after differentiation, whoever wrote the convolution, inside of loops too, and of a
``shard_map`` that leaves axes to the partitioner.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import Mesh

from xlatrain.xla.jaxprs import rewrapped, with_jaxprs
from xlatrain.xla.passes import is_needed


def without_batch_groups(function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """``function`` of arrays, for ``jax.jit`` on ``mesh``, with contractions instead of convolutions by groups of the batch.

    Numbers do not change but where XLA's were wrong. On one device, and once XLA is mended, nothing changes.
    """
    if mesh.size == 1 or not is_needed("batch_groups"):
        return function

    def call(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        return jax.tree.unflatten(
            jax.tree.structure(shape), core.jaxpr_as_fun(rewrapped(closed, _rewritten))(*jax.tree.leaves(args))
        )

    return call


def _rewritten(jaxpr: Any) -> Any:
    return jaxpr.replace(eqns=[_equation(equation) for equation in jaxpr.eqns])


def _equation(equation: Any) -> Any:
    """``equation``, with contractions in place of convolutions by groups of the batch, also inside of its jaxprs."""
    name, params = equation.primitive.name, equation.params
    if name == "conv_general_dilated" and params["batch_group_count"] > 1:
        operands = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in equation.invars]
        # without compiler_options: traced only
        traced = jax.make_jaxpr(jax.jit(lambda x, kernel: contracted(x, kernel, **params)))(*operands)
        return traced.jaxpr.eqns[0].replace(invars=equation.invars, outvars=equation.outvars)
    if name == "shard_map" and not auto_axes(equation):
        return equation
    return with_jaxprs(equation, _rewritten)


def auto_axes(shard_map: Any) -> list[str]:
    """The mesh axes over which XLA still partitions what is inside of a ``shard_map`` equation: those that it does not name."""
    manual = manual_axes(shard_map)
    return [axis for axis, size in shard_map.params["mesh"].shape.items() if size > 1 and axis not in manual]


def manual_axes(shard_map: Any) -> set[str]:
    """The mesh axes that are taken inside of a ``shard_map`` equation, by it or by one around it."""
    mesh, params = shard_map.params["mesh"], shard_map.params
    return {*params.get("newly_manual_axes", params.get("manual_axes", ())), *mesh.manual_axes}  # jax 0.10; older


def contracted(
    x: jax.Array,
    kernel: jax.Array,
    *,
    window_strides: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    lhs_dilation: tuple[int, ...],
    rhs_dilation: tuple[int, ...],
    dimension_numbers: jax.lax.ConvDimensionNumbers,
    batch_group_count: int,
    precision: Any = None,
    preferred_element_type: Any = None,
    **_: Any,
) -> jax.Array:
    """``lax.conv_general_dilated`` with ``batch_group_count``, as one contraction for each position of the result.

    Or, if these are fewer, for each position in the kernel. 16-bit floats are summed in float32. The gradient of an ordinary
    convolution has a result of the size of its kernel.

    Args:
        x, kernel: arrays of equal rank, whose batch, feature and spatial dims are where ``dimension_numbers`` says. The batch of
            ``x`` and the output features of ``kernel`` are multiples of ``batch_group_count``.

    Returns:
        The result in ``preferred_element_type``, by default the promoted dtype of the operands.
    """
    dims, groups = dimension_numbers, batch_group_count
    x, kernel = x.transpose(dims.lhs_spec), kernel.transpose(dims.rhs_spec)
    spreads = [(low, high, step - 1) for (low, high), step in zip(padding, lhs_dilation, strict=True)]
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *spreads])
    taps = kernel.shape[2:]
    reach = [(n - 1) * step + 1 for n, step in zip(taps, rhs_dilation, strict=True)]
    size = [(n - r) // step + 1 for n, r, step in zip(x.shape[2:], reach, window_strides, strict=True)]
    x, kernel = (a.reshape(groups, a.shape[0] // groups, *a.shape[1:]) for a in (x, kernel))
    dtype = preferred_element_type or jnp.result_type(x, kernel)
    wide = jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype

    def seen(starts: tuple[int, ...], counts: Any, steps: Any) -> jax.Array:
        windows = zip(starts, counts, steps, strict=True)
        return x[(..., *(slice(start, start + (n - 1) * step + 1, step) for start, n, step in windows))]

    def contract(equation: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.einsum(equation, x, kernel, precision=precision, preferred_element_type=wide)

    if math.prod(size) <= math.prod(taps):
        starts = itertools.product(*(range(0, n * step, step) for n, step in zip(size, window_strides, strict=True)))
        found = jnp.stack([contract("gnc...,goc...->ngo", seen(start, taps, rhs_dilation), kernel) for start in starts], -1)
    else:
        found = jnp.zeros((), wide)
        for tap in itertools.product(*map(range, taps)):
            start = tuple(offset * step for offset, step in zip(tap, rhs_dilation, strict=True))
            found += contract("gnc...,goc->ngo...", seen(start, size, window_strides), kernel[(..., *tap)])
    found = found.astype(dtype).reshape(x.shape[1], groups * kernel.shape[1], *size)
    return found.transpose([dims.out_spec.index(dim) for dim in range(found.ndim)])
