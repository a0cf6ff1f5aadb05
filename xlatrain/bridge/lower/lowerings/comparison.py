"""Comparisons of two operands in their common torch dtype."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from xlatrain.bridge.lower.operands import Operand, is_integer, promote, result_dtype
from xlatrain.bridge.lower.registry import lowers

_COMPARISONS: dict[str, Callable[..., jax.Array]] = {
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
}


def _beyond(x: Operand, y: Operand) -> int:
    """1 or -1 when ``y`` is an int above or below everything that ``x``'s 32-bit integers can hold, else 0."""
    if isinstance(x, jax.Array) and isinstance(y, int) and is_integer(x.dtype) and x.dtype.itemsize >= 4:
        info = np.iinfo(result_dtype(x, y))
        return (y > info.max) - (y < info.min)
    return 0


def _compare(fn: Callable[..., jax.Array]) -> Callable[[Operand, Operand], jax.Array]:
    def compare(x: Operand, y: Operand) -> jax.Array:
        side = _beyond(x, y)
        if side:
            return jnp.broadcast_to(fn(0, side), jnp.shape(x))
        return fn(*promote(x, y))

    return compare


for _name, _fn in _COMPARISONS.items():
    lowers(f"aten.{_name}.Tensor", f"aten.{_name}.Scalar")(_compare(_fn))
