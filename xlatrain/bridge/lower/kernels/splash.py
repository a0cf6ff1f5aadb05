"""Attention on TPUs: JAX's Pallas kernels, which keep no probabilities in memory and leave out blocks that nobody sees.

Both passes are called by themselves, since what PyTorch captured has its backward pass in it: the forward one gives the
log-sum-exp that the backward one takes. Lengths that no block divides are filled up.

https://github.com/jax-ml/jax/tree/main/jax/experimental/pallas/ops/tpu/splash_attention
"""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from xlatrain.bridge.capture.masks.band import Band
from xlatrain.bridge.lower.kernels.sequence import balanced_places

_LANES = 128
_BLOCKS = (1024, 512, 256, 128)
_WIDE = 512
"""Bytes of a row of queries from which on blocks are halved: so that they fit into 16 MiB of VMEM, two of each."""
_PARTS = 4
"""At most so many sums of the queries' gradient are kept at a time, for a backward pass of 5 products in place of 7."""
_PRECISION = "jax_default_matmul_precision"
_MASKED = kernels.DEFAULT_MASK_VALUE


Infos = tuple[Any, Any, Any]
"""Splash's masks of blocks: of the forward pass, of the gradient by queries (None where it is fused), of that by keys."""


class Segments(NamedTuple):
    """A query sees the keys of its own number, int32: (B, L) of the queries, (B, S) of the keys."""

    queries: jax.Array
    keys: jax.Array


@dataclass(frozen=True)
class Shards:
    """The parts of a sequence, of which a kernel has the queries of one and all keys.

    Attributes:
        parts: their number.
        balanced: queries are in the order of :func:`~xlatrain.bridge.lower.kernels.sequence.balanced_places`.
    """

    parts: int = 1
    balanced: bool = False


WHOLE_SEQUENCE = Shards()


