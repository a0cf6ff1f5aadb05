"""Linear layers in eight bits, forward and backward, in torch and through the bridge, against NumPy on the same values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.xlatrain.bridge._compare import as_host, assert_same, floats, run_captured
from xlatrain.bridge.capture.capture import capture
from xlatrain.bridge.capture.eight_bits import EightBits, eight_bit_layers, eight_bit_linear, quantised
from xlatrain.bridge.loops.schedule import Loop
from xlatrain.bridge.lower.work import model_flops

matrix = functools.partial(floats, requires_grad=False)
FLOAT8 = EightBits(torch.float8_e4m3fn, torch.float8_e5m2)
INT8 = EightBits(torch.int8, torch.int8, per_channel=True)
FORMS = {
    "int8, a scale a channel": INT8,
    "int8, a scale a tensor": EightBits(torch.int8, torch.int8),
    "float8, a scale a tensor": FLOAT8,
    "float8, a scale a channel": EightBits(torch.float8_e4m3fn, torch.float8_e5m2, per_channel=True),
    "margin": EightBits(torch.float8_e4m3fn, torch.float8_e4m3fn, margin=2),
    "wide gradients by weights": EightBits(torch.int8, torch.int8, per_channel=True, wide=(False, False, True)),
    "wide but for these": EightBits(torch.float8_e4m3fn, torch.float8_e5m2, wide=(True, True, False)),
}
NUMPY = {torch.int8: np.int8, torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn, torch.float8_e5m2: ml_dtypes.float8_e5m2}


def rounded(x: np.ndarray, dtype: torch.dtype, how: EightBits, over: int) -> np.ndarray:
    """A matrix as its eight bits and scales say it, the scales over axis ``over`` or the whole."""
    kind = NUMPY[dtype]
    largest = 127.0 if kind is np.int8 else float(ml_dtypes.finfo(kind).max)
    scale = np.abs(x).max(over, keepdims=True) if how.per_channel else np.abs(x).max()
    scale = np.float32(scale) * np.float32(2.0**how.margin / largest)
    values = (x / scale).astype(np.float32)
    values = np.round(values) if kind is np.int8 else values
    return np.clip(values, -largest, largest).astype(kind).astype(np.float64) * scale


def reference(x: np.ndarray, weight: np.ndarray, grad: np.ndarray, how: EightBits) -> list[np.ndarray]:
    """Output, gradient by input and by weight of matrices; a float8 product's scales do not matter beyond rounding."""
    x8, w8 = rounded(x, how.values, how, 1), rounded(weight, how.values, how, 1)
    if not how.per_channel:
        by_x = by_weight = rounded(grad, how.gradients, how, 0)
    else:  # the other factor's scales are folded in before
        largest = 127.0 if how.values == torch.int8 else float(ml_dtypes.finfo(NUMPY[how.values]).max)
        of_weight = (np.abs(weight).max(1) * np.float32(1 / largest)).astype(np.float32)
        of_x = (np.abs(x).max(1) * np.float32(1 / largest)).astype(np.float32)
        by_x = rounded(grad * of_weight, how.gradients, how, 1) / of_weight
        by_weight = rounded(grad * of_x[:, None], how.gradients, how, 0) / of_x[:, None]
    forward, by_input, by_other = how.wide
    return [
        x @ weight.T if forward else x8 @ w8.T,
        grad @ weight if by_input else by_x @ w8,
        grad.T @ x if by_other else by_weight.T @ x8,
    ]


def with_gradients(how: EightBits) -> Callable[..., list[torch.Tensor]]:
    def fn(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        y = eight_bit_linear(x, weight, None, how)
        return [y.detach(), *torch.autograd.grad(y, (x, weight), grad)]

    return fn


@pytest.mark.parametrize("form", FORMS)
def test_products_are_those_of_the_quantised_values(form: str) -> None:
    how, (x, weight, grad) = FORMS[form], (matrix(6, 24, seed=0), matrix(16, 24, seed=1), matrix(6, 16, seed=2))
    expected = reference(*(one.numpy() for one in (x, weight, grad)), how)
    for got in (as_host(with_gradients(how)(x, weight, grad)), run_captured(with_gradients(how), x, weight, grad)):
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-5)
    exact = [x @ weight.T, grad @ weight, grad.T @ x]
    for one, other in zip(expected, exact, strict=True):  # and near to the products themselves
        assert np.linalg.norm(one - other.numpy()) < 0.12 * np.linalg.norm(other.numpy())


