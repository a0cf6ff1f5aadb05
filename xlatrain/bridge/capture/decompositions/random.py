"""Random ATen ops, in their functional forms, in terms of the numbered draws of ``bridge/random.py``.

Each function has the signature of the op that it decomposes and follows the distribution that torch documents for it. Values
are drawn in the dtype of the result, except where a comparison decides (bernoulli, multinomial): there in float32, so that a
probability is not rounded to bfloat16's 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

import xlatrain.bridge.random as random

aten = torch.ops.aten
draws = torch.ops.xlatrain

Decomposition = Callable[..., Any]
_TABLE: dict[torch._ops.OpOverload, Decomposition] = {}


def _decomposes(*names: str) -> Callable[[Decomposition], Decomposition]:
    def register(fn: Decomposition) -> Decomposition:
        for name in names:
            packet_name, overload = name.split(".")
            packet = getattr(aten, packet_name, None)
            op = getattr(packet, overload, None)
            if op is not None:
                _TABLE[op] = fn
        return fn

    return register


def random_decompositions() -> dict[torch._ops.OpOverload, Decomposition]:
    """The decomposition of every random ATen op that has one; the others are refused by name when lowered."""
    return dict(_TABLE)


def _no_generator(generator: torch.Generator | None) -> None:
    """Refuse a generator.

    Raises:
        CaptureError: one was given.
    """
    if generator is not None:
        raise random.refusal(
            "a torch.Generator was passed to a random op, and its state cannot be carried through a compiled program",
            "leave generator out (the step's own key is used), or draw the values outside of the step",
        )


def _uniform(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Draw from [0, 1): a tensor of ``size`` and a floating or complex ``dtype``, with the next number of a draw."""
    if dtype.is_complex:
        real = dtype.to_real()
        return torch.complex(_uniform(size, real), _uniform(size, real))
    return draws.uniform(list(size), dtype, random.next_index())


def _normal(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Draw from the standard normal: a tensor of ``size`` and a floating or complex ``dtype``, with the next number of a draw."""
    if dtype.is_complex:
        # torch's complex normal has unit variance: real and imaginary part have 1/2 each
        real = dtype.to_real()
        return torch.complex(_normal(size, real), _normal(size, real)) * math.sqrt(0.5)
    return draws.normal(list(size), dtype, random.next_index())


def _randint(size: Sequence[int], low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
    """Draw integers from ``low`` to ``high - 1``, with the next number of a draw."""
    return draws.randint(list(size), low, high, dtype, random.next_index())


def _affine(draw: torch.Tensor, scale: float | torch.Tensor, shift: float | torch.Tensor) -> torch.Tensor:
    """``draw * scale + shift`` without the steps that change nothing."""
    scaled = draw if isinstance(scale, (int, float)) and scale == 1 else draw * scale
    return scaled if isinstance(shift, (int, float)) and shift == 0 else scaled + shift


def _positive_uniform(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Draw from (0, 1], for logarithms."""
    return 1 - _uniform(size, dtype)


def _float_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point else torch.get_default_dtype()


@_decomposes("rand.default", "rand.names")
def rand(size: Sequence[int], *, dtype: torch.dtype | None = None, generator: Any = None, **_placement: Any) -> torch.Tensor:
    _no_generator(generator)
    return _uniform(size, dtype or torch.get_default_dtype())


@_decomposes("rand.generator")
def rand_generator(size: Sequence[int], *, generator: Any, dtype: torch.dtype | None = None, **_placement: Any) -> torch.Tensor:
    return rand(size, dtype=dtype, generator=generator)


@_decomposes("rand_like.default", "rand_like.generator")
def rand_like(like: torch.Tensor, *, dtype: torch.dtype | None = None, generator: Any = None, **_placement: Any) -> torch.Tensor:
    _no_generator(generator)
    return _uniform(like.shape, dtype or like.dtype)


@_decomposes("randn.default", "randn.generator", "randn.names")
def randn(size: Sequence[int], *, dtype: torch.dtype | None = None, generator: Any = None, **_placement: Any) -> torch.Tensor:
    _no_generator(generator)
    return _normal(size, dtype or torch.get_default_dtype())


@_decomposes("randn_like.default", "randn_like.generator")
def randn_like(like: torch.Tensor, *, dtype: torch.dtype | None = None, generator: Any = None, **_placement: Any) -> torch.Tensor:
    _no_generator(generator)
    return _normal(like.shape, dtype or like.dtype)


@_decomposes("randint.default", "randint.generator")
def randint(
    high: int, size: Sequence[int], *, dtype: torch.dtype | None = torch.int64, generator: Any = None, **_placement: Any
) -> torch.Tensor:
    _no_generator(generator)
    return _randint(size, 0, high, dtype or torch.int64)


@_decomposes("randint.low", "randint.low_generator")
def randint_low(
    low: int, high: int, size: Sequence[int], *, dtype: torch.dtype | None = torch.int64, generator: Any = None, **_placement: Any
) -> torch.Tensor:
    _no_generator(generator)
    return _randint(size, low, high, dtype or torch.int64)


@_decomposes("randint_like.default", "randint_like.generator")
def randint_like(
    like: torch.Tensor, high: int, *, dtype: torch.dtype | None = None, generator: Any = None, **_placement: Any
) -> torch.Tensor:
    _no_generator(generator)
    return _randint(like.shape, 0, high, dtype or like.dtype)


@_decomposes("randint_like.low_dtype", "randint_like.low_generator_dtype")
def randint_like_low(
    like: torch.Tensor, low: int, high: int, *, dtype: torch.dtype | None = None, generator: Any = None, **_placement: Any
) -> torch.Tensor:
    _no_generator(generator)
    return _randint(like.shape, low, high, dtype or like.dtype)


@_decomposes("randperm.default", "randperm.generator")
def randperm(n: int, *, dtype: torch.dtype | None = torch.int64, generator: Any = None, **_placement: Any) -> torch.Tensor:
    _no_generator(generator)
    return draws.randperm(n, dtype or torch.int64, random.next_index())


_MANTISSA_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}


