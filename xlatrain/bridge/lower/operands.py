"""Operands of ATen ops as JAX arrays: torch's type promotion, wrapped numbers, and dims that may be negative."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.typing import DTypeLike

from xlatrain.bridge.errors import LoweringError
from xlatrain.bridge.tensors.dtypes import jax_dtype

Number = bool | int | float | complex
Operand = jax.Array | Number

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


def default_float() -> np.dtype:
    """The JAX dtype of torch's default floating dtype."""
    return jax_dtype(torch.get_default_dtype())


def default_complex() -> np.dtype:
    """The JAX dtype of complex numbers whose parts have torch's default floating dtype."""
    return jnp.promote_types(default_float(), np.complex64)


def is_float(dtype: DTypeLike) -> bool:
    """True for real floating dtypes, bfloat16 and float8 included."""
    return jnp.issubdtype(dtype, jnp.floating)


def is_integer(dtype: DTypeLike) -> bool:
    """True for integer dtypes; bool is none."""
    return jnp.issubdtype(dtype, jnp.integer)


def is_complex(dtype: DTypeLike) -> bool:
    """True for complex dtypes."""
    return jnp.issubdtype(dtype, jnp.complexfloating)


def _category(dtype: DTypeLike) -> int:
    """bool < integer < float < complex, as in torch's promotion rules."""
    if is_complex(dtype):
        return 3
    if is_float(dtype):
        return 2
    return 0 if np.dtype(dtype) == np.bool_ else 1


def number_dtype(value: Number) -> np.dtype:
    """The dtype that torch gives a tensor of this Python number: bool, int64, or the default float or complex dtype."""
    if isinstance(value, bool | np.bool_):
        return np.dtype(np.bool_)
    if isinstance(value, int | np.integer):
        return jax_dtype(torch.int64)
    if isinstance(value, complex):
        return default_complex()
    return default_float()


def result_dtype(*operands: Operand) -> np.dtype:
    """The dtype of torch's ``result_type`` over the operands.

    Tensors with dims decide; 0-d tensors count only with a higher category (bool < integer < float < complex), and Python
    numbers only with a category higher than both.
    https://docs.pytorch.org/docs/stable/tensor_attributes.html#type-promotion-doc

    Raises:
        TypeError: there are no operands.
    """
    groups: list[list[np.dtype]] = [[], [], []]
    for operand in operands:
        if isinstance(operand, Number | np.generic):
            groups[2].append(number_dtype(operand))  # pyright: ignore[reportArgumentType]
        else:
            groups[1 if operand.ndim == 0 else 0].append(np.dtype(operand.dtype))
    chosen: np.dtype | None = None
    for group in groups:
        if not group:
            continue
        dtype = group[0]
        for other in group[1:]:
            dtype = np.dtype(jnp.promote_types(dtype, other))
        chosen = dtype if chosen is None else _combine(chosen, dtype)
    if chosen is None:
        raise TypeError("result_dtype needs at least one operand")
    return chosen


def _combine(higher: np.dtype, lower: np.dtype) -> np.dtype:
    """The dtype of a higher-priority group joined by a lower-priority one."""
    if _category(lower) <= _category(higher):
        return higher
    if is_complex(lower) and is_float(higher):
        return np.dtype(jnp.promote_types(higher, np.complex64))
    return lower


def cast(operand: Operand, dtype: DTypeLike) -> jax.Array:
    """The operand as an array of ``dtype``.

    Raises:
        LoweringError: an integer that torch holds in int64 does not fit the 32 bits in which JAX computes it.
    """
    if isinstance(operand, jax.Array):
        return operand.astype(dtype)
    return jnp.asarray(_number(operand, np.dtype(dtype)))


def _number(value: Number, dtype: np.dtype) -> np.ndarray:
    if not is_integer(dtype) or not isinstance(value, int | np.integer) or isinstance(value, bool):
        return np.asarray(value).astype(dtype)
    return np.asarray(fit_integer(int(value), dtype)).astype(dtype)


