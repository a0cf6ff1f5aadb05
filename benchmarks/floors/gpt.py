"""The GPT of ``benchmarks/scripts/gpt.py`` in plain JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Params = dict[str, jax.Array]


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * weight + bias


def linear(x: jax.Array, params: Params, name: str) -> jax.Array:
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def block(x: jax.Array, params: Params, name: str, n_heads: int) -> jax.Array:
    n, length, width = x.shape
    h = layer_norm(x, params[f"{name}.norm1.weight"], params[f"{name}.norm1.bias"])
    q, k, v = jnp.moveaxis(linear(h, params, f"{name}.qkv").reshape(n, length, 3, n_heads, -1), 2, 0)
    scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) / np.sqrt(width // n_heads)
    causal = jnp.tril(jnp.ones((length, length), bool))
    y = jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)), v)
    x = x + linear(y.reshape(n, length, width), params, f"{name}.out")
    h = layer_norm(x, params[f"{name}.norm2.weight"], params[f"{name}.norm2.bias"])
    h = jax.nn.gelu(linear(h, params, f"{name}.mlp.0"), approximate=False)
    return x + linear(h, params, f"{name}.mlp.2")


def loss_of(params: Params, tokens: jax.Array, targets: jax.Array, *, n_layers: int, n_heads: int) -> jax.Array:
    x = params["tokens.weight"][tokens] + params["positions.weight"]
    for i in range(n_layers):
        x = block(x, params, f"blocks.{i}", n_heads)
    x = layer_norm(x, params["norm.weight"], params["norm.bias"])
    logits = x @ params["head.weight"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def make_step(weights: Mapping[str, np.ndarray], *, n_layers: int, n_heads: int, lr: float) -> Callable[[Any, Any], jax.Array]:
    """``step(tokens, targets) -> loss``: one jitted AdamW step with clipping; int32 [n, length] each. Keeps its own state."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(lr, weight_decay=0.01))
    params = {name: jnp.array(value) for name, value in weights.items()}
    state = (params, optimizer.init(params))

    @partial(jax.jit, donate_argnums=0)
    def update(state: Any, tokens: jax.Array, targets: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, tokens, targets, n_layers=n_layers, n_heads=n_heads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    def step(tokens: Any, targets: Any) -> jax.Array:
        nonlocal state
        state, loss = update(state, tokens, targets)
        return loss

    return step
