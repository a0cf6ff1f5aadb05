"""The table of gradient semantics: loss and every gradient through the bridge equal torch's, None where torch gives None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.xlatrain.bridge._compare import assert_matches_eager, floats, loss_and_gradients

Step = Callable[..., torch.Tensor]


class Sign(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad


class Reverse(torch.autograd.Function):
    """Gradient reversal, with a saved tensor and an argument that has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, strength: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.strength = strength
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return -ctx.strength * grad * x.abs(), None


def no_grad(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = (x @ w).relu()
    return ((x @ w) * target).sum()


def inference_mode(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        scale = (x @ w).abs().mean()
    return (x @ w).pow(2).sum() * scale.clone()


def enable_grad_inside_no_grad(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        a = x @ w
        with torch.enable_grad():
            b = x @ w
    return (a * b).sum()


def detach(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    return (y * y.detach()).sum()


def data(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    return (y * y.data).sum() + (w.data.sum() * w).sum()


def data_set(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w) * 2
    before = y.view(-1)
    y.data = y.data.clamp(min=0)
    y.data.add_(1)
    return y.pow(2).sum() + before.pow(3).sum()


def data_set_of_an_input(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    loss = (x @ w).pow(2).sum()
    w.data = w.data.clamp(-0.1, 0.1)
    return loss + (x @ w).sum()


def straight_through(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (Sign.apply(x @ w) * (x @ w)).sum()  # pyright: ignore[reportOperatorIssue]


def gradient_reversal(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return Reverse.apply(x @ w, 0.7).pow(2).sum()  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]


def tensor_hook(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    y.register_hook(lambda grad: grad.clamp(-0.5, 0.5))
    y.register_hook(lambda grad: grad * 3)
    return y.pow(2).sum()


def removed_hook(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    y.register_hook(lambda grad: grad * 3).remove()
    return y.pow(2).sum()


def leaf_hook(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    handle = w.register_hook(lambda grad: grad.sign())
    loss = (x @ w).pow(2).sum()
    (grad,) = torch.autograd.grad(loss, w, create_graph=True)
    handle.remove()
    return grad.pow(3).sum() + loss


def retained_graph(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).tanh()
    (first,) = torch.autograd.grad(y.sum(), w, retain_graph=True)
    return (y * y).sum() + (first.detach() * w).sum()


def gradient_penalty(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).tanh().pow(2).sum()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    return y + (grad.norm(dim=1) - 1).pow(2).mean()


def in_place_on_view(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).clone()
    y.t()[0].add_(y[:, 1] * 2)
    y.view(-1)[3:5].mul_(w[0, 0])
    return y.pow(2).sum()


def slice_assignment(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    z = torch.zeros(4, 12) + w.sum()
    z[:, :5] = x @ w
    z[1::2, -3:] = 2.0
    z[0] *= 3
    return z.pow(2).sum()


def masked_assignment(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    y[y > 0] = 0.5
    y[torch.tensor([0, 2, 0]), torch.tensor([1, 1, 3])] = w[0, :3]
    return (y * x.sum()).pow(2).sum()


def diagonal_write(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x.t() @ x
    y.diagonal().copy_(w.flatten()[: y.shape[0]])
    y.fill_diagonal_(1.0) if y.shape[0] > 99 else y.diagonal(1).zero_()
    return y.pow(3).sum()


def written_before_use(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    buffer = torch.empty(2, 4, 5)
    torch.mul(x @ w, 2, out=buffer[0]) if not torch.is_grad_enabled() else buffer[0].copy_((x @ w) * 2)
    buffer[1] = buffer[0].sigmoid()
    return buffer.sum(0).pow(2).sum()


def reused_after_in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    before = y * 1
    y.mul_(w[0]).add_(before).mul_(0.5)
    return y.exp_().sum()


def max_ties(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).round().clamp(-1, 1)
    flat = (y - y.detach()) + y.detach().sign()
    return flat.amax(dim=1).sum() + flat.max() * 2 + flat.max(dim=0).values.pow(2).sum() + flat.amin(dim=0).sum() + flat.min()


def max_of_two_ties(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).relu()
    return (torch.maximum(y, y * 0) * 3 + torch.minimum(y, y.detach()) + y.clamp(min=0) + y.clamp(0, 0.5)).sum()


def relu_and_abs_at_zero(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    zero = y - y.detach()
    parts = [
        zero.relu(),
        zero.abs(),
        F.hardtanh(zero, 0, 1),
        F.leaky_relu(zero, 0.1),
        F.relu6(zero),
        zero.clamp(min=0),
        zero.sign(),
    ]
    return (torch.stack(parts) * torch.arange(1.0, 8.0).view(-1, 1, 1)).sum()


def sort_and_topk(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    values, indices = y.topk(2, dim=1)
    return (values * indices).sum() + (y.sort(dim=0).values * torch.arange(4.0)[:, None]).sum() + y.median()


def unused(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x * 2).sum()


def only_through_detached(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.sum() + w.detach().sum()


def zero_times(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.sum() + 0 * w.sum()


def norm_at_zero(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    zero = y - y.detach()
    return zero.norm() + zero.norm(dim=0).sum() + F.normalize(zero, dim=1).sum() + zero.pow(2).sum()


def where_does_not_stop_nan(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).relu()
    return torch.where(y > 0, y.sqrt(), torch.zeros(())).sum()


def checkpointed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = checkpoint(lambda x, w: (x @ w).tanh().pow(2), x, w, use_reentrant=False)
    return y.sum()


def loop_over_rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    state = torch.zeros(5)
    for row in x:
        state = torch.tanh(row @ w + state)
    return state.sum()


def stacked_and_expanded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.stack([x @ w, (x @ w).flip(0)]).unbind(1)
    return sum((one.expand(3, 2, 5) * (i + 1)).pow(2).sum() for i, one in enumerate(y))  # pyright: ignore[reportReturnType]


def complex_numbers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    z = torch.complex(x @ w, (x @ w).sin())
    return (z * z.conj()).real.sum() + z.abs().sum() + torch.view_as_real(z * 1j).pow(3).sum()


def jvp_free_functions(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    grad = torch.func.grad(lambda w: (x @ w).tanh().sum())(w)
    return (grad * w).sum()


CASES: list[Step] = [
    no_grad,
    inference_mode,
    enable_grad_inside_no_grad,
    detach,
    data,
    data_set,
    data_set_of_an_input,
    straight_through,
    gradient_reversal,
    tensor_hook,
    removed_hook,
    leaf_hook,
    retained_graph,
    gradient_penalty,
    in_place_on_view,
    slice_assignment,
    masked_assignment,
    diagonal_write,
    written_before_use,
    reused_after_in_place,
    max_ties,
    max_of_two_ties,
    relu_and_abs_at_zero,
    sort_and_topk,
    unused,
    only_through_detached,
    zero_times,
    norm_at_zero,
    where_does_not_stop_nan,
    checkpointed,
    loop_over_rows,
    stacked_and_expanded,
    complex_numbers,
    jvp_free_functions,
]


@pytest.mark.parametrize("fn", CASES, ids=lambda fn: fn.__name__)
def test_gradients(fn: Step) -> None:
    assert_matches_eager(loss_and_gradients(fn), floats(4, 3), floats(3, 5, seed=7), rtol=2e-5, atol=2e-6)
