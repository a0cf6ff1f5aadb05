"""Attention on a mesh, part by part: XLA does not partition a kernel, nor the blocks that queries are taken in along a sequence
that is split. So every device is told its own rows, heads and queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from xlatrain.bridge.capture.masks.band import Band
from xlatrain.bridge.lower.kernels.choice import Gathered, OwnPart, Splash
from xlatrain.bridge.lower.kernels.sequence import from_balanced, summed_part, to_balanced
from xlatrain.mesh.mesh import SEQUENCE_AXIS, platform, shard_map_here

Pair = tuple[jax.Array, jax.Array]
Forward = Callable[..., tuple[jax.Array, jax.Array]]
Backward = Callable[..., tuple[jax.Array, ...]]


def attention(
    choice: Splash, q: jax.Array, k: jax.Array, v: jax.Array, segments: Pair | None, band: Band, scale: float
) -> tuple[jax.Array, jax.Array]:
    """The result (…, H, L, V) and log-sum-exp (…, H, L) of the TPU kernels.

    Args:
        q: (…, H, L, E); k, v: (…, K, S, E), (…, K, S, V).
        segments: int32 (B, L) and (B, S), or 1 in place of B, the number of rows.
    """
    from xlatrain.bridge.lower.kernels import splash  # Pallas takes a second to import

    shards = splash.Shards(choice.parts, choice.balanced)

    def local(infos: Any, q: jax.Array, k: jax.Array, v: jax.Array, own: Pair | None) -> tuple[jax.Array, jax.Array]:
        q, own = _balanced(choice, q), _balanced_segments(choice, own)
        given: Any = (_segments(own), band, scale, shards, infos)
        out, logsumexp = splash.attention(q, k, v, *given, interpret=choice.interpret)
        return _unbalanced(choice, out), _unbalanced(choice, logsumexp)

    k, v = (_repeated(_rows(x), choice.repeated) for x in (k, v))
    infos = _infos(choice, _rows(q), k, v, band)
    out, logsumexp = _forward(choice, local, infos, q, k, v, segments)
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
    """Gradients by q, k and v, of the TPU kernels."""
    from xlatrain.bridge.lower.kernels import splash

    shards = splash.Shards(choice.parts, choice.balanced)

    def local(infos: Any, grad: Any, q: Any, k: Any, v: Any, out: Any, logsumexp: Any, own: Pair | None) -> tuple[Any, ...]:
        grad, q, out, logsumexp = (_balanced(choice, x) for x in (grad, q, out, logsumexp))
        kept: Any = (_segments(_balanced_segments(choice, own)), band, scale, out, logsumexp, shards, infos)
        by_q, by_k, by_v = splash.attention_backward(grad, q, k, v, *kept, interpret=choice.interpret)
        return _unbalanced(choice, by_q), by_k, by_v

    keys = [_repeated(_rows(x), choice.repeated) for x in (k, v)]
    infos = _infos(choice, _rows(q), keys[0], keys[1], band)
    return _backward(choice, local, infos, (grad, q, k, v), keys, out, logsumexp, segments)


def gathered(
    choice: Gathered, function: Forward, q: jax.Array, k: jax.Array, v: jax.Array, segments: Pair | None
) -> tuple[jax.Array, jax.Array]:
    """The result and log-sum-exp of ``function(q, k, v, segments=…, offset=…)``, given how many queries come before its own."""

    def local(_: None, q: jax.Array, k: jax.Array, v: jax.Array, own: Pair | None) -> tuple[jax.Array, jax.Array]:
        return function(q, k, v, segments=own, offset=lax.axis_index(SEQUENCE_AXIS) * q.shape[2])

    k, v = (_repeated(_rows(x), choice.repeated) for x in (k, v))
    out, logsumexp = _forward(choice, local, None, q, k, v, segments)
    return out.reshape(*q.shape[:-1], v.shape[-1]), logsumexp.reshape(q.shape[:-1])


def gathered_backward(
    choice: Gathered,
    function: Backward,
    grad: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Pair | None,
    out: jax.Array,
    logsumexp: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients by q, k and v, of ``function(grad, q, k, v, out, logsumexp, segments=…, offset=…)``."""

    def local(_: None, grad: Any, q: Any, k: Any, v: Any, out: Any, logsumexp: Any, own: Pair | None) -> tuple[Any, ...]:
        return function(grad, q, k, v, out, logsumexp, segments=own, offset=lax.axis_index(SEQUENCE_AXIS) * q.shape[2])

    keys = [_repeated(_rows(x), choice.repeated) for x in (k, v)]
    return _backward(choice, local, None, (grad, q, k, v), keys, out, logsumexp, segments)