def fit_integer(value: int, dtype: np.dtype) -> int:
    """``value`` in the range of the integer ``dtype``: int64's own extremes become the extremes of ``dtype`` (they are used as
    sentinels), small types wrap around as in torch.

    Raises:
        LoweringError: a value that int64 can hold and int32 cannot.
    """
    info = np.iinfo(dtype)
    if info.min <= value <= info.max:
        return value
    if dtype.itemsize >= 4 and value in (_INT64_MIN, _INT64_MAX):
        return int(info.min if value < 0 else info.max)
    if dtype.itemsize < 4 or (dtype.kind == "u" and -(2 ** (8 * dtype.itemsize - 1)) <= value < 0):
        return int(np.asarray(value & ((1 << (8 * dtype.itemsize)) - 1), np.uint64).astype(dtype))
    raise LoweringError(
        f"the integer {value} does not fit {dtype}: XLA computes torch's int64 as {dtype}; expected a value in "
        f"[{info.min}, {info.max}]. Enable 64-bit (Trainer(precision='64-true') or JAX_ENABLE_X64=1), or use a smaller number"
    )


def promote(*operands: Operand) -> tuple[jax.Array, ...]:
    """The operands as arrays of their common torch dtype."""
    dtype = result_dtype(*operands)
    return tuple(cast(operand, dtype) for operand in operands)


def promoting(fn: Callable[..., jax.Array]) -> Callable[[Operand, Operand], jax.Array]:
    """``fn`` of two operands in their common torch dtype."""
    return lambda x, y: fn(*promote(x, y))


def promote_float(*operands: Operand) -> tuple[jax.Array, ...]:
    """The operands as arrays of their common torch dtype, integers and bools as torch's default floating dtype."""
    dtype = result_dtype(*operands)
    if _category(dtype) < 2:
        dtype = default_float()
    return tuple(cast(operand, dtype) for operand in operands)


def as_float(x: jax.Array) -> jax.Array:
    """``x``, with integers and bools as torch's default floating dtype."""
    return x if _category(x.dtype) >= 2 else x.astype(default_float())


def accumulate_dtype(dtype: DTypeLike) -> np.dtype:
    """The dtype in which torch accumulates sums of ``dtype``: 16-bit floats in float32."""
    if is_float(dtype) and np.dtype(dtype).itemsize < 4:
        return np.dtype(np.float32)
    return np.dtype(dtype)


def canonical_dim(dim: int, ndim: int) -> int:
    """``dim`` counted from the front. A 0-d tensor has the dims 0 and -1, as in torch.

    Raises:
        IndexError: it is out of range.
    """
    size = max(ndim, 1)
    if not -size <= dim < size:
        raise IndexError(f"dim {dim} is out of range for a tensor of {ndim} dims; expected {-size} to {size - 1}")
    return dim % size


def canonical_dims(dims: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """``dims`` counted from the front; None and an empty list mean all dims."""
    if dims is None:
        return tuple(range(ndim))
    if isinstance(dims, int):
        dims = (dims,)
    if len(dims) == 0 or ndim == 0:
        return tuple(range(ndim))
    return tuple(canonical_dim(dim, ndim) for dim in dims)


def along(x: jax.Array, dim: int) -> tuple[jax.Array, int]:
    """``x`` with at least one dim, and ``dim`` counted from the front: for ops over one dim that also accept 0-d tensors."""
    return (x.reshape(1) if x.ndim == 0 else x), canonical_dim(dim, x.ndim)


def integer(value: int | jax.Array) -> int:
    """A size or an index that must be known while lowering."""
    return operator.index(value)  # pyright: ignore[reportArgumentType]


def numel(shape: Sequence[int]) -> int:
    """The number of elements of ``shape``."""
    return math.prod(shape)
