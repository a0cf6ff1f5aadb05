"""Numbers that torch draws on the host for a captured function: those of torch run op by op, and the generator after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.xlatrain.bridge._compare import floats
from xlatrain.bridge import host_draws
from xlatrain.bridge.capture.capture import Capture, capture
from xlatrain.bridge.errors import CaptureError
from xlatrain.bridge.host_draws import HostDraw, HostDraws, use_drawn
from xlatrain.bridge.lower.interpret import lower
from xlatrain.bridge.random import drawing_by_torch
from xlatrain.bridge.tensors.host import as_numpy

Drawing = Callable[..., Any]


def captured_by_torch(fn: Drawing, *args: torch.Tensor) -> tuple[Capture, HostDraws]:
    with drawing_by_torch(True):
        found = capture(fn, *args)
    assert found.host_draws is not None
    return found, found.host_draws


def drawn(fn: Drawing, *args: torch.Tensor, rolled: bool = False) -> tuple[list[np.ndarray], torch.Tensor]:
    """What a program gives that is told the numbers, and the state of the generator when it is run."""
    captured, draws = captured_by_torch(fn, *args)
    run = lower(captured, rolled=rolled)

    def program(arrays: Any, given: Any) -> Any:
        with use_drawn(draws, arrays):
            return run(given, jax.random.key(0))

    torch.manual_seed(7)
    arrays = draws.make(draws)
    state = torch.get_rng_state()
    return [np.asarray(one) for one in jax.jit(program)(arrays, [as_numpy(arg.detach()) for arg in args])], state


def by_hand(fn: Drawing, *args: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(7)
    found = fn(*args)
    return list(found) if isinstance(found, tuple) else [found], torch.get_rng_state()


def strided(shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(*(shape[dim] for dim in order)).permute(*np.argsort(order).tolist())


DRAWS: dict[str, Drawing] = {
    "rand": lambda x: torch.rand(5, 7),
    "rand_like": lambda x: torch.rand_like(x.t()),
    "uniform_": lambda x: torch.empty(3, 50).uniform_(-2, 4),
    "few normals": lambda x: torch.randn(7) + torch.randn(6).sum(),
    "normals": lambda x: torch.empty(1000).normal_(3, 2),
    "normals of a view": lambda x: torch.zeros(6, 40)[:, ::2].normal_(),
    "normals across memory": lambda x: torch.randn_like(strided((4, 5, 6), (2, 0, 1))),
    "bfloat16": lambda x: torch.randn(40, dtype=torch.bfloat16).float(),
    "double": lambda x: torch.randn(40, dtype=torch.float64).float(),
    "complex": lambda x: torch.view_as_real(torch.randn(20, dtype=torch.complex64)),
    "normal of tensors": lambda x: torch.normal(x, x.abs() + 1),
    "normal of a mean": lambda x: torch.normal(x, 0.5),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_": lambda x: torch.empty(70).bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda x: torch.empty(4, 4).bernoulli_(x.sigmoid()[:4]),
    "dropout": lambda x: F.dropout(x, 0.25),
    "dropout across memory": lambda x: F.dropout(strided((9, 8, 7, 6), (0, 2, 3, 1)) + 1, 0.5),
    "feature_dropout": lambda x: F.dropout2d(x.reshape(2, 3, 2, -1), 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.2, training=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.2, True)[0],
    "dropout of all": lambda x: torch.native_dropout(x, 1.0, True)[0] + torch.rand(()),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
    "exponential_": lambda x: torch.empty(70).exponential_(0.5),
    "geometric_": lambda x: torch.empty(70).geometric_(0.25),
    "log_normal_": lambda x: torch.empty(70).log_normal_(0, 0.5),
    "cauchy_": lambda x: torch.empty(70).cauchy_(1, 2),
    "random_": lambda x: torch.empty(70).random_(2, 80),
    "random_ of all": lambda x: torch.empty(70, dtype=torch.int32).random_() // 3 + torch.empty(70).random_().sum(),
    "randint": lambda x: torch.randint(-3, 9, (4, 5)),
    "randint of a large range": lambda x: torch.randint(-(2**31), 2**31, (40,)),
    "randperm": lambda x: torch.randperm(50),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, hard=True),
    "multinomial": lambda x: torch.multinomial(x.sigmoid(), 1),
    "multinomial without replacement": lambda x: torch.multinomial(x.sigmoid(), 2),
    "multinomial with replacement": lambda x: torch.multinomial(x.sigmoid(), 9, replacement=True),
    "of no use": lambda x: (torch.randn(3), torch.rand(2))[1],
}


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_and_state_are_torchs(name: str) -> None:
    x = floats(12, 4, requires_grad=False)
    found, state = drawn(DRAWS[name], x)
    expected, expected_state = by_hand(DRAWS[name], x)
    assert torch.equal(state, expected_state)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other.numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("strides", [None, (1, 300), (8, 2)])
def test_zeros_and_ones_are_the_same_in_every_dtype(dtype: torch.dtype, strides: tuple[int, ...] | None) -> None:
    """Masks are drawn as bool."""
    found = []
    for one in (dtype, torch.bool):
        torch.manual_seed(0)
        out = torch.empty(300, 4, dtype=one) if strides is None else torch.empty_strided((300, 4), strides, dtype=one)
        found.append((out.bernoulli_(0.3).double(), torch.get_rng_state()))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def set_back(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.random.fork_rng(devices=[]):
        inside = torch.rand(3)
    state = torch.get_rng_state()
    first = F.dropout(x, 0.5)
    second = torch.randn(3)
    torch.set_rng_state(state)
    again = F.dropout(x, 0.5)
    other = torch.randint(0, 9, (4,))
    torch.set_rng_state(state)
    return inside, first, second, again, other


def test_a_generator_that_is_set_back() -> None:
    x = floats(9, 4, requires_grad=False)
    found, state = drawn(set_back, x)
    expected, expected_state = by_hand(set_back, x)
    assert torch.equal(state, expected_state)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other.numpy())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_draws_nothing_anew(use_reentrant: bool) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.dropout(x.tanh(), 0.5).exp(), 0.25)

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y: Any = checkpoint(block, F.dropout(x, 0.1), use_reentrant=use_reentrant)
        loss = (F.dropout(y, 0.5) ** 2).sum()
        return loss.detach(), *torch.autograd.grad(loss, x)

    x = floats(30, 4)
    captured, draws = captured_by_torch(fn, x)
    assert len(draws.draws) == 4 and captured.uses_random
    found, state = drawn(fn, x)
    torch.manual_seed(7)
    y: Any = checkpoint(block, F.dropout(x, 0.1), use_reentrant=use_reentrant)
    loss = (F.dropout(y, 0.5) ** 2).sum()
    loss.backward()
    assert x.grad is not None and torch.equal(state, torch.get_rng_state())
    np.testing.assert_allclose(found[0], loss.detach().numpy(), rtol=1e-5)
    np.testing.assert_allclose(found[1], x.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_layers_in_a_loop_take_a_row_each() -> None:
    w = [torch.randn(8, 8, generator=torch.Generator().manual_seed(i)) / 3 for i in range(16)]

    def fn(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for one in weights:
            x = x + F.dropout(F.dropout(x @ one, 0.2).tanh() + torch.randn_like(x), 0.5)
        return x

    x = floats(6, 8, requires_grad=False)
    captured, draws = captured_by_torch(fn, x, *w)
    assert captured.rolled.loops and len(draws.kinds) == 3
    found, state = drawn(fn, x, *w, rolled=True)
    (expected,), expected_state = by_hand(fn, x, *w)
    assert torch.equal(state, expected_state)
    np.testing.assert_allclose(found[0], expected.numpy(), rtol=1e-4, atol=1e-4)


def test_a_smaller_batch_is_drawn_in_its_own_size() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5) + torch.randn_like(x)

    (_, bound), (_, true) = captured_by_torch(fn, torch.zeros(8, 6)), captured_by_torch(fn, torch.zeros(8, 5))
    torch.manual_seed(7)
    mask, noise = bound.make(true)
    state = torch.get_rng_state()
    torch.manual_seed(7)
    np.testing.assert_array_equal(mask[0, :, :5], torch.empty(8, 5).bernoulli_(0.5).bool().numpy())
    np.testing.assert_array_equal(noise[0, :, :5], torch.randn(8, 5).numpy())
    assert torch.equal(state, torch.get_rng_state()) and not mask[0, :, 5:].any()


def test_too_many_numbers_are_drawn_in_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_draws, "MOST_BYTES", 100)
    with drawing_by_torch(True):
        assert capture(lambda x: x + torch.randn(20), torch.zeros(20)).host_draws is not None
        assert capture(lambda x: x + torch.randn(30), torch.zeros(30)).host_draws is None


def test_whole_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(OverflowError, match="do not fit int32"):
        HostDraw("randint_", (3,), (), torch.int64, (2**40, 2**40 + 5)).fill(torch.empty(3, dtype=torch.int32))


@pytest.mark.parametrize(
    "fn",
    [
        torch.poisson,
        torch.ops.aten._standard_gamma,
        torch.ops.aten._sample_dirichlet,
        lambda x: torch.binomial(x, x / 2),
        lambda x: F.rrelu(x, training=True),
    ],
    ids=["poisson", "gamma", "Dirichlet", "binomial", "rrelu"],
)
def test_counts_that_depend_on_values_are_refused_where_torch_draws(fn: Drawing) -> None:
    with drawing_by_torch(True), pytest.raises(CaptureError, match="as many numbers as the values of its operands say"):
        capture(fn, torch.ones(2, 4))
    found = capture(fn, torch.ones(2, 4))
    assert found.uses_random and found.host_draws is None


def test_the_default_generator_by_name_is_that_of_the_step() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(4, generator=torch.default_generator)

    assert captured_by_torch(fn, torch.zeros(4))[1].draws
    with drawing_by_torch(True), pytest.raises(CaptureError, match=r"a torch\.Generator was passed"):
        capture(lambda x: x + torch.randn(4, generator=torch.Generator()), torch.zeros(4))
