"""The residual CNN of ``benchmarks/scripts/cnn.py`` in plain JAX, channels last, as one writes it for XLA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Arrays = dict[str, jax.Array]
MOMENTUM = 0.1
EPS = 1e-5


def conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    pad = (kernel.shape[0] - 1) // 2
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), [(pad, pad)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def batch_norm(x: jax.Array, params: Arrays, stats: Arrays, name: str) -> tuple[jax.Array, Arrays]:
    """Normalised by the batch; also the running statistics after it (unbiased variance, as torch keeps it)."""
    n = x.shape[0] * x.shape[1] * x.shape[2]
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    y = (x - mean) * jax.lax.rsqrt(variance + EPS) * params[f"{name}.weight"] + params[f"{name}.bias"]
    new = {
        f"{name}.running_mean": (1 - MOMENTUM) * stats[f"{name}.running_mean"] + MOMENTUM * mean,
        f"{name}.running_var": (1 - MOMENTUM) * stats[f"{name}.running_var"] + MOMENTUM * variance * n / (n - 1),
    }
    return y, new


def loss_of(params: Arrays, stats: Arrays, images: jax.Array, labels: jax.Array, *, n_stages: int) -> tuple[jax.Array, Arrays]:
    new: Arrays = {}
    x = jnp.transpose(images, (0, 2, 3, 1))
    x, found = batch_norm(conv(x, params["stem.0.weight"]), params, stats, "stem.1")
    new |= found
    x = jax.nn.relu(x)
    for i in range(n_stages):
        name, stride = f"stages.{i}", 1 if i == 0 else 2
        y, found = batch_norm(conv(x, params[f"{name}.conv1.weight"], stride), params, stats, f"{name}.norm1")
        new |= found
        y, found = batch_norm(conv(jax.nn.relu(y), params[f"{name}.conv2.weight"]), params, stats, f"{name}.norm2")
        new |= found
        x = jax.nn.relu(y + conv(x, params[f"{name}.skip.weight"], stride))
    logits = x.mean((1, 2)) @ params["head.weight"].T + params["head.bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new


def make_step(weights: Mapping[str, np.ndarray], *, n_stages: int, lr: float) -> Callable[[Any, Any], jax.Array]:
    """``step(images, labels) -> loss``: one jitted SGD step; float32 [n, 3, h, w], int32 [n]. Keeps its own state."""
    optimizer = optax.sgd(lr, momentum=0.9)
    arrays = {name: jnp.array(v.transpose(2, 3, 1, 0) if v.ndim == 4 else v) for name, v in weights.items()}
    stats = {name: value for name, value in arrays.items() if "running" in name}
    params = {name: value for name, value in arrays.items() if name not in stats and "num_batches" not in name}
    state = (params, stats, optimizer.init(params))

    @partial(jax.jit, donate_argnums=0)
    def update(state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        params, stats, opt_state = state
        gradient = jax.value_and_grad(loss_of, has_aux=True)
        (loss, stats), grads = gradient(params, stats, images, labels, n_stages=n_stages)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), stats, opt_state), loss

    def step(images: Any, labels: Any) -> jax.Array:
        nonlocal state
        state, loss = update(state, images, labels)
        return loss

    return step