@pytest.mark.parametrize("how", [INT8, FLOAT8], ids=["int8", "float8"])
def test_dims_dtypes_and_autocast_are_those_of_linear(how: EightBits) -> None:
    layer = torch.nn.Linear(24, 16)

    def fn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
        weight, bias = weight.detach().requires_grad_(), bias.detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            y = eight_bit_linear(x, weight, bias, how)
            one = eight_bit_linear(x[0, 0], weight, None, how)
            none = eight_bit_linear(x[:0], weight, bias, how)
        return [y.detach(), one.detach(), none.detach(), *torch.autograd.grad(y.float().square().sum(), (weight, bias))]

    args = matrix(2, 3, 24), layer.weight.detach(), layer.bias.detach()
    expected = fn(*args)
    assert [one.dtype for one in expected] == [torch.bfloat16] * 3 + [torch.float32] * 2
    assert [tuple(one.shape) for one in expected] == [(2, 3, 16), (16,), (0, 3, 16), (16, 24), (16,)]
    assert_same(run_captured(fn, *args), as_host(expected), rtol=2e-2, atol=1e-2)


def test_what_is_not_finite_stays_so_and_zeros_are_zeros() -> None:
    for how in (INT8, FLOAT8):
        x = matrix(3, 8)
        x[1, 2] = torch.nan
        y = eight_bit_linear(x, matrix(16, 8), None, how)
        assert y[1].isnan().all()
        assert (eight_bit_linear(torch.zeros(3, 8), matrix(16, 8), None, how) == 0).all()
    values, scale = quantised(torch.tensor([[0.5, -3.0], [0.0, 0.0]]), torch.int8, [1])
    assert values.tolist() == [[21, -127], [0, 0]] and scale[1].item() == 1.0


def test_a_second_derivative_is_refused() -> None:
    y = eight_bit_linear(matrix(4, 8).requires_grad_(), matrix(16, 8), None, INT8)
    with pytest.raises(RuntimeError, match=r"no second derivative\. Exclude"):
        y.sum().backward(create_graph=True)


def stack(x: torch.Tensor, *weights: torch.Tensor) -> list[torch.Tensor]:
    weights = tuple(weight.detach().requires_grad_() for weight in weights)
    for weight in weights:
        x = torch.tanh(eight_bit_linear(x, weight, None, INT8))
    return list(torch.autograd.grad(x.sum(), weights))


def test_layers_are_rolled_up_and_their_flops_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    args = matrix(4, 16), *(matrix(16, 16, seed=seed) for seed in range(5))
    expected = run_captured(stack, *args)
    monkeypatch.setenv("XLATRAIN_ROLL_LAYERS", "3")
    captured = capture(stack, *args)
    assert any(isinstance(item, Loop) for item in captured.rolled.steps)
    assert_same(run_captured(stack, *args), expected)
    with FlopCounterMode(display=False) as counter:
        stack(*args)
    # two products of the forward and backward pass each, less the gradient by the batch
    assert model_flops(captured.graph.graph) == counter.get_total_flops() == 14 * 2 * 4 * 16 * 16


def test_selected_layers_alone_and_only_in_the_block() -> None:
    class Own(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 1

    chosen, other, own = torch.nn.Linear(8, 16), torch.nn.Linear(8, 16), Own(8, 16)
    x = matrix(4, 8)
    plain: dict[Any, torch.Tensor] = {layer: layer(x) for layer in (chosen, other, own)}
    with eight_bit_layers(INT8, {chosen, own}.__contains__):
        assert torch.equal(chosen(x), eight_bit_linear(x, chosen.weight, chosen.bias, INT8))
        assert torch.equal(own(x), eight_bit_linear(x, own.weight, own.bias, INT8) + 1)
        assert torch.equal(other(x), plain[other])
    assert all(torch.equal(layer(x), before) for layer, before in plain.items())
    assert not torch.equal(chosen(x), eight_bit_linear(x, chosen.weight, chosen.bias, INT8))


def test_selected_rows_are_quantised_without_the_others() -> None:
    weight = matrix(16, 8, seed=1)

    def fn(x: torch.Tensor) -> torch.Tensor:
        chosen = x[x[:, 0] > 0]
        return eight_bit_linear(chosen, weight, None, FLOAT8).sum()

    x = matrix(6, 8)
    x[0, 0], x[0, 1] = -1.0, 1000.0  # would be the scale
    expected = fn(x)
    kept = x[x[:, 0] > 0]
    torch.testing.assert_close(expected, eight_bit_linear(kept, weight, None, FLOAT8).sum())