def _forward(choice: OwnPart, local: Forward, infos: Any, q: Any, k: Any, v: Any, segments: Pair | None) -> Any:
    if choice.mesh is None:
        return local(infos, _rows(q), k, v, _by_row(segments, q))
    places = _Places(choice)
    specs = (places.infos(infos), places.queries, places.keys, places.keys, places.segments(segments))
    run = shard_map_here(local, choice.mesh, specs, (places.queries,) * 2)
    return run(infos, _rows(q), k, v, _by_row(segments, q))


def _backward(
    choice: OwnPart,
    local: Callable[..., Any],
    infos: Any,
    given: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    keys: list[jax.Array],
    out: jax.Array,
    logsumexp: jax.Array,
    segments: Pair | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    grad, q, k, v = given
    args = (infos, _rows(grad), _rows(q), *keys, _rows(out), logsumexp.reshape(-1, *q.shape[-3:-1]), _by_row(segments, q))
    if choice.mesh is None:
        by_q, by_k, by_v = local(*args)
    else:
        places, mesh = _Places(choice), choice.mesh

        def summed(*args: Any) -> tuple[jax.Array, ...]:
            by_q, *by_keys = local(*args)
            if choice.parts == 1:
                return by_q, *by_keys
            return by_q, *(summed_part(x, choice.parts, 2, on_cpu=platform(mesh) == "cpu") for x in by_keys)

        queries, whole = places.queries, places.keys
        specs = (places.infos(infos), queries, queries, whole, whole, queries, queries, places.segments(segments))
        run = shard_map_here(summed, mesh, specs, (queries,) * 3)
        by_q, by_k, by_v = run(*args)
    by_k, by_v = (_summed(x, choice.repeated) for x in (by_k, by_v))
    return by_q.reshape(q.shape), by_k.reshape(k.shape), by_v.reshape(v.shape)


class _Places:
    """The specs of arrays (B, H, L, …) on a mesh: ``queries`` lie with their part of a sequence, ``keys`` are gathered."""

    def __init__(self, choice: OwnPart) -> None:
        self._rows, self._sequence = choice.rows or None, SEQUENCE_AXIS if choice.parts > 1 else None
        self.queries = PartitionSpec(self._rows, choice.heads, self._sequence)
        self.keys = PartitionSpec(self._rows, choice.heads)

    def segments(self, segments: Pair | None) -> Any:
        return PartitionSpec() if segments is None else (PartitionSpec(self._rows, self._sequence), PartitionSpec(self._rows))

    def infos(self, infos: Any) -> Any:
        """The specs of the kernels' masks: of blocks (1, L, S), and of queries (L,)."""
        if infos is None:
            return PartitionSpec()
        return jax.tree.map(lambda x: PartitionSpec(SEQUENCE_AXIS) if x.ndim == 1 else PartitionSpec(None, SEQUENCE_AXIS), infos)


def _infos(choice: Splash, q: jax.Array, k: jax.Array, v: jax.Array, band: Band) -> Any:
    """The masks of the kernels' blocks where they differ from part to part, else None."""
    from xlatrain.bridge.lower.kernels import splash

    if choice.parts == 1 or choice.mesh is None or band.is_whole:
        return None
    heads = q.shape[1] // (1 if choice.heads is None else choice.mesh.shape[choice.heads])
    own = jax.ShapeDtypeStruct((q.shape[0], heads, q.shape[2] // choice.parts, q.shape[3]), q.dtype)
    return splash.masks_of_parts(own, k, v, band, splash.Shards(choice.parts, choice.balanced), interpret=choice.interpret)


def _balanced(choice: Splash, x: jax.Array, dim: int = 2) -> jax.Array:
    return to_balanced(x, choice.parts, dim) if choice.balanced else x


def _unbalanced(choice: Splash, x: jax.Array) -> jax.Array:
    return from_balanced(x, choice.parts, 2) if choice.balanced else x


def _balanced_segments(choice: Splash, own: Pair | None) -> Pair | None:
    return None if own is None else (_balanced(choice, own[0], 1), own[1])


def _rows(x: jax.Array) -> jax.Array:
    """(…, H, L, E) → (B, H, L, E)."""
    return x.reshape(-1, *x.shape[-3:])


def _by_row(segments: Pair | None, q: jax.Array) -> Pair | None:
    if segments is None:
        return None
    rows = q.size // max(1, q.shape[-3] * q.shape[-2] * q.shape[-1])
    first, second = (jnp.broadcast_to(x, (rows, x.shape[-1])) for x in segments)
    return first, second


def _segments(own: Pair | None) -> Any:
    from xlatrain.bridge.lower.kernels.splash import Segments

    return None if own is None else Segments(*own)


def _repeated(x: jax.Array, times: int) -> jax.Array:
    return jnp.repeat(x, times, axis=1) if times > 1 else x


def _summed(x: jax.Array, times: int) -> jax.Array:
    """(B, K · times, S, E) → (B, K, S, E), in float32."""
    if times == 1:
        return x
    parts = x.reshape(x.shape[0], -1, times, *x.shape[2:])
    return jnp.sum(parts.astype(jnp.float32), axis=2).astype(x.dtype)
