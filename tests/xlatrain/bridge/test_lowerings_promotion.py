"""Type promotion of lowerings against ``torch.result_type``."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import pytest
import torch

from xlatrain.bridge.errors import LoweringError
from xlatrain.bridge.lower.operands import canonical_dims, cast, fit_integer, result_dtype
from xlatrain.bridge.tensors.dtypes import jax_dtype

_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.complex64,
)
_TENSORS = [torch.ones(shape, dtype=dtype) for shape in ((), (2,)) for dtype in _DTYPES]
_NUMBERS = [True, 3, 2.5, 1 + 2j]


def _as_jax(operand):
    return jnp.ones(tuple(operand.shape), jax_dtype(operand.dtype)) if isinstance(operand, torch.Tensor) else operand


@pytest.mark.parametrize("x", _TENSORS, ids=lambda t: f"{t.dtype}-{t.ndim}d")
def test_result_dtype_is_torchs(x):
    wrong = []
    for y in itertools.chain(_TENSORS, _NUMBERS):
        promoted = torch.result_type(x, y)
        if promoted == torch.complex32:  # JAX has none: complex64
            promoted = torch.complex64
        expected = jax_dtype(promoted)
        actual = result_dtype(_as_jax(x), _as_jax(y))
        if actual != expected:
            wrong.append((y, actual, expected))
    assert not wrong


def test_numbers_promote_among_themselves_and_follow_the_default_dtype():
    assert result_dtype(True, 2) == jnp.int32
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert result_dtype(jnp.ones(2, jnp.int32), 0.5) == jnp.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("value", [-1, 255, 256, -300])
def test_small_integers_wrap_as_in_torch(value):
    expected = torch.full((1,), value, dtype=torch.int64).to(torch.uint8).item()
    assert int(cast(value, jnp.uint8)) == expected


def test_int64_extremes_are_sentinels_and_other_wide_integers_an_error():
    assert fit_integer(2**63 - 1, jnp.dtype("int32")) == 2**31 - 1
    assert fit_integer(-(2**63), jnp.dtype("int32")) == -(2**31)
    with pytest.raises(LoweringError, match=r"1099511627776 does not fit int32.*64-true"):
        cast(2**40, jnp.int32)


def test_dims():
    assert canonical_dims(None, 3) == (0, 1, 2)
    assert canonical_dims([], 2) == (0, 1)
    assert canonical_dims([-1, 0], 3) == (2, 0)
    assert canonical_dims(-1, 0) == ()
    with pytest.raises(IndexError, match="dim 3 is out of range for a tensor of 2 dims"):
        canonical_dims(3, 2)
