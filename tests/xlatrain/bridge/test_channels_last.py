"""Ops between convolutions run channels last on CPU, and give the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.xlatrain.bridge._compare import assert_matches_eager, floats, with_gradients
from xlatrain.bridge.capture.capture import capture
from xlatrain.bridge.lower.channels_last import images
from xlatrain.bridge.lower.interpret import lower


def batch_norm(x: Tensor, w: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.relu(F.batch_norm(F.conv2d(x, w, padding=1), None, None, scale, shift, training=True))


def broadcasting(x: Tensor, w: Tensor, scale: Tensor, row: Tensor, pixel: Tensor) -> Tensor:
    """With operands of fewer dims, of sizes 1, and with numbers."""
    y = F.conv2d(x, w)
    y = torch.where(y > row, y * scale[:, None, None], 2 - y / 3) + pixel
    return torch.addcmul(y, y, row, value=0.5).clamp(max=torch.tensor(1.5))


def reductions(x: Tensor, w: Tensor) -> list[Tensor]:
    y = F.conv2d(x, w).tanh()
    keeping = [y.sum(d, keepdim=True) for d in ((1,), (0, -1), (2, 3))]
    return [
        *keeping,
        y.sum((2, 3)),
        y.mean((0, 2, 3)),
        y.sum(1),
        y.sum((0,)),
        y.amax((1, 2)),
        y.var((0, 2, 3)),
        y.sum(),
        y.mean(-1),
    ]


def mixed(x: Tensor, w: Tensor, w2: Tensor) -> Tensor:
    """Convolutions of size 1, pooling, a residual, a permutation, 16 bits."""
    y = F.conv2d(x, w, padding=1)
    y = F.max_pool2d(F.gelu(y) + F.conv2d(x, w2), 2)
    y = F.layer_norm(y.permute(0, 2, 3, 1), (4,)).permute(0, 3, 1, 2)
    return (y.bfloat16() * 2).float() + F.avg_pool2d(F.conv2d(x, w2), 2).neg()


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "batch norm": (batch_norm, (floats(4, 3, 6, 5), floats(7, 3, 3, 3), floats(7), floats(7))),
    "broadcasting": (broadcasting, (floats(2, 3, 6, 5), floats(4, 3, 3, 3), floats(4), floats(3), floats(2, 1, 4, 1))),
    "reductions": (reductions, (floats(2, 3, 6, 5), floats(4, 3, 3, 3))),
    "1d": (lambda x, w, b: F.group_norm(F.silu(F.conv1d(x, w)) * b, 2), (floats(2, 3, 9), floats(4, 3, 3), floats(4, 7))),
    "3d": (lambda x, w: F.elu(F.conv3d(x, w)).mean((2, 3, 4)), (floats(2, 2, 4, 5, 3), floats(3, 2, 2, 2, 2))),
    "transposed": (
        lambda x, w: F.softplus(F.conv_transpose2d(x, w, stride=2)).square(),
        (floats(2, 3, 4, 5), floats(3, 4, 3, 2)),
    ),
    "mixed": (mixed, (floats(2, 3, 6, 8), floats(4, 3, 3, 3), floats(4, 3, 1, 1))),
}


@pytest.mark.parametrize("case", CASES)
def test_same_as_eager(case: str) -> None:
    fn, args = CASES[case]
    captured = capture(with_gradients(fn), *args)
    assert images(captured.graph.graph), "the case shows nothing"
    assert_matches_eager(with_gradients(fn), *args, rtol=2e-5, atol=1e-5)


def test_dropout_draws_the_same_masks() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return F.dropout(F.conv2d(x, w), 0.5) * 2

    captured = capture(fn, floats(2, 3, 6, 5), floats(4, 3, 3, 3))
    inputs = [jax.numpy.asarray(x.detach().numpy()) for x in (floats(2, 3, 6, 5), floats(4, 3, 3, 3))]
    one, other = (jax.jit(lower(captured, platform=platform))(inputs, jax.random.key(0))[0] for platform in ("cpu", None))
    assert ((one == 0) == (other == 0)).all()


def test_weights_and_attention_are_left_alone() -> None:
    """An update of a kernel, and scores of the same rank that come from no convolution."""

    def fn(x: Tensor, w: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        (grad,) = torch.autograd.grad(F.conv2d(x, w).sum(), w)
        return w - 0.1 * grad, torch.softmax(q @ q.mT * 2, -1) + 1

    captured = capture(fn, floats(2, 3, 6, 5), floats(4, 3, 3, 3), floats(2, 2, 4, 3))
    assert not [node for node in images(captured.graph.graph) if node.meta["val"].shape in {(4, 3, 3, 3), (2, 2, 4, 4)}]


@pytest.mark.usefixtures("compiled_as_for_users")
def test_a_residual_block_is_not_copied_into_another_order() -> None:
    """In the compiled program; those for the gradients by the kernels, whose samples come last, are not counted."""

    def fn(x: Tensor, w: Tensor, scale: Tensor, shift: Tensor, skip: Tensor) -> tuple[Tensor, ...]:
        y = F.relu(batch_norm(batch_norm(x, w, scale, shift), w, scale, shift) + F.conv2d(x, skip))
        return torch.autograd.grad(y.mean((2, 3)).square().sum(), (x, w, scale, shift))

    args = (floats(4, 8, 6, 6), floats(8, 8, 3, 3), floats(8), floats(8), floats(8, 8, 1, 1))
    captured = capture(fn, *args)
    inputs = [jax.numpy.asarray(x.detach().numpy()) for x in args]
    counts = {}
    for platform in ("cpu", None):
        text = jax.jit(lower(captured, platform=platform)).lower(inputs, None).compile().as_text()
        counts[platform] = sum(" copy(" in line and " = f32[4," in line for line in text.splitlines())
    assert counts["cpu"] <= 3 < counts[None]  # x for each convolution that takes it, and its gradient
