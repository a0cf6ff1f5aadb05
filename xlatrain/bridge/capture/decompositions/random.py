"""Random ATen ops, in their functional forms, in terms of the numbered draws of ``bridge/random.py``.

Each function has the signature of the op that it decomposes, and draws what torch's own CPU kernel draws for it, in the same
order. Where the kernel draws as many numbers as the values say (poisson, binomial, gamma, rrelu) it is something else, which is
refused where the numbers are to be torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

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
    """Refuse a generator other than torch's default, which is the one of a step.

    Raises:
        CaptureError: one was given.
    """
    if generator is not None and not _is_default(generator):
        raise random.refusal(
            "a torch.Generator was passed to a random op, and its state cannot be carried through a compiled program",
            "leave generator out (the step's own key is used), or draw the values outside of the step",
        )


def _is_default(generator: Any) -> bool:
    default: Any = torch.default_generator
    return generator._cdata == default._cdata  # torch makes a new object for an op's


def _drawn_as_values_say(name: str) -> None:
    """Refuse a draw that moves torch's generator as far as values say, where it is to be where torch leaves it.

    Raises:
        CaptureError: the numbers of the step are torch's.
    """
    if random.drawn_by_torch():
        raise random.refusal(
            f"torch draws for {name} as many numbers as the values of its operands say, which only the program knows: these "
            "and all that is drawn after them would be others than torch's",
            "eager steps have torch's numbers; on accelerators and on several devices such a step compiles",
        )


class _Form(NamedTuple):
    """The form of a tensor that is filled; ``strides`` are [] where it is contiguous."""

    size: Sequence[int]
    strides: Sequence[int]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> _Form:
        """The form of ``tensor``: what torch draws for which element depends on how they lie in memory."""
        strides = [] if tensor.is_contiguous() else list(tensor.stride())
        return cls(list(tensor.shape), strides, dtype or tensor.dtype)

    @classmethod
    def new(cls, size: Sequence[int], dtype: torch.dtype | None = None) -> _Form:
        """The form of a new tensor."""
        return cls(list(size), [], dtype or torch.get_default_dtype())

    @classmethod
    def like(cls, tensor: torch.Tensor, dtype: torch.dtype | None, placement: dict[str, Any]) -> _Form:
        """The form of what ``torch.empty_like`` makes."""
        memory = placement.get("memory_format") or torch.preserve_format
        if memory == torch.preserve_format and tensor.is_contiguous():
            return cls.of(tensor, dtype)
        with _disable_current_modes():
            alike = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
            return cls.of(torch.empty_like(alike, memory_format=memory), dtype or tensor.dtype)


def _fill(op: Any, form: _Form, *parameters: float) -> torch.Tensor:
    """Draw for a tensor of a form, with the next number of a draw."""
    return op(form.size, form.strides, form.dtype, *parameters, random.next_index())


def _uniform(form: _Form, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    """Draw from [low, high), in a floating or complex dtype."""
    if form.dtype.is_complex:  # torch fills the real view
        return torch.view_as_complex(_fill(draws.uniform, _Form.new((*form.size, 2), form.dtype.to_real()), low, high))
    return _fill(draws.uniform, form, low, high)


def _normal(form: _Form, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    """Draw from a normal distribution, in a floating or complex dtype."""
    if form.dtype.is_complex:  # of the variance ``std**2``: real and imaginary part have 1/2 each
        drawn = _fill(draws.normal, _Form.new((*form.size, 2), form.dtype.to_real()), 0.0, std / math.sqrt(2))
        return torch.view_as_complex(drawn) if mean == 0 else torch.view_as_complex(drawn) + mean
    return _fill(draws.normal, form, mean, std)


@_decomposes("rand.default", "rand.names")
def rand(size: Sequence[int], *, dtype: torch.dtype | None = None, generator: Any = None, **_placement: Any) -> torch.Tensor:
    _no_generator(generator)
    return _uniform(_Form.new(size, dtype))


@_decomposes("rand.generator")
def rand_generator(size: Sequence[int], *, generator: Any, dtype: torch.dtype | None = None, **_placement: Any) -> torch.Tensor:
    return rand(size, dtype=dtype, generator=generator)


@_decomposes("rand_like.default", "rand_like.generator")
def rand_like(like: torch.Tensor, *, dtype: torch.dtype | None = None, generator: Any = None, **placement: Any) -> torch.Tensor:
    _no_generator(generator)
    return _uniform(_Form.like(like, dtype, placement))


@_decomposes("randn.default", "randn.generator", "randn.names")
def randn(size: Sequence[int], *, dtype: torch.dtype | None = None, generator: Any = None, **_placement: Any) -> torch.Tensor:
    _no_generator(generator)
    return _normal(_Form.new(size, dtype))


@_decomposes("randn_like.default", "randn_like.generator")
def randn_like(like: torch.Tensor, *, dtype: torch.dtype | None = None, generator: Any = None, **placement: Any) -> torch.Tensor:
    _no_generator(generator)
    return _normal(_Form.like(like, dtype, placement))


@_decomposes("randint.default", "randint.generator")
def randint(
    high: int, size: Sequence[int], *, dtype: torch.dtype | None = torch.int64, generator: Any = None, **_placement: Any
) -> torch.Tensor:
    _no_generator(generator)
    return _fill(draws.randint, _Form.new(size, dtype or torch.int64), 0, high)


@_decomposes("randint.low", "randint.low_generator")
def randint_low(
    low: int, high: int, size: Sequence[int], *, dtype: torch.dtype | None = torch.int64, generator: Any = None, **_placement: Any
) -> torch.Tensor:
    _no_generator(generator)
    return _fill(draws.randint, _Form.new(size, dtype or torch.int64), low, high)


@_decomposes("randint_like.default", "randint_like.generator")
def randint_like(
    like: torch.Tensor, high: int, *, dtype: torch.dtype | None = None, generator: Any = None, **placement: Any
) -> torch.Tensor:
    return randint_like_low(like, 0, high, dtype=dtype, generator=generator, **placement)


@_decomposes("randint_like.low_dtype", "randint_like.low_generator_dtype")
def randint_like_low(
    like: torch.Tensor, low: int, high: int, *, dtype: torch.dtype | None = None, generator: Any = None, **placement: Any
) -> torch.Tensor:
    _no_generator(generator)
    return _fill(draws.randint, _Form.like(like, dtype, placement), low, high)


@_decomposes("randperm.default", "randperm.generator")
def randperm(n: int, *, dtype: torch.dtype | None = torch.int64, generator: Any = None, **_placement: Any) -> torch.Tensor:
    _no_generator(generator)
    return draws.randperm(n, dtype or torch.int64, random.next_index())


@_decomposes("random.default")
def random_default(self: torch.Tensor, *, generator: Any = None) -> torch.Tensor:
    """Integers of the dtype's whole non-negative range; for floating dtypes those that it holds exactly."""
    _no_generator(generator)
    return _fill(draws.whole_range, _Form.of(self))


