"""The passes over a step's jaxpr, applied where XLA computes arrays on several devices wrongly, or badly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core
from jax.sharding import NamedSharding

from xlatrain.xla.passes.gathering import needs_gathers, split_of, with_gathers
from xlatrain.xla.passes.ordering import needs_order, serialize_collectives
from xlatrain.xla.passes.reduce_scatters import needs_reduce_scatters, with_reduce_scatters


def apply_jaxpr_passes(function: Callable[..., Any], shardings: Callable[[Any], Any]) -> Callable[..., Any]:
    """``function``, for ``jax.jit``, with the gathers, the order of collectives, and the reduce-scatters that its mesh needs.

    Numbers do not change but where XLA's were wrong, and by rounding. See :mod:`xlatrain.xla.passes.gathering`,
    :mod:`xlatrain.xla.passes.ordering` and :mod:`xlatrain.xla.passes.reduce_scatters` for which meshes need what; on others
    nothing is changed.

    Args:
        shardings: a pytree of arrays like ``function``'s first argument → its shardings in the same structure.
    """

    def call(first: Any, *others: Any) -> Any:
        places = jax.tree.leaves(shardings(first))
        meshes = {place.mesh for place in places if isinstance(place, NamedSharding)}
        mesh = next(iter(meshes)) if len(meshes) == 1 else None
        if mesh is None or not any(needs(mesh) for needs in (needs_gathers, needs_order, needs_reduce_scatters)):
            return function(first, *others)
        splits = [split_of(place, leaf.ndim) for place, leaf in zip(places, jax.tree.leaves(first), strict=True)]
        closed, shape = jax.make_jaxpr(function, return_shape=True)(first, *others)
        given = jax.tree.leaves((first, *others))
        unknown = len(given) - len(splits)
        known = [*splits, *[None] * unknown]
        if needs_gathers(mesh):
            closed = with_gathers(closed, known, mesh)
        if needs_order(mesh):
            closed = serialize_collectives(closed, [*(any(split) for split in splits), *[True] * unknown], mesh.size)
        if needs_reduce_scatters(mesh):  # last: to the order it is a product like others
            closed = with_reduce_scatters(closed, known, mesh)
        return jax.tree.unflatten(jax.tree.structure(shape), core.jaxpr_as_fun(closed)(*given))

    return call
