"""The TPU kernels on a mesh: XLA does not partition a kernel, so that every device is told its own rows and heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from xlatrain.bridge.capture.masks.band import Band
from xlatrain.bridge.lower.kernels.choice import Splash

Pair = tuple[jax.Array, jax.Array]


def attention(
    choice: Splash, q: jax.Array, k: jax.Array, v: jax.Array, segments: Pair | None, band: Band, scale: float
) -> tuple[jax.Array, jax.Array]:
    """The result (…, H, L, V) and log-sum-exp (…, H, L).

    Args:
        q: (…, H, L, E); k, v: (…, K, S, E), (…, K, S, V).
        segments: int32 (B, L) and (B, S), or 1 in place of B, the number of rows.
    """
    from xlatrain.bridge.lower.kernels import splash  # Pallas takes a second to import

    def local(q: jax.Array, k: jax.Array, v: jax.Array, *own: jax.Array) -> tuple[jax.Array, jax.Array]:
        return splash.attention(q, k, v, _segments(own), band, scale, interpret=choice.interpret)

    k, v = (_repeated(_rows(x), choice.repeated) for x in (k, v))
    given = (_rows(q), k, v, *_by_row(segments, q))
    out, logsumexp = _mapped(choice, local, given, heads=3, results=2)
    return out.reshape(*q.shape[:-1], v.shape[-1]), logsumexp.reshape(q.shape[:-1])


def attention_backward(
    choice: Splash,
    grad: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Pair | None,
    band: Band,
    scale: float,
    out: jax.Array,
    logsumexp: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients by q, k and v."""
    from xlatrain.bridge.lower.kernels import splash

    def local(grad: Any, q: Any, k: Any, v: Any, out: Any, logsumexp: Any, *own: jax.Array) -> tuple[jax.Array, ...]:
        kept = (_segments(own), band, scale, out, logsumexp)
        return splash.attention_backward(grad, q, k, v, *kept, interpret=choice.interpret)

    keys = [_repeated(_rows(x), choice.repeated) for x in (k, v)]
    lse = logsumexp.reshape(-1, *q.shape[-3:-1])
    given = (_rows(grad), _rows(q), *keys, _rows(out), lse, *_by_row(segments, q))
    by_q, by_k, by_v = _mapped(choice, local, given, heads=6, results=3)
    by_k, by_v = (_summed(x, choice.repeated) for x in (by_k, by_v))
    return by_q.reshape(q.shape), by_k.reshape(k.shape), by_v.reshape(v.shape)


def _mapped(choice: Splash, local: Callable[..., Any], given: tuple[jax.Array, ...], *, heads: int, results: int) -> Any:
    """``local`` on every device; the first ``heads`` arrays have heads in dim 1, the rest only rows."""
    if choice.mesh is None:
        return local(*given)
    with_heads, without = PartitionSpec(choice.rows or None, choice.heads), PartitionSpec(choice.rows or None)
    specs = tuple(with_heads if i < heads else without for i in range(len(given)))
    run = jax.shard_map(local, mesh=choice.mesh, in_specs=specs, out_specs=(with_heads,) * results, check_vma=False)
    return run(*given)


def _rows(x: jax.Array) -> jax.Array:
    """(…, H, L, E) → (B, H, L, E)."""
    return x.reshape(-1, *x.shape[-3:])


def _by_row(segments: Pair | None, q: jax.Array) -> Pair | tuple[()]:
    if segments is None:
        return ()
    rows = q.size // max(1, q.shape[-3] * q.shape[-2] * q.shape[-1])
    first, second = (jnp.broadcast_to(x, (rows, x.shape[-1])) for x in segments)
    return first, second


def _segments(own: tuple[jax.Array, ...]) -> Any:
    from xlatrain.bridge.lower.kernels.splash import Segments

    return Segments(*own) if own else None


def _repeated(x: jax.Array, times: int) -> jax.Array:
    return jnp.repeat(x, times, axis=1) if times > 1 else x


def _summed(x: jax.Array, times: int) -> jax.Array:
    """(B, K · times, S, E) → (B, K, S, E), in float32."""
    if times == 1:
        return x
    parts = x.reshape(x.shape[0], -1, times, *x.shape[2:])
    return jnp.sum(parts.astype(jnp.float32), axis=2).astype(x.dtype)
