"""Elementwise ops where sample inputs rarely reach: special floats, integers of either sign, wide and small ones."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.xlatrain.bridge._compare import assert_as_eager, through_bridge
from xlatrain.bridge.capture.capture import capture
from xlatrain.bridge.errors import LoweringError
from xlatrain.bridge.lower.interpret import lower
from xlatrain.bridge.tensors.host import as_numpy

INF, NAN = float("inf"), float("nan")

FLOATS = torch.tensor([-7.5, -3.0, -1.0, -0.0, 0.0, 0.5, 2.0, 7.0, INF, -INF, NAN])

INTS = torch.tensor([-7, -4, -1, 0, 1, 5, 9, 2**31 - 1, -(2**31)])

ELEMENTWISE = {
    "floor_divide": lambda x: torch.div(x.unsqueeze(1), x, rounding_mode="floor"),
    "trunc_divide": lambda x: torch.div(x.unsqueeze(1), x, rounding_mode="trunc"),
    "remainder": lambda x: torch.remainder(x.unsqueeze(1), x),
    "fmod": lambda x: torch.fmod(x.unsqueeze(1), x),
    "maximum": lambda x: torch.maximum(x.unsqueeze(1), x),
    "fmin": lambda x: torch.fmin(x.unsqueeze(1), x),
    "pow": lambda x: x.unsqueeze(1) ** x,
    "pow_half": lambda x: x**0.5,
    "pow_cube": lambda x: x**3,
    "pow_minus_two": lambda x: x**-2,
    "sign": torch.sign,
    "round": torch.round,
    "clamp": lambda x: torch.clamp(x, -1, 0.5),
    "clamp_crossed": lambda x: torch.clamp(x, 2.0, 1.0),
    "heaviside": lambda x: torch.heaviside(x, torch.tensor(0.25)),
    "logaddexp": lambda x: torch.logaddexp(x.unsqueeze(1), x),
    "atan2": lambda x: torch.atan2(x.unsqueeze(1), x),
    "copysign": lambda x: torch.copysign(torch.ones_like(x), x),
    "nan_to_num": torch.nan_to_num,
    "xlogy": lambda x: torch.xlogy(x.unsqueeze(1), x),
    "comparisons": lambda x: [x.unsqueeze(1) < x, x.unsqueeze(1) == x, x != x],
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_at_special_floats(name):
    assert_as_eager(ELEMENTWISE[name], FLOATS)


@pytest.mark.parametrize("name", ["floor_divide", "trunc_divide", "remainder", "fmod"])
def test_integer_division_of_either_sign(name):
    nonzero = INTS[(INTS != 0) & (INTS != -1)]
    assert_as_eager(ELEMENTWISE[name], nonzero)


def test_integer_powers():
    base, exponent = torch.tensor([-2, -1, 0, 1, 2, 3]), torch.tensor([0, 1, 2, 3, 10])
    assert_as_eager(lambda b, e: b.unsqueeze(1) ** e, base, exponent)
    assert_as_eager(lambda b: torch.tensor([-1, 1, 2, -3]).unsqueeze(1) ** b, torch.tensor([-1, -2, -3, 0]))


def test_small_floats_to_small_integers_wrap():
    x = torch.tensor([-1.5, 3.9, 200.0, 256.0, -129.0])
    assert_as_eager(lambda x: [x.to(torch.uint8), x.to(torch.int8), x.to(torch.int16)], x)


def test_int64_sentinels_and_wide_numbers():
    wide = torch.iinfo(torch.int64)
    assert_as_eager(lambda x: [x < 2**40, x == 2**40, x.clamp(min=-(2**40), max=wide.max), (x == wide.max).any()], INTS[:7])
    with pytest.raises(LoweringError, match=r"does not fit int32"):
        through_bridge(lambda x: x + 2**40, INTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_gelu_is_as_near_to_the_exact_one_as_torchs(dtype):
    """By erf: by erfc, as in JAX, it is nearer in the negative tail, and takes XLA:CPU twice as long."""
    small = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 1e-3
    x = torch.cat([torch.linspace(-12, 12, 40_001), small]).to(dtype)
    exact = F.gelu(x.double()).numpy()
    captured = capture(F.gelu, x)
    run = lower(captured)
    with jax.enable_x64(dtype == torch.float64):
        got = np.asarray(jax.jit(run)([as_numpy(x)], None)[0]).astype(np.float64)
        assert "erfc" not in str(jax.make_jaxpr(run)([as_numpy(x)], None))
    kind, wide = torch.finfo(dtype), torch.finfo(torch.promote_types(dtype, torch.float32))
    rounding = np.abs(exact) * kind.eps + kind.tiny * kind.eps
    np.testing.assert_array_less(np.abs(got - exact), rounding + 2 * wide.eps * np.abs(x.double().numpy()))
    assert_as_eager(F.gelu, torch.tensor([0.0, -0.0, 40.0, -40.0, NAN]))
