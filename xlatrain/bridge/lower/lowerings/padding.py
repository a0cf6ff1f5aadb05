"""Padding by reflection, replication and a constant, and the backward of the first two."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from xlatrain.bridge.lower.registry import lowers


def _widths(padding: Sequence[int], ndim: int) -> list[tuple[int, int]]:
    """torch's pairs, last dim first, as one (low, high) pair per dim."""
    pairs = list(zip(padding[0::2], padding[1::2], strict=True))
    return [(0, 0)] * (ndim - len(pairs)) + pairs[::-1]


@lowers("aten.constant_pad_nd.default")
def constant_pad_nd(x: jax.Array, pad: Sequence[int], value: float = 0) -> jax.Array:
    """Negative widths cut."""
    return lax.pad(x, jnp.asarray(value, x.dtype), [(low, high, 0) for low, high in _widths(pad, x.ndim)])


def _pad(x: jax.Array, padding: Sequence[int], mode: str) -> jax.Array:
    """Pad as torch does: ``padding`` has a low and a high width for each dim, the last dim first; negative widths cut."""
    widths = _widths(padding, x.ndim)
    added = [(max(low, 0), max(high, 0)) for low, high in widths]
    padded = jnp.pad(x, added, mode=mode)
    # negative widths cut from what the positive ones gave
    starts = [max(-low, 0) for low, _ in widths]
    ends = [size - max(-high, 0) for size, (_, high) in zip(padded.shape, widths, strict=True)]
    return lax.slice(padded, starts, ends)


def _register(kind: str, mode: str, dims: int) -> None:
    @lowers(f"aten.{kind}_pad{dims}d.default")
    def forward(x: jax.Array, padding: Sequence[int]) -> jax.Array:
        return _pad(x, padding, mode)

    @lowers(f"aten.{kind}_pad{dims}d_backward.default")
    def backward(grad: jax.Array, x: jax.Array, padding: Sequence[int]) -> jax.Array:
        return jax.linear_transpose(lambda values: _pad(values, padding, mode), x)(grad.astype(x.dtype))[0]


for _dims in (1, 2, 3):
    _register("reflection", "reflect", _dims)
    _register("replication", "edge", _dims)
