"""Products and linear algebra where torch's semantics have corners."""

from __future__ import annotations

import torch

from tests.xlatrain.bridge._compare import assert_as_eager

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
