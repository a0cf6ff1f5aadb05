"""Attention by cuDNN's flash kernel, on NVIDIA GPUs.

It keeps no probabilities in memory and, if causal, skips what is masked. Used for what it computes as torch does: 16-bit inputs,
no mask (a query whose every key is masked is zero in torch), no dropout (whose draws are ours), queries and keys of equal length
where causal. ``XLATRAIN_CUDNN_ATTENTION=0`` switches it off.

https://docs.jax.dev/en/latest/_autosummary/jax.nn.dot_product_attention.html
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

SWITCH = "XLATRAIN_CUDNN_ATTENTION"
_AMPERE, _HOPPER = (8, 0), (9, 0)


def computes(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, is_causal: bool, p: float) -> bool:
    """Whether cuDNN can compute this attention, if it is on a GPU: decided from shapes and dtypes.

    Args:
        q: (…, H, L, E); k: (…, K, S, E); v: (…, K, S, V).
        mask, is_causal, p: as torch's ``attn_mask``, ``is_causal``, ``dropout_p``.
    """
    capability = _capability()
    if mask is not None or p or capability < _AMPERE or q.dtype not in (jnp.bfloat16, jnp.float16):
        return False
    queries, features = q.shape[-2:]
    keys = k.shape[-2]
    widest = 256 if capability >= _HOPPER else 128
    return features == v.shape[-1] and features % 8 == 0 and features <= widest and (queries == keys or not is_causal)


def attention(
    otherwise: Callable[[jax.Array, jax.Array, jax.Array], Any],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    is_causal: bool,
    scale: float,
) -> Any:
    """(result, float32 log-sum-exp of zeros: :func:`attention_backward` needs none); ``otherwise`` off CUDA."""

    def fused(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        # The kernel of training, which the backward pass repeats: XLA keeps one of the two.
        out, _ = jax.vjp(_kernel(is_causal, scale), *map(_by_position, (q, k, v)))
        return _by_head(out, q.shape), jnp.zeros(q.shape[:-1], jnp.float32)

    return jax.lax.platform_dependent(q, k, v, cuda=fused, default=otherwise)


def attention_backward(
    otherwise: Callable[..., Any],
    grad: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    is_causal: bool,
    scale: float,
    *rest: Any,
) -> Any:
    """Gradients by q, k and v; ``otherwise`` gets ``rest`` too."""

    def fused(grad: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, *_: Any) -> tuple[jax.Array, ...]:
        _, differentiate = jax.vjp(_kernel(is_causal, scale), *map(_by_position, (q, k, v)))
        grads = differentiate(_by_position(grad.astype(q.dtype)))
        return tuple(_by_head(found, x.shape) for found, x in zip(grads, (q, k, v), strict=True))

    return jax.lax.platform_dependent(grad, q, k, v, *rest, cuda=fused, default=otherwise)


def _kernel(is_causal: bool, scale: float) -> Callable[..., Any]:
    return functools.partial(jax.nn.dot_product_attention, scale=scale, is_causal=is_causal, implementation="cudnn")


def _by_position(x: jax.Array) -> jax.Array:
    """(…, H, L, E) → (B, L, H, E)."""
    return jnp.swapaxes(x.reshape(-1, *x.shape[-3:]), 1, 2)


def _by_head(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """(B, L, H, E) → ``shape``, (…, H, L, E)."""
    return jnp.swapaxes(x, 1, 2).reshape(shape)


@functools.cache
def _capability() -> tuple[int, ...]:
    """The compute capability of this process's GPUs; (0,) where there are none, or the switch is off."""
    if os.environ.get(SWITCH) == "0":
        return (0,)
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return (0,)
    return tuple(int(part) for part in device.compute_capability.split("."))
