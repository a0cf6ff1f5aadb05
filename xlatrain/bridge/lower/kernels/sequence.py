"""Sequences that a mesh axis splits: the order of queries that balances causal attention, and sums over the parts.

Keys and values are gathered, queries stay: with grouped heads that is less to send than what a ring sends on, step by step, and
one kernel sees all keys. Under a causal mask the last part of a sequence sees all of it, the first only itself. So the sequence
is taken in twice as many chunks as there are parts, and part ``i`` computes chunk ``i`` from the front and chunk ``i`` from the
end (Llama 3, arXiv:2407.21783, section 3.3.2). Only queries, and what belongs to them, move there and back, around the kernel.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xlatrain.mesh.mesh import SEQUENCE_AXIS


def balanced_places(length: int, parts: int) -> np.ndarray:
    """The number of each query of a sequence of ``length``, int32, in balanced order, part after part."""
    chunks = np.arange(length, dtype=np.int32).reshape(2 * parts, -1)
    return np.concatenate([chunks[chunk] for part in range(parts) for chunk in (part, 2 * parts - 1 - part)])


def _routes(parts: int) -> list[list[tuple[int, int]]]:
    """For chunks of even and of odd number from which part they come and to which they go."""
    goal = [min(chunk, 2 * parts - 1 - chunk) for chunk in range(2 * parts)]
    return [[(part, goal[2 * part + odd]) for part in range(parts)] for odd in (0, 1)]


def to_balanced(x: jax.Array, parts: int, dim: int) -> jax.Array:
    """A part's chunks in balanced order, of a part of consecutive queries; inside of a ``shard_map``.

    Args:
        dim: the dim of queries.
    """
    halves = jnp.split(x, 2, axis=dim)
    even, odd = (lax.ppermute(half, SEQUENCE_AXIS, route) for half, route in zip(halves, _routes(parts), strict=True))
    return jnp.concatenate(_turned(even, odd), axis=dim)


def from_balanced(x: jax.Array, parts: int, dim: int) -> jax.Array:
    """Undo :func:`to_balanced`."""
    halves = _turned(*jnp.split(x, 2, axis=dim))
    routes = [[(goal, source) for source, goal in route] for route in _routes(parts)]
    return jnp.concatenate(
        [lax.ppermute(half, SEQUENCE_AXIS, route) for half, route in zip(halves, routes, strict=True)], axis=dim
    )


def _turned(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two, in the other order on parts of odd number: there the chunk from the front is one of odd number."""
    is_odd = lax.axis_index(SEQUENCE_AXIS) % 2 == 1
    return jnp.where(is_odd, second, first), jnp.where(is_odd, first, second)


def summed_part(x: jax.Array, parts: int, dim: int, *, on_cpu: bool) -> jax.Array:
    """The own part along ``dim`` of the sum over all parts; inside of a ``shard_map``.

    CPUs of several processes have no reduce-scatter.
    """
    if not on_cpu:
        return lax.psum_scatter(x, SEQUENCE_AXIS, scatter_dimension=dim, tiled=True)
    split = x.reshape(*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :])
    exchanged = lax.all_to_all(split, SEQUENCE_AXIS, dim, dim, tiled=True)
    return jnp.sum(exchanged.astype(jnp.float32), axis=dim).astype(x.dtype)
