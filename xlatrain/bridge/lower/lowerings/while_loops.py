"""Loops whose end only the running program knows, as ``lax.while_loop``."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from xlatrain.bridge.capture.traceable.while_loop import loop_of
from xlatrain.bridge.host_draws import use_drawn
from xlatrain.bridge.lower.interpret import lower
from xlatrain.bridge.lower.registry import is_partitioned, lowers, program_mesh
from xlatrain.mesh.mesh import platform


@lowers("xlatrain.while_loop.default")
def while_loop(carried: Sequence[jax.Array], constants: Sequence[jax.Array], loop: int) -> list[jax.Array]:
    """``carried``, as the body leaves them when the first one, a bool scalar, is false."""
    body, mesh = loop_of(loop).body, program_mesh()
    run = lower(body, platform=None if mesh is None else platform(mesh), partitioned=is_partitioned(), mesh=mesh)
    key = None
    if body.uses_random:
        *constants, seed = constants
        key = jax.random.wrap_key_data(seed.astype(jnp.uint32), impl="threefry2x32")

    def turn(state: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, list[jax.Array]]:
        count, values = state
        with use_drawn(None):  # nobody knows how often it turns
            return count + 1, run([*values, *constants], None if key is None else jax.random.fold_in(key, count))

    return lax.while_loop(lambda state: state[1][0], turn, (jnp.zeros((), jnp.int32), list(carried)))[1]