@_decomposes("random.from")
def random_from(self: torch.Tensor, low: int, high: int | None, *, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    return _fill(draws.randint, _Form.of(self), low, random.end_of_range(self.dtype) if high is None else high)


@_decomposes("random.to")
def random_to(self: torch.Tensor, high: int, *, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    return _fill(draws.randint, _Form.of(self), 0, high)


@_decomposes("uniform.default")
def uniform(self: torch.Tensor, low: float = 0.0, high: float = 1.0, *, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    return _uniform(_Form.of(self), low, high)


@_decomposes("normal_functional.default")
def normal_functional(self: torch.Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    return _normal(_Form.of(self), mean, std)


@_decomposes("normal.float_float")
def normal_float_float(
    mean: float, std: float, size: Sequence[int], *, generator: Any = None, dtype: torch.dtype | None = None, **_placement: Any
) -> torch.Tensor:
    _no_generator(generator)
    return _normal(_Form.new(size, dtype), mean, std)


@_decomposes("normal.Tensor_float")
def normal_tensor_float(mean: torch.Tensor, std: float = 1.0, *, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    return _normal(_Form.new(mean.shape, mean.dtype), 0.0, std) + mean


@_decomposes("normal.float_Tensor")
def normal_float_tensor(mean: float, std: torch.Tensor, *, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    return _normal(_Form.new(std.shape, std.dtype)) * std + mean


@_decomposes("normal.Tensor_Tensor")
def normal_tensor_tensor(mean: torch.Tensor, std: torch.Tensor, *, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    shape = torch.broadcast_shapes(mean.shape, std.shape)
    return _normal(_Form.new(shape, torch.promote_types(mean.dtype, std.dtype))) * std + mean


def _below(form: _Form, p: torch.Tensor) -> torch.Tensor:
    """Draw ones with the probabilities ``p``, of a shape that broadcasts to that of the form."""
    # u lies in [0, 1): never true for p = 0, always for p = 1. A probability is not rounded to bfloat16's 8 bits.
    dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
    return (_fill(draws.uniform, form._replace(dtype=dtype), 0.0, 1.0) < p).to(form.dtype)


@_decomposes("bernoulli.default")
def bernoulli(self: torch.Tensor, *, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    return _below(_Form.new(self.shape, self.dtype), self)


@_decomposes("bernoulli.p")
def bernoulli_p(self: torch.Tensor, p: float, *, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    return _fill(draws.bernoulli, _Form.of(self), p)


@_decomposes("bernoulli.Tensor")
def bernoulli_tensor(self: torch.Tensor, p: torch.Tensor, *, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    return _below(_Form.of(self), p)


@_decomposes("native_dropout.default")
def native_dropout(input: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    mask = _fill(draws.bernoulli, _Form.new(input.shape, torch.bool), 1.0 - p)
    return input * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


@_decomposes("_fused_dropout.default")
def fused_dropout(self: torch.Tensor, p: float, generator: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """``p`` is the probability of keeping an element."""
    _no_generator(generator)
    mask = _fill(draws.bernoulli, _Form.new(self.shape, torch.uint8), p)
    return self * mask.to(self.dtype) * (1 / p), mask


@_decomposes("exponential.default")
def exponential(self: torch.Tensor, lambd: float = 1.0, *, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    return _fill(draws.exponential, _Form.of(self), lambd)


@_decomposes("geometric.default")
def geometric(self: torch.Tensor, p: float, *, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    return _fill(draws.geometric, _Form.of(self), p)


@_decomposes("cauchy.default")
def cauchy(self: torch.Tensor, median: float = 0.0, sigma: float = 1.0, *, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    return _fill(draws.cauchy, _Form.of(self), median, sigma)


@_decomposes("log_normal.default")
def log_normal(self: torch.Tensor, mean: float = 1.0, std: float = 2.0, *, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    return _fill(draws.log_normal, _Form.of(self), mean, std)


@_decomposes("multinomial.default")
def multinomial(self: torch.Tensor, num_samples: int, replacement: bool = False, *, generator: Any = None) -> torch.Tensor:
    """Rows of ``self`` are unnormalised probabilities. Unlike torch's, negative or all-zero rows are not detected."""
    _no_generator(generator)
    if not replacement or num_samples == 1:
        # the num_samples first arrivals of independent exponential clocks with these rates are a sample without replacement
        rates = self / _fill(draws.exponential, _Form.of(self), 1.0)
        if num_samples == 1:
            return torch.argmax(rates, dim=-1, keepdim=True)
        return torch.topk(rates, num_samples, dim=-1).indices
    weights = self if self.dtype == torch.float64 else self.float()
    cumulative = torch.cumsum(weights, dim=-1)
    cumulative = cumulative / cumulative[..., -1:]
    u = _fill(draws.uniform, _Form.new((*weights.shape[:-1], num_samples), torch.float64), 0.0, 1.0).to(weights.dtype)
    # 0 is no category without weight, and no rounding leads past the last one that has weight
    first, last = (cumulative <= 0).sum(dim=-1, keepdim=True), (cumulative < 1).sum(dim=-1, keepdim=True)
    return torch.clamp(torch.searchsorted(cumulative, u), first, last)


@_decomposes("poisson.default")
def poisson(self: torch.Tensor, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    _drawn_as_values_say("poisson")
    return draws.poisson(self, random.next_index())


@_decomposes("binomial.default")
def binomial(count: torch.Tensor, prob: torch.Tensor, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    _drawn_as_values_say("binomial")
    count, prob = torch.broadcast_tensors(count, prob)
    return draws.binomial(count, prob, random.next_index())


@_decomposes("_standard_gamma.default")
def standard_gamma(self: torch.Tensor, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    _drawn_as_values_say("gamma distributions")
    return draws.gamma(self, random.next_index())


@_decomposes("_sample_dirichlet.default")
def sample_dirichlet(self: torch.Tensor, generator: Any = None) -> torch.Tensor:
    _no_generator(generator)
    _drawn_as_values_say("Dirichlet distributions")
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
    _drawn_as_values_say("rrelu")
    slope = _fill(draws.uniform, _Form.of(self), lower, upper)
    noise = torch.where(self > 0, torch.ones_like(self), slope)
    return self * noise, noise
