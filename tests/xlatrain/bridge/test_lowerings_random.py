"""Random ops through the bridge: distributions, ranges, reproducibility. Seeds are fixed: a test always sees the same draws."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.xlatrain.bridge._compare import floats, run_captured
from xlatrain.bridge.capture.capture import capture
from xlatrain.bridge.errors import LoweringError

N = 20_000
Draw = Callable[[torch.Tensor], torch.Tensor]


def draw(fn: Draw, *, like: torch.Tensor | None = None, seed: int = 0) -> np.ndarray:
    return np.asarray(run_captured(fn, torch.zeros(N) if like is None else like, seed=seed), np.float64)


# name → (draws, mean, standard deviation, lowest possible, highest possible)
DISTRIBUTIONS: dict[str, tuple[Draw, float, float, float, float]] = {
    "rand": (lambda x: torch.rand(N) + 0 * x, 0.5, math.sqrt(1 / 12), 0, 1),
    "rand_like": (torch.rand_like, 0.5, math.sqrt(1 / 12), 0, 1),
    "uniform_": (lambda x: x.clone().uniform_(-2, 4), 1, math.sqrt(3), -2, 4),
    "randn": (lambda x: torch.randn(N) + 0 * x, 0, 1, -6, 6),
    "normal_": (lambda x: x.clone().normal_(3, 2), 3, 2, -9, 15),
    "normal of tensors": (lambda x: torch.normal(x + 1, x + 0.5), 1, 0.5, -2, 4),
    "normal of a mean": (lambda x: torch.normal(x + 1, 0.5), 1, 0.5, -2, 4),
    "normal of a deviation": (lambda x: torch.normal(1.0, x + 0.5), 1, 0.5, -2, 4),
    "bernoulli": (lambda x: torch.bernoulli(x + 0.3), 0.3, math.sqrt(0.21), 0, 1),
    "bernoulli_": (lambda x: x.clone().bernoulli_(0.3), 0.3, math.sqrt(0.21), 0, 1),
    "bernoulli_ of a tensor": (lambda x: x.clone().bernoulli_(x + 0.3), 0.3, math.sqrt(0.21), 0, 1),
    "exponential_": (lambda x: x.clone().exponential_(0.5), 2, 2, 1e-9, 40),
    "geometric_": (lambda x: x.clone().geometric_(0.25), 4, math.sqrt(12), 1, 100),
    "log_normal_": (lambda x: x.clone().log_normal_(0, 0.5).log(), 0, 0.5, -3, 3),
    "cauchy_": (lambda x: x.clone().cauchy_(1, 2).sub(1).div(2).atan(), 0, math.pi / math.sqrt(12), -1.571, 1.571),
    "poisson": (lambda x: torch.poisson(x + 3), 3, math.sqrt(3), 0, 30),
    "binomial": (lambda x: torch.binomial(x + 10, x + 0.3), 3, math.sqrt(2.1), 0, 10),
    "gamma": (lambda x: torch._standard_gamma(x + 4), 4, 2, 1e-6, 40),
    "dirichlet": (lambda x: torch._sample_dirichlet(torch.ones(N, 3) + x[:, None])[:, 0], 1 / 3, math.sqrt(2 / 36), 0, 1),
    "randint": (lambda x: torch.randint(3, 9, (N,)) + 0 * x, 5.5, math.sqrt(35 / 12), 3, 8),
    "randint_like": (lambda x: torch.randint_like(x, 6), 2.5, math.sqrt(35 / 12), 0, 5),
    "random_": (lambda x: x.clone().random_(2, 8), 4.5, math.sqrt(35 / 12), 2, 7),
    "multinomial": (
        lambda x: torch.multinomial(torch.tensor([1.0, 0.0, 3.0]), N, replacement=True) + 0 * x,
        1.5, math.sqrt(0.75), 0, 2,
    ),
    "dropout": (lambda x: F.dropout(x + 1, 0.25), 1, math.sqrt(1 / 3), 0, 4 / 3 + 1e-6),
    "alpha_dropout": (lambda x: F.alpha_dropout(x + torch.linspace(-1, 1, N) * math.sqrt(3), 0.2, training=True), 0, 1, -4, 4),
    "rrelu": (lambda x: F.rrelu(x - 1, 0.25, 0.75, training=True), -0.5, 0.5 / math.sqrt(12), -0.75, -0.25),
}  # fmt: skip


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distribution(name: str) -> None:
    fn, mean, deviation, low, high = DISTRIBUTIONS[name]
    values = draw(fn)
    # five standard errors; the variance of a sample variance is taken as for a distribution with heavy tails
    assert abs(values.mean() - mean) < 5 * deviation / math.sqrt(N)
    assert abs(values.std() / deviation - 1) < 0.05
    assert values.min() >= low and values.max() <= high


def test_multinomial_never_draws_a_zero_weight() -> None:
    weights = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0]).expand(N, 5)
    for count in (1, 2):
        indices = run_captured(lambda w, n=count: torch.multinomial(w, n), weights)
        assert set(np.unique(indices)) == {1, 3}
    assert np.all(np.sort(indices, axis=1) == [1, 3])
    assert set(np.unique(run_captured(lambda w: torch.multinomial(w, 7, replacement=True), weights))) == {1, 3}


def test_multinomial_without_replacement_weights() -> None:
    first = run_captured(lambda w: torch.multinomial(w, 2), torch.tensor([1.0, 2.0, 5.0]).expand(N, 3))[:, 0]
    np.testing.assert_allclose(np.bincount(first, minlength=3) / N, [1 / 8, 2 / 8, 5 / 8], atol=0.02)


def test_randperm() -> None:
    permutation = run_captured(lambda x: torch.randperm(50) + 0 * x, torch.zeros((), dtype=torch.int64))
    assert sorted(permutation) == list(range(50)) and list(permutation) != list(range(50))


@pytest.mark.parametrize(
    ("low", "high"), [(0, 2**31), (-(2**31), 2**31), (2**31 - 2, 2**31), (-(2**31), -(2**31) + 1), (-5, 2**31)]
)
def test_randint_ends_of_the_range(low: int, high: int) -> None:
    values = run_captured(lambda x: torch.randint(low, high, (1000,)) + 0 * x, torch.zeros((), dtype=torch.int64)).astype(
        np.int64
    )
    assert values.min() >= low and values.max() < high
    if high - low > 1000:
        assert values.max() - values.min() > 0.9 * (high - low)
    else:
        assert set(values) == set(range(low, high))


def test_randint_beyond_int32_is_refused() -> None:
    with pytest.raises(LoweringError, match="do not fit int32"):
        run_captured(lambda x: torch.randint(0, 2**40, (3,)) + 0 * x, torch.zeros((), dtype=torch.int64))


def test_draws_depend_on_the_key_and_on_nothing_else() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.rand(8) + 0 * x.sum()

    def after_another_op(x: torch.Tensor) -> torch.Tensor:
        return (torch.rand(8) + 0 * x.sin().sum()).clone()

    first = draw(fn, seed=1)
    np.testing.assert_array_equal(first, draw(fn, seed=1))
    np.testing.assert_array_equal(first, draw(after_another_op, seed=1))
    assert not np.any(first == draw(fn, seed=2))


def test_draws_of_one_step_differ() -> None:
    a, b = run_captured(lambda x: (torch.rand(8) + x, torch.rand(8) + x), torch.zeros(8))
    assert not np.any(a == b)


def test_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    capture(lambda x: F.dropout(x, 0.5) + torch.randn(3), floats(4, 3))
    assert torch.equal(torch.get_rng_state(), before)


def test_uses_random_says_whether_a_key_is_needed() -> None:
    assert capture(lambda x: F.dropout(x, 0.5), floats(4, 3)).uses_random
    assert not capture(lambda x: F.dropout(x, 0.5, training=False), floats(4, 3)).uses_random


def test_low_probabilities_of_bfloat16_are_exact() -> None:
    kept = run_captured(lambda x: F.dropout(x + 1, 0.999), torch.zeros(200_000, dtype=torch.bfloat16)).astype(np.float32) > 0
    assert abs(kept.mean() - 0.001) < 5 * math.sqrt(0.001 / 200_000)


def test_reparametrised_distributions_have_gradients() -> None:
    def fn(mean: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sample = torch.distributions.Normal(mean, scale.exp()).rsample()
        divergence = torch.distributions.kl_divergence(
            torch.distributions.Normal(mean, scale.exp()), torch.distributions.Normal(0.0, 1.0)
        )
        return sample, *torch.autograd.grad(sample.sum() + divergence.sum(), (mean, scale))

    mean, scale = floats(5), floats(5, seed=3)
    sample, by_mean, by_scale = run_captured(fn, mean, scale)
    m, s = mean.detach().numpy(), scale.detach().numpy()
    np.testing.assert_allclose(by_mean, 1 + m, rtol=1e-5)
    np.testing.assert_allclose(by_scale, (sample - m) + np.exp(2 * s) - 1, rtol=1e-4, atol=1e-5)


def test_gamma_gradient() -> None:
    def fn(concentration: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sample = torch.distributions.Gamma(concentration, torch.ones(N)).rsample()
        return sample, *torch.autograd.grad(sample.sum(), concentration)

    sample, grad = run_captured(fn, torch.full((N,), 2.5, requires_grad=True))
    expected = torch._standard_gamma_grad(torch.full((N,), 2.5), torch.from_numpy(np.array(sample)))
    np.testing.assert_allclose(grad, expected.numpy(), rtol=1e-3, atol=1e-4)
    assert abs(grad.mean() - 1) < 0.02
