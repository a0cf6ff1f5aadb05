"""The one-layer module of ``benchmarks/scripts/tiny.py`` in plain JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def make_step(weights: Mapping[str, np.ndarray], *, lr: float) -> Callable[[Any, Any], jax.Array]:
    """``step(x, y) -> loss``: one jitted SGD step; float32 [n, 32], [n, 2]. Keeps its own state; returns without waiting."""
    optimizer = optax.sgd(lr)
    params = {name: jnp.array(value) for name, value in weights.items()}
    state = (params, optimizer.init(params))

    def loss_of(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.square(x @ params["layer.weight"].T + params["layer.bias"] - y).mean()

    @partial(jax.jit, donate_argnums=0)
    def update(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    def step(x: Any, y: Any) -> jax.Array:
        nonlocal state
        state, loss = update(state, x, y)
        return loss

    return step
