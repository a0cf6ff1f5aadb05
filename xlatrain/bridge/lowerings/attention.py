"""Scaled dot-product attention: products of the inputs' dtype accumulated in float32, softmax in float32.

Shapes: B batch, H heads of the queries, K heads of keys and values (K divides H), L queries, S keys, E and V features.
The backward recomputes the probabilities from the log-sum-exp (Dao et al. 2022, section 3.1), and those that dropout keeps from
the number of the draw. On a GPU cuDNN's kernel is taken where it computes the same (:mod:`xlatrain.bridge.cudnn`).
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

import xlatrain.bridge.attention  # noqa: F401  defines the ops
from xlatrain.bridge import cudnn
from xlatrain.bridge.keys import draw_key
from xlatrain.bridge.registry import lowers


def _grouped(x: jax.Array, heads: int) -> jax.Array:
    """(…, H, L, E) → (B, K, H / K, L, E)."""
    return x.reshape(-1, heads, x.shape[-3] // heads, *x.shape[-2:])


def _rows(x: jax.Array) -> jax.Array:
    """(…, K, S, E) → (B, K, S, E)."""
    return x.reshape(-1, *x.shape[-3:])


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _scores(
    q: jax.Array, k: jax.Array, mask: jax.Array | None, lead: tuple[int, ...], is_causal: bool, scale: float
) -> jax.Array:
    """(B, K, G, L, S) in float32, -inf where masked."""
    scores = _product("bkgle,bkse->bkgls", q, k) * scale
    queries, keys = scores.shape[-2:]
    if is_causal:
        mask = jnp.tril(jnp.ones((queries, keys), bool))
    if mask is None:
        return scores
    full = jnp.broadcast_to(mask, (*lead, queries, keys)).reshape(scores.shape)
    return jnp.where(full, scores, -jnp.inf) if mask.dtype == jnp.bool_ else scores + full.astype(jnp.float32)


def _kept(shape: tuple[int, ...], p: float, index: int) -> jax.Array:
    """By what dropout multiplies the probabilities: 0, or ``1 / (1 - p)``."""
    return jnp.where(jax.random.uniform(draw_key(index), shape) < 1 - p, 1 / (1 - p), 0.0)


@lowers("xlatrain.attention.default", "xlatrain.dropout_attention.default")
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    is_causal: bool,
    scale: float,
    p: float = 0.0,
    index: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """The result (…, H, L, V), and log-sum-exp (…, H, L); a query whose every key is masked gives zeros, as in torch."""
    in_xla = functools.partial(_attention, mask=mask, is_causal=is_causal, scale=scale, p=p, index=index)
    return cudnn.attention(in_xla, q, k, v, is_causal, scale) if cudnn.computes(q, k, v, mask, is_causal, p) else in_xla(q, k, v)


def _attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, mask: jax.Array | None, is_causal: bool, scale: float, p: float, index: int
) -> tuple[jax.Array, jax.Array]:
    heads, lead = k.shape[-3], q.shape[:-2]
    scores = _scores(_grouped(q, heads), _rows(k), mask, lead, is_causal, scale)
    highest = jnp.max(scores, axis=-1, keepdims=True)
    highest = jnp.where(jnp.isneginf(highest), 0, highest)
    exponentials = jnp.exp(scores - highest)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    probabilities = exponentials / jnp.where(total == 0, 1, total)
    if p:
        probabilities *= _kept(probabilities.shape, p, index)
    out = _product("bkgls,bksv->bkglv", probabilities.astype(v.dtype), _rows(v)).astype(q.dtype)
    logsumexp = jnp.where(total == 0, math.inf, jnp.log(jnp.where(total == 0, 1, total)) + highest)
    return out.reshape(*q.shape[:-1], v.shape[-1]), logsumexp.reshape(q.shape[:-1])


@lowers("xlatrain.attention_backward.default", "xlatrain.dropout_attention_backward.default")
def attention_backward(
    grad: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    is_causal: bool,
    scale: float,
    out: jax.Array,
    logsumexp: jax.Array,
    p: float = 0.0,
    index: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients by q, k and v."""
    in_xla = functools.partial(_attention_backward, mask=mask, is_causal=is_causal, scale=scale, p=p, index=index)
    if cudnn.computes(q, k, v, mask, is_causal, p):
        return cudnn.attention_backward(in_xla, grad, q, k, v, is_causal, scale, out, logsumexp)
    return in_xla(grad, q, k, v, out, logsumexp)


def _attention_backward(
    grad: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    logsumexp: jax.Array,
    *,
    mask: jax.Array | None,
    is_causal: bool,
    scale: float,
    p: float,
    index: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    heads, lead, dtype = k.shape[-3], q.shape[:-2], q.dtype
    queries, keys, values = _grouped(q, heads), _rows(k), _rows(v)
    grads, outs = _grouped(grad.astype(dtype), heads), _grouped(out, heads)
    scores = _scores(queries, keys, mask, lead, is_causal, scale)
    # the log-sum-exp of a fully masked query is +inf, which makes its probabilities zero
    probabilities = jnp.exp(scores - logsumexp.reshape(*scores.shape[:-1], 1))
    own = jnp.sum(grads.astype(jnp.float32) * outs.astype(jnp.float32), axis=-1, keepdims=True)
    by_probability = _product("bkglv,bksv->bkgls", grads, values)
    dropped = probabilities
    if p:
        kept = _kept(probabilities.shape, p, index)
        by_probability, dropped = by_probability * kept, probabilities * kept
    by_score = (probabilities * (by_probability - own) * scale).astype(dtype)
    by_q = _product("bkgls,bkse->bkgle", by_score, keys)
    by_k = _product("bkgls,bkgle->bkse", by_score, queries)
    by_v = _product("bkgls,bkglv->bksv", dropped.astype(dtype), grads)
    return by_q.reshape(q.shape).astype(dtype), by_k.reshape(k.shape).astype(dtype), by_v.reshape(v.shape).astype(dtype)