def _end_of_range(dtype: torch.dtype) -> int:
    """The exclusive upper bound of the integers that ``random_()`` draws."""
    if dtype == torch.bool:
        return 2
    if dtype.is_floating_point:
        return 2 ** _MANTISSA_BITS[dtype] + 1
    return torch.iinfo(dtype).max + 1


@_decomposes("random.default")
def random_default(self: torch.Tensor, *, generator: Any = None) -> torch.Tensor:
    """Integers of the dtype's whole non-negative range; for floating dtypes those that it holds exactly."""
    _no_generator(generator)
    return _randint(self.shape, 0, _end_of_range(self.dtype), self.dtype)


@_decomposes("random.from")
def random_from(self: torch.Tensor, low: int, high: int | None, *, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    return _randint(self.shape, low, _end_of_range(self.dtype) if high is None else high, self.dtype)


@_decomposes("random.to")
def random_to(self: torch.Tensor, high: int, *, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    return _randint(self.shape, 0, high, self.dtype)


@_decomposes("uniform.default")
def uniform(self: torch.Tensor, low: float = 0.0, high: float = 1.0, *, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    return _affine(_uniform(self.shape, self.dtype), high - low, low)


@_decomposes("normal_functional.default")
def normal_functional(self: torch.Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    return _affine(_normal(self.shape, self.dtype), std, mean)


@_decomposes("normal.float_float")
def normal_float_float(
    mean: float, std: float, size: Sequence[int], *, generator: Any = None, dtype: torch.dtype | None = None, **_placement: Any
) -> torch.Tensor:
    _no_generator(generator)
    return _affine(_normal(size, dtype or torch.get_default_dtype()), std, mean)


@_decomposes("normal.Tensor_float")
def normal_tensor_float(mean: torch.Tensor, std: float = 1.0, *, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    return _affine(_normal(mean.shape, mean.dtype), std, mean)


@_decomposes("normal.float_Tensor")
def normal_float_tensor(mean: float, std: torch.Tensor, *, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    return _affine(_normal(std.shape, std.dtype), std, mean)


@_decomposes("normal.Tensor_Tensor")
def normal_tensor_tensor(mean: torch.Tensor, std: torch.Tensor, *, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    shape = torch.broadcast_shapes(mean.shape, std.shape)
    return _affine(_normal(shape, torch.promote_types(mean.dtype, std.dtype)), std, mean)


def _bernoulli(size: Sequence[int], p: float | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Draw ones with probability ``p``, a number or a tensor that broadcasts to ``size``, as ``dtype``."""
    # u lies in [0, 1): never true for p = 0, always for p = 1
    return (_uniform(size, torch.float32) < p).to(dtype)


@_decomposes("bernoulli.default")
def bernoulli(self: torch.Tensor, *, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    return _bernoulli(self.shape, self, self.dtype)


@_decomposes("bernoulli.p")
def bernoulli_p(self: torch.Tensor, p: float, *, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    return _bernoulli(self.shape, p, self.dtype)


@_decomposes("bernoulli.Tensor")
def bernoulli_tensor(self: torch.Tensor, p: torch.Tensor, *, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    return _bernoulli(self.shape, p, self.dtype)


@_decomposes("native_dropout.default")
def native_dropout(input: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False or p == 0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(input), torch.zeros_like(input, dtype=torch.bool)
    mask = _bernoulli(input.shape, 1 - p, torch.bool)
    return input * mask.to(input.dtype) * (1 / (1 - p)), mask


@_decomposes("_fused_dropout.default")
def fused_dropout(self: torch.Tensor, p: float, generator: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """``p`` is the probability of keeping an element."""
    _no_generator(generator)
    mask = _bernoulli(self.shape, p, torch.uint8)
    return self * mask.to(self.dtype) * (1 / p), mask


@_decomposes("exponential.default")
def exponential(self: torch.Tensor, lambd: float = 1.0, *, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    # torch excludes 0 from the result (it is divided by): the smallest draw is eps / 2 of the dtype drawn
    u = _positive_uniform(self.shape, self.dtype)
    half_eps = torch.finfo(self.dtype).eps / 2
    return torch.where(u >= 1 - half_eps, half_eps, -torch.log(u)) / lambd


@_decomposes("geometric.default")
def geometric(self: torch.Tensor, p: float, *, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    if p == 1:
        return torch.ones_like(self)
    dtype = torch.float32 if _float_dtype(self.dtype) in (torch.float16, torch.bfloat16) else _float_dtype(self.dtype)
    trials = torch.ceil(torch.log(_positive_uniform(self.shape, dtype)) / math.log1p(-p))
    return torch.clamp(trials, min=1).to(self.dtype)


@_decomposes("cauchy.default")
def cauchy(self: torch.Tensor, median: float = 0.0, sigma: float = 1.0, *, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    return median + sigma * torch.tan(math.pi * (_uniform(self.shape, self.dtype) - 0.5))


@_decomposes("log_normal.default")
def log_normal(self: torch.Tensor, mean: float = 1.0, std: float = 2.0, *, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    return torch.exp(_affine(_normal(self.shape, self.dtype), std, mean))


@_decomposes("multinomial.default")
def multinomial(self: torch.Tensor, num_samples: int, replacement: bool = False, *, generator: Any = None) -> torch.Tensor:
    """Rows of ``self`` are unnormalised probabilities. Unlike torch's, negative or all-zero rows are not detected."""
    _no_generator(generator)
    weights = self.float()
    if not replacement or num_samples == 1:
        # the num_samples first arrivals of independent exponential clocks with these rates are a sample without replacement
        clocks = -torch.log(_positive_uniform(weights.shape, torch.float32))
        # a zero rate never rings; a draw of exactly 1 would give 0 / 0 there
        arrival = torch.where(weights > 0, clocks / weights, math.inf)
        if num_samples == 1:
            return torch.argmin(arrival, dim=-1, keepdim=True)
        return torch.topk(arrival, num_samples, dim=-1, largest=False).indices
    cumulative = torch.cumsum(weights, dim=-1)
    total = cumulative[..., -1:]
    u = _uniform((*weights.shape[:-1], num_samples), torch.float32) * total
    # rounding can make u reach the total, which is past the last category that has weight
    last = (cumulative < total).sum(dim=-1, keepdim=True)
    return torch.minimum(torch.searchsorted(cumulative, u, right=True), last)


@_decomposes("poisson.default")
def poisson(self: torch.Tensor, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    return draws.poisson(self, random.next_index())


@_decomposes("binomial.default")
def binomial(count: torch.Tensor, prob: torch.Tensor, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    count, prob = torch.broadcast_tensors(count, prob)
    return draws.binomial(count, prob, random.next_index())


@_decomposes("_standard_gamma.default")
def standard_gamma(self: torch.Tensor, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    return draws.gamma(self, random.next_index())


@_decomposes("_sample_dirichlet.default")
def sample_dirichlet(self: torch.Tensor, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    gammas = draws.gamma(self, random.next_index())
    return gammas / gammas.sum(dim=-1, keepdim=True)


@_decomposes("rrelu_with_noise_functional.default")
def rrelu_with_noise_functional(
    self: torch.Tensor,
    noise: torch.Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and the noise written: the slope used where ``self`` is not positive, 1 elsewhere."""
    _no_generator(generator)
    if not training:
        return torch.where(self > 0, self, self * ((lower + upper) / 2)), noise
    slope = _uniform(self.shape, self.dtype) * (upper - lower) + lower
    noise = torch.where(self > 0, torch.ones_like(self), slope)
    return self * noise, noise
