"""Scaled dot-product attention: products of the inputs' dtype accumulated in float32, softmax in float32.

Shapes: B batch, H heads of the queries, K heads of keys and values (K divides H), L queries, S keys, E and V features.
The backward recomputes the probabilities from the log-sum-exp (Dao et al. 2022, section 3.1), and those that dropout keeps from
the number of the draw. On a GPU cuDNN's kernel is taken where it computes the same (:mod:`xlatrain.bridge.lower.kernels.cudnn`),
on TPUs JAX's (:mod:`xlatrain.bridge.lower.kernels.choice`). Elsewhere many queries are taken in blocks, so that memory grows with
the length of the sequence, not with its square; with dropout they are not, since what is drawn must not depend on blocks.

On CPUs attention that is causal, or has a window, is taken in stretches of queries, each with the keys that one of them sees;
where there are many scores, each in blocks in its turn.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import xlatrain.bridge.capture.attention  # noqa: F401  defines the ops
from xlatrain.bridge.capture.masks.band import CAUSAL, WHOLE, Band
from xlatrain.bridge.lower.kernels import cudnn, on_mesh
from xlatrain.bridge.lower.kernels.choice import Gathered, Request, Splash, choose
from xlatrain.bridge.lower.prng import draw_key
from xlatrain.bridge.lower.registry import lowers, program_mesh

_SCORES, _LEAST = 1 << 20, 64
"""At most so many scores of a head at a time, but no fewer queries than these."""

Stretch = tuple[int, int, int, int]
"""Queries from the first number to the second, and the keys that they see, from the third to the fourth."""

Segments = tuple[jax.Array, jax.Array]
"""Numbers of queries (B or 1, L) and of keys (B or 1, S): a query sees the keys of its own number."""


def _grouped(x: jax.Array, heads: int) -> jax.Array:
    """(…, H, L, E) → (B, K, H / K, L, E)."""
    return x.reshape(-1, heads, x.shape[-3] // heads, *x.shape[-2:])


def _rows(x: jax.Array) -> jax.Array:
    """(…, K, S, E) → (B, K, S, E)."""
    return x.reshape(-1, *x.shape[-3:])


def _product(equation: str, rows: jax.Array, other: jax.Array) -> jax.Array:
    """The einsum of the queries' rows (B, K, G, L, …), G and L as one dim m: XLA:CPU transposes to sum over two dims."""
    merged = rows.reshape(*rows.shape[:2], -1, rows.shape[-1])
    return jnp.einsum(equation, merged, other, preferred_element_type=jnp.float32)


def _by_row(equation: str, rows: jax.Array, keys: jax.Array) -> jax.Array:
    """(B, K, G, L, …): of each query."""
    product = _product(equation, rows, keys)
    return product.reshape(*rows.shape[:-1], product.shape[-1])


def _over_rows(weights: jax.Array, rows: jax.Array) -> jax.Array:
    """(B, K, S, …): the sum of the rows (B, K, G, L, …), weighted (B, K, G, L, S)."""
    return _product("bkms,bkme->bkse", weights, rows.reshape(*rows.shape[:2], -1, rows.shape[-1]))


@dataclass(frozen=True)
class _Seen:
    """Sight of a block's queries: they see what all of these let them see.

    Attributes:
        mask: broadcast to (…, L, S); None: everything.
        band: by their numbers.
        first: the number of the block's first query, less that of its first key.
        of_queries, of_keys: numbers of segments, (B, 1, 1, L, 1) and (B, 1, 1, 1, S).
    """

    mask: jax.Array | None
    band: Band
    first: Any = 0
    of_queries: jax.Array | None = None
    of_keys: jax.Array | None = None

    def applied(self, scores: jax.Array, lead: tuple[int, ...]) -> jax.Array:
        """(B, K, G, L, S) with -inf where it is not seen."""
        queries, keys = scores.shape[-2:]
        seen = []
        rows, columns = (self.first + jnp.arange(queries))[:, None], jnp.arange(keys)
        if self.band.right is not None:
            seen.append(rows + self.band.right >= columns)
        if self.band.left is not None:
            seen.append(rows - self.band.left <= columns)
        if self.of_queries is not None:
            seen.append(self.of_queries == self.of_keys)
        if self.mask is not None:
            full = jnp.broadcast_to(self.mask, (*lead, queries, keys)).reshape(scores.shape)
            if self.mask.dtype == jnp.bool_:
                seen.append(full)
            else:
                scores = scores + full.astype(jnp.float32)
        return jnp.where(functools.reduce(jnp.logical_and, seen), scores, -jnp.inf) if seen else scores


