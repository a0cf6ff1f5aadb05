"""Products and linear algebra where torch's semantics have corners."""

from __future__ import annotations

import re

import jax
import numpy as np
import torch
from torch import nn

from tests.xlatrain.bridge._compare import assert_as_eager, run_captured
from xlatrain.bridge.capture.capture import capture
from xlatrain.bridge.lower.interpret import lower

NAN = float("nan")


def test_matmul_with_beta_zero_ignores_nan():
    x, a = torch.full((3, 3), NAN), torch.arange(9.0).reshape(3, 3)
    assert_as_eager(lambda x, a: [torch.addmm(x, a, a, beta=0, alpha=2), torch.addmm(a, a, a, beta=0.5)], x, a)


def test_linear_algebra_gradients_follow_torchs_factorisation():
    torch.manual_seed(0)
    a, b = torch.randn(2, 4, 4) + 3 * torch.eye(4), torch.randn(2, 4, 3)

    def gradients(a, b):
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        spd = a @ a.mT + torch.eye(4)
        value = torch.linalg.solve(a, b).sum() + torch.linalg.det(a).sum() + torch.logdet(spd).sum()
        value = value + torch.linalg.inv(a).sum() + torch.linalg.cholesky(spd).sum() + torch.linalg.eigvalsh(spd).sum()
        return [value, *torch.autograd.grad(value, [a, b])]

    assert_as_eager(gradients, a, b, rtol=2e-4)


def test_matrices_that_matmul_expands_are_not_copied_for_each_row_of_a_batch_on_cpu():
    def products(x, w, y):
        return [x.mT @ w, w.mT @ y, x.transpose(1, 2) @ y]

    args = torch.randn(5, 3, 4), torch.randn(3, 6), torch.randn(5, 3, 7)
    arrays = [arg.numpy() for arg in args]
    run = lower(capture(products, *args), platform="cpu")
    text = jax.jit(lambda arrays: run(arrays, None)).lower(arrays).compile().as_text()
    assert text is not None
    assert not {"f32[5,3,6]", "f32[5,6,3]"} & set(re.findall(r"f32\[[0-9,]+\]", text)), text
    for got, expected in zip(run(arrays, None), products(*args), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_a_row_of_an_expanded_matrix_that_is_written_to_is_another():
    def written(x, w, row):
        return x @ w.expand(5, -1, -1).select_scatter(row, 0, 2)

    args = torch.randn(5, 4, 3), torch.randn(3, 6), torch.randn(3, 6)
    run = lower(capture(written, *args), platform="cpu")
    (got,) = run([arg.numpy() for arg in args], None)
    np.testing.assert_allclose(got, written(*args), rtol=1e-5, atol=1e-6)


def test_a_recurrence_turns_its_weight_once():
    """XLA:CPU multiplied one row by a weight in torch's order in five times the time, at each step."""
    net = nn.LSTM(4, 8)
    x = torch.randn(3, 1, 4)
    weights = [p.detach() for p in net.parameters()]

    def forward(x, *weights):
        return torch.func.functional_call(net, dict(zip(dict(net.named_parameters()), weights, strict=True)), x)[0]

    run = lower(capture(forward, x, *weights))
    text = jax.jit(lambda arrays: run(arrays, None)).lower([a.numpy() for a in (x, *weights)]).as_text()
    before, loop = text.split("stablehlo.while", 1)
    assert "(tensor<32x8xf32>) -> tensor<8x32xf32>" in before
    assert "(tensor<32x8xf32>) -> tensor<8x32xf32>" not in loop
    np.testing.assert_allclose(run_captured(forward, x, *weights), forward(x, *weights).detach(), rtol=1e-5, atol=1e-6)