@dataclass(frozen=True)
class Blocks:
    """In what blocks ``queries`` and ``keys`` are computed, and how many there are when they are filled up."""

    query: int
    key: int
    queries: int
    keys: int

    @classmethod
    def of(cls, queries: int, keys: int, features: int, itemsize: int, shards: Shards = WHOLE_SEQUENCE) -> Blocks:
        """The largest that fit, and fill up little; of a part of a sequence nothing is filled up.

        Args:
            queries: of the part.
            features: of a query or of a value, whichever has more.
            itemsize: bytes of a number.
            shards: the parts; they are multiples of 128, and their halves where they are balanced.
        """
        largest = _BLOCKS[0] if features * itemsize < _WIDE else _BLOCKS[1]
        if shards.parts > 1:
            step = queries // 2 if shards.balanced else queries
            query, key = (next(n for n in _BLOCKS if n <= largest and length % n == 0) for length in (step, keys))
            return cls(query, key, queries, keys)
        query, key = _block(queries, largest), _block(keys, largest)
        return cls(query, key, -(-queries // query) * query, -(-keys // key) * key)

    @property
    def sizes(self) -> kernels.BlockSizes:
        compute = min(self.key, 512)
        fused = self.keys // self.key <= _PARTS
        return kernels.BlockSizes(
            block_q=self.query,
            block_kv=self.key,
            block_kv_compute=compute,
            block_q_dkv=self.query,
            block_kv_dkv=self.key,
            block_kv_dkv_compute=compute,
            block_q_dq=None if fused else self.query,
            block_kv_dq=None if fused else self.key,
            use_fused_bwd_kernel=fused,
        )

    def computed(self, band: Band) -> int:
        """Count the pairs of a query and a key in blocks where a query sees a key: those that are computed."""
        rows = range(0, self.queries, self.query)
        ends = (band.keys_of(first, first + self.query, self.keys) for first in rows)
        return sum(self.query * self.key * (-(-last // self.key) - first // self.key) for first, last in ends)

    def __str__(self) -> str:
        return f"blocks of {self.query} queries and {self.key} keys"


def _block(length: int, largest: int) -> int:
    """Small blocks cost time for each, large ones the length that they fill up."""
    allowed = [block for block in _BLOCKS if block <= largest]
    return min(allowed, key=lambda block: (-(-length // block) * block * (1 + _LANES / 2 / block), -block))


class _Moved(masks.LocalMask):
    """A band of queries in balanced order."""

    def __init__(self, shape: tuple[int, int], band: Band, parts: int) -> None:
        super().__init__(shape, (band.left, band.right), 0)
        self.q_sequence = balanced_places(shape[0], parts)


class _Filled(masks.LocalMask):
    """A band of ``real`` queries and keys; queries beyond them see the first keys, so that no row is empty, and nobody sees keys
    beyond them."""

    def __init__(self, shape: tuple[int, int], band: Band, real: tuple[int, int]) -> None:
        super().__init__(shape, (band.left, band.right), 0)
        within, (queries, keys) = self.mask_function, real
        self._real = real

        def sees(rows: Any, columns: Any) -> Any:
            seen = (columns < keys) if band.is_whole else within(rows, columns) & (columns < keys)
            return seen | ((rows >= queries) & (columns < _LANES))

        self.mask_function = sees

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Filled) and super().__eq__(other) and self._real == other._real

    def __hash__(self) -> int:
        return hash((super().__hash__(), self._real))


@functools.lru_cache(maxsize=64)
def _kernel(
    heads: int, real: tuple[int, int], blocks: Blocks, band: Band, interpret: bool, shards: Shards
) -> kernels.SplashAttentionKernel:
    shards = WHOLE_SEQUENCE if band.is_whole and shards.parts > 1 else shards  # all parts see the same
    shape = (blocks.queries * shards.parts, blocks.keys)
    filled = shards.parts == 1 and shape != real
    if filled and not (band.is_causal and real[0] <= real[1]):  # causal: who sees filled up keys is filled up too
        mask: masks.Mask = _Filled(shape, band, real)
    elif shards.balanced:
        mask = _Moved(shape, band, shards.parts)
    elif band.is_whole:
        mask = masks.FullMask(shape)
    elif band.is_causal:
        mask = masks.CausalMask(shape)
    else:
        mask = masks.LocalMask(shape, (band.left, band.right), 0)
    every = masks.MultiHeadMask([mask] * heads)
    with jax.ensure_compile_time_eval():  # arrays of numbers, not of a trace that it outlives
        made = kernels.make_splash_mha(
            every, block_sizes=blocks.sizes, head_shards=1, q_seq_shards=shards.parts, interpret=interpret
        )
        return jax.tree.map(np.asarray, made)


def _blocks_of(q: Any, k: Any, v: Any, shards: Shards) -> Blocks:
    return Blocks.of(q.shape[2], k.shape[2], max(q.shape[3], v.shape[3]), q.dtype.itemsize, shards)


def masks_of_parts(q: Any, k: Any, v: Any, band: Band, shards: Shards, *, interpret: bool) -> Infos:
    """The masks of blocks, those of all parts one after the other: dim 1 of (1, L, S), and dim 0 of the queries' numbers.

    Args:
        q, k, v: shapes and dtypes of what a part has.
    """
    blocks = _blocks_of(q, k, v, shards)
    kernel = _kernel(q.shape[1], (q.shape[2], k.shape[2]), blocks, band, interpret, shards)
    return kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info


def _fill(x: jax.Array, length: int, value: float = 0) -> jax.Array:
    """Dim 2, or the last of two, filled up to ``length``."""
    dim = min(2, x.ndim - 1)
    extra = [(0, length - x.shape[dim] if i == dim else 0) for i in range(x.ndim)]
    return jnp.pad(x, extra, constant_values=value) if length != x.shape[dim] else x


def _filled_segments(segments: Segments | None, blocks: Blocks) -> kernels.SegmentIds | None:
    if segments is None:
        return None
    return kernels.SegmentIds(_fill(segments.queries, blocks.queries), _fill(segments.keys, blocks.keys))


def _precision(dtype: Any) -> contextlib.AbstractContextManager[Any]:
    """Mosaic refuses products of 16-bit numbers in several passes; of float32 ones it knows one pass, or all six."""
    several = getattr(jax.config, _PRECISION) not in (None, "default", "bfloat16", "fastest")
    return jax.default_matmul_precision("highest" if several and np.dtype(dtype).itemsize == 4 else "default")


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    band: Band,
    scale: float,
    shards: Shards = WHOLE_SEQUENCE,
    infos: Infos | None = None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The result (B, H, L, V), and log-sum-exp (B, H, L) in float32; zeros, and +inf, for a query that sees nothing.

    Args:
        q: (B, H, L, E), bfloat16 or float32.
        k, v: (B, K, S, E), (B, K, S, V); K divides H.
        segments, band: a query sees what both let it see.
        shards: which part of a sequence the queries are.
        infos: of this part, from :func:`masks_of_parts`; None where there is one.
        interpret: compute it by XLA, on any device.
    """
    blocks, queries = _blocks_of(q, k, v, shards), q.shape[2]
    kernel = _kernel(q.shape[1], (queries, k.shape[2]), blocks, band, interpret, shards)
    forward_info = kernel.fwd_mask_info if infos is None else infos[0]

    def of_row(q: jax.Array, k: jax.Array, v: jax.Array, segments: kernels.SegmentIds | None) -> tuple[jax.Array, jax.Array]:
        out, (logsumexp,) = kernels._splash_attention_forward(
            forward_info,
            q,
            k,
            v,
            segments,
            None,
            save_residuals=True,
            residual_checkpoint_name=None,
            **_options(kernel),
        )
        return out, logsumexp

    with _precision(q.dtype):
        rows = (_fill(q * jnp.asarray(scale, q.dtype), blocks.queries), _fill(k, blocks.keys), _fill(v, blocks.keys))
        out, logsumexp = jax.vmap(of_row)(*rows, _filled_segments(segments, blocks))
    out, logsumexp = out[:, :, :queries], logsumexp[:, :, :queries]
    if segments is None:
        return out, logsumexp
    sees = logsumexp > _MASKED / 2
    return jnp.where(sees[..., None], out, 0), jnp.where(sees, logsumexp, math.inf)


def attention_backward(
    grad: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    band: Band,
    scale: float,
    out: jax.Array,
    logsumexp: jax.Array,
    shards: Shards = WHOLE_SEQUENCE,
    infos: Infos | None = None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients by q, k and v, of what :func:`attention` gave."""
    blocks, queries, keys = _blocks_of(q, k, v, shards), q.shape[2], k.shape[2]
    kernel = _kernel(q.shape[1], (queries, keys), blocks, band, interpret, shards)
    of_queries, of_keys = (kernel.dq_mask_info, kernel.dkv_mask_info) if infos is None else infos[1:]
    factor = jnp.asarray(scale, q.dtype)

    def of_row(grad: Any, q: Any, k: Any, v: Any, segments: Any, out: Any, logsumexp: Any) -> tuple[Any, Any, Any]:
        kept = (q, k, v, segments, None, out, logsumexp, of_queries, of_keys)
        return kernels._splash_attention_bwd(False, residual_checkpoint_name=None, res=kept, do=grad, **_options(kernel))[3:6]

    with _precision(q.dtype):
        rows = (_fill(grad.astype(q.dtype), blocks.queries), _fill(q * factor, blocks.queries))
        columns = (_fill(k, blocks.keys), _fill(v, blocks.keys))
        kept = (_fill(out, blocks.queries), _fill(logsumexp, blocks.queries, math.inf))
        by_q, by_k, by_v = jax.vmap(of_row)(*rows, *columns, _filled_segments(segments, blocks), *kept)
    return by_q[:, :, :queries] * factor, by_k[:, :, :keys], by_v[:, :, :keys]


def _options(kernel: kernels.SplashAttentionKernel) -> dict[str, Any]:
    names = ("mask_value", "is_mqa", "block_sizes", "mask_function", "attn_logits_soft_cap", "interpret")
    return {name: kernel.kwargs[name] for name in names}