def _whole(queries: int, keys: int, band: Band) -> list[Stretch]:
    return [(0, queries, 0, keys)]


def _stretches(queries: int, keys: int, band: Band) -> list[Stretch]:
    """Split the queries of causal attention into stretches: 2 from 128 queries on, 4 from 512 on.

    More are hardly faster, and take longer to compile (``benchmarks/notes/speed_on_cpu.md``).
    """
    length = -(-queries // max(1, min(4, math.isqrt(queries // 32))))
    ends = [(first, min(first + length, queries)) for first in range(0, queries, length)]
    return [(first, end, *band.keys_of(first, end, keys)) for first, end in ends]


def _blocks(queries: int, keys: int, limit: int) -> int:
    """The number of blocks in which the queries are taken, one after the other: a head has at most ``limit`` scores at a time.

    Where no equal blocks are that small, the smallest are taken.
    """
    equal = [n for n in range(1, max(1, queries // _LEAST) + 1) if queries % n == 0]
    return next((n for n in equal if queries // n * keys <= limit), equal[-1])


def _over_blocks(
    function: Callable[..., Any], carry: Any, rows: Sequence[jax.Array], mask: jax.Array | None, n: int
) -> tuple[Any, Any]:
    """``function(carry, rows, mask, first) -> (carry, results)`` over ``n`` blocks of queries.

    Args:
        rows: (B, K, G, L, …) each; results are the same.
        mask: broadcast to (…, L, S).
    """
    if n == 1:
        return function(carry, rows, mask, 0)
    queries = rows[0].shape[3]
    by_query = mask is not None and mask.ndim > 1 and mask.shape[-2] == queries
    split = [jnp.moveaxis(x.reshape(*x.shape[:3], n, -1, *x.shape[4:]), 3, 0) for x in rows]
    masks = jnp.moveaxis(mask.reshape(*mask.shape[:-2], n, -1, mask.shape[-1]), -3, 0) if mask is not None and by_query else None

    def step(carry: Any, block: Any) -> tuple[Any, Any]:
        first, own_rows, own_mask = block
        return function(carry, own_rows, own_mask if by_query else mask, first)

    carry, found = lax.scan(step, carry, (jnp.arange(n) * (queries // n), split, masks))
    return carry, [jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], queries, *x.shape[5:]) for x in found]


def _kept(shape: tuple[int, ...], p: float, index: int) -> jax.Array:
    """The factors of dropout on the probabilities, float32: 0, or ``1 / (1 - p)``."""
    return jnp.where(jax.random.uniform(draw_key(index), shape) < 1 - p, 1 / (1 - p), 0.0)


def request_of(q: Any, k: Any, v: Any, mask: Any = None, band: Band = WHOLE, segments: Any = None, p: float = 0.0) -> Request:
    """The request of an op of these arrays, or of anything with shapes and dtypes."""
    return Request(
        tuple(q.shape), tuple(k.shape), tuple(v.shape), jnp.dtype(q.dtype), mask is not None, segments is not None, band, p > 0
    )


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
    return _run(_FORWARD, (), (q, k, v), (), mask, CAUSAL if is_causal else WHOLE, None, scale, p, index)


@lowers("xlatrain.banded_attention.default")
def banded_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    query_segments: jax.Array | None,
    key_segments: jax.Array | None,
    left: int | None,
    right: int | None,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Attention as :func:`attention`'s, over the keys in a band and of a query's own segment."""
    return _run(_FORWARD, (), (q, k, v), (), None, Band(left, right), _pair(query_segments, key_segments), scale)


def _pair(queries: jax.Array | None, keys: jax.Array | None) -> Segments | None:
    return None if queries is None or keys is None else (queries.astype(jnp.int32), keys.astype(jnp.int32))


def _by_stretches(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of arrays, by stretches of the queries on CPUs."""
    on_cpu = functools.partial(function, stretches_of=_stretches)
    return lambda *arrays: lax.platform_dependent(*arrays, cpu=on_cpu, default=function)


def _segment_rows(segments: Segments | None) -> tuple[list[jax.Array], jax.Array | None]:
    """Numbers of queries as rows, (B, 1, 1, L, 1), of which there are none or one; and of keys, (B, 1, 1, 1, S)."""
    if segments is None:
        return [], None
    return [segments[0][:, None, None, :, None]], segments[1][:, None, None, None, :]


def _attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array | None,
    band: Band,
    segments: Segments | None,
    scale: float,
    p: float,
    index: int,
    stretches_of: Callable[[int, int, Band], list[Stretch]] = _whole,
    offset: Any = 0,
) -> tuple[jax.Array, jax.Array]:
    """Attention of queries (…, H, L, E) over keys (…, K, S, E) and values (…, K, S, V), with K heads that divide H.

    Args:
        stretches_of: how queries are cut, see :func:`_stretches`.
        offset: the number of the first query, where the band counts others before it; queries are not cut then.

    Returns:
        The output (…, H, L, V) in the dtype of ``q``, and the scores' log-sum-exp, float32 (…, H, L).
    """
    heads, lead = k.shape[-3], q.shape[:-2]
    rows, keys, values = _grouped(q, heads), _rows(k), _rows(v)
    of_rows, of_keys = _segment_rows(segments)
    stretches = stretches_of(q.shape[-2], k.shape[-2], band)

    def of_stretch(begin: int, end: int, lowest: int, highest: int) -> list[jax.Array]:
        own_keys, own_values = keys[..., lowest:highest, :], values[..., lowest:highest, :]
        own_segments = None if of_keys is None else of_keys[..., lowest:highest]

        def of_block(carry: None, rows: Sequence[jax.Array], mask: jax.Array | None, first: Any) -> tuple[None, list[jax.Array]]:
            seen = _Seen(mask, band, offset + begin + first - lowest, *rows[1:], of_keys=own_segments)
            scores = seen.applied(_by_row("bkme,bkse->bkms", rows[0], own_keys) * scale, lead)
            highest = jnp.max(scores, axis=-1, keepdims=True)
            highest = jnp.where(jnp.isneginf(highest), 0, highest)
            exponentials = jnp.exp(scores - highest)
            total = jnp.sum(exponentials, axis=-1, keepdims=True)
            divisor = jnp.where(total == 0, 1, total)
            if p:
                exponentials *= _kept(exponentials.shape, p, index)
            out = _by_row("bkms,bkse->bkme", exponentials.astype(v.dtype), own_values) / divisor
            return None, [out.astype(q.dtype), jnp.where(total == 0, math.inf, jnp.log(divisor) + highest)]

        n = 1 if p else _blocks(end - begin, highest - lowest, _limit(q, k, stretches))
        return _over_blocks(of_block, None, [x[..., begin:end, :] for x in (rows, *of_rows)], mask, n)[1]

    found = [of_stretch(*stretch) for stretch in stretches]
    out, logsumexp = (jnp.concatenate(parts, axis=3) for parts in zip(*found, strict=True))
    return out.reshape(*q.shape[:-1], v.shape[-1]), logsumexp.reshape(q.shape[:-1])


def _limit(q: jax.Array, k: jax.Array, stretches: list[Stretch]) -> int:
    """The number of scores of a head at a time: XLA may have all stretches at once."""
    return _SCORES if q.shape[-2] * k.shape[-2] <= _SCORES else _SCORES // len(stretches)


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
    band = CAUSAL if is_causal else WHOLE
    return _run(_BACKWARD, (grad,), (q, k, v), (out, logsumexp), mask, band, None, scale, p, index)


@lowers("xlatrain.banded_attention_backward.default")
def banded_attention_backward(
    grad: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    query_segments: jax.Array | None,
    key_segments: jax.Array | None,
    left: int | None,
    right: int | None,
    scale: float,
    out: jax.Array,
    logsumexp: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients by q, k and v."""
    segments = _pair(query_segments, key_segments)
    return _run(_BACKWARD, (grad,), (q, k, v), (out, logsumexp), None, Band(left, right), segments, scale)


def _attention_backward(
    grad: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    logsumexp: jax.Array,
    *,
    mask: jax.Array | None,
    band: Band,
    segments: Segments | None,
    scale: float,
    p: float,
    index: int,
    stretches_of: Callable[[int, int, Band], list[Stretch]] = _whole,
    offset: Any = 0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients by ``q``, ``k`` and ``v``, in their shapes and dtypes, of :func:`_attention`.

    ``grad`` is the gradient by the output, ``out`` and ``logsumexp`` are what the forward pass gave.
    """
    heads, lead, dtype = k.shape[-3], q.shape[:-2], q.dtype
    keys, values = _rows(k), _rows(v)
    grads, outs = _grouped(grad.astype(dtype), heads), _grouped(out, heads)
    own = jnp.sum(grads.astype(jnp.float32) * outs.astype(jnp.float32), axis=-1, keepdims=True)
    of_segments, of_keys = _segment_rows(segments)
    of_rows = [_grouped(q, heads), grads, own, _grouped(logsumexp[..., None], heads), *of_segments]
    stretches = stretches_of(q.shape[-2], k.shape[-2], band)

    def of_stretch(begin: int, end: int, lowest: int, highest: int) -> tuple[tuple[jax.Array, jax.Array], list[jax.Array]]:
        own_keys, own_values = keys[..., lowest:highest, :], values[..., lowest:highest, :]
        own_segments = None if of_keys is None else of_keys[..., lowest:highest]

        def of_block(
            carry: tuple[Any, Any] | None, rows: Sequence[jax.Array], mask: jax.Array | None, first: Any
        ) -> tuple[tuple[jax.Array, jax.Array], list[jax.Array]]:
            queries, grads, own, logsumexp, *number = rows
            # the log-sum-exp of a fully masked query is +inf, which makes its probabilities zero
            seen = _Seen(mask, band, offset + begin + first - lowest, *number, of_keys=own_segments)
            scores = seen.applied(_by_row("bkme,bkse->bkms", queries, own_keys) * scale, lead)
            probabilities = jnp.exp(scores - logsumexp)
            by_probability = _by_row("bkme,bkse->bkms", grads, own_values)
            dropped = probabilities
            if p:
                kept = _kept(probabilities.shape, p, index)
                by_probability, dropped = by_probability * kept, probabilities * kept
            by_score = (probabilities * (by_probability - own) * scale).astype(dtype)
            by_k, by_v = _over_rows(by_score, queries), _over_rows(dropped.astype(dtype), grads)
            sums = (by_k, by_v) if carry is None else (carry[0] + by_k, carry[1] + by_v)
            return sums, [_by_row("bkms,bkse->bkme", by_score, own_keys)]

        n = 1 if p else _blocks(end - begin, highest - lowest, _limit(q, k, stretches))
        zeros = None if n == 1 else (jnp.zeros(own_keys.shape, jnp.float32), jnp.zeros(own_values.shape, jnp.float32))
        sums, by_q = _over_blocks(of_block, zeros, [rows[..., begin:end, :] for rows in of_rows], mask, n)
        unseen = [(0, 0), (0, 0), (lowest, keys.shape[-2] - highest), (0, 0)]
        return (jnp.pad(sums[0], unseen), jnp.pad(sums[1], unseen)), by_q

    found = [of_stretch(*stretch) for stretch in stretches]
    by_q = jnp.concatenate([own for _, (own,) in found], axis=3)
    by_k, by_v = (functools.reduce(jnp.add, parts) for parts in zip(*(sums for sums, _ in found), strict=True))
    return by_q.reshape(q.shape).astype(dtype), by_k.reshape(k.shape).astype(dtype), by_v.reshape(v.shape).astype(dtype)


class _Pass(NamedTuple):
    """The functions of a pass: each takes ``(*before, q, k, v, …, *after)``."""

    splash: Callable[..., Any]
    gathered: Callable[..., Any]
    cudnn: Callable[..., Any]
    in_xla: Callable[..., Any]


_FORWARD = _Pass(on_mesh.attention, on_mesh.gathered, cudnn.attention, _attention)
_BACKWARD = _Pass(on_mesh.attention_backward, on_mesh.gathered_backward, cudnn.attention_backward, _attention_backward)


def _run(
    way: _Pass,
    before: tuple[jax.Array, ...],
    qkv: tuple[jax.Array, jax.Array, jax.Array],
    after: tuple[jax.Array, ...],
    mask: jax.Array | None,
    band: Band,
    segments: Segments | None,
    scale: float,
    p: float = 0.0,
    index: int = 0,
) -> Any:
    """A pass by the function that is chosen for these arrays, and here."""
    with jax.named_scope("attention"):  # preflight and profiles tell its time by this name
        choice = choose(request_of(*qkv, mask, band, segments, p), program_mesh())
        if isinstance(choice, Splash):
            return way.splash(choice, *before, *qkv, segments, band, scale, *after)
        if isinstance(choice, Gathered):
            own = functools.partial(way.in_xla, mask=None, band=band, scale=scale, p=0.0, index=0)
            return way.gathered(choice, own, *before, *qkv, segments, *after)
        in_xla = functools.partial(way.in_xla, mask=mask, band=band, segments=segments, scale=scale, p=p, index=index)
        if not band.is_whole and not p:
            in_xla = _by_stretches(in_xla)
        if segments is None and (band.is_whole or band.is_causal) and cudnn.computes(*qkv, mask, band.is_causal, p):
            return way.cudnn(in_xla, *before, *qkv, band.is_causal, scale, *after)
        return in_xla(*before, *qkv, *after)
