"""Autocast: which ops run in bfloat16 is torch's decision, visible in the graph."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.xlatrain.bridge._compare import assert_matches_eager, floats, loss_and_gradients
from xlatrain.bridge.capture.capture import capture


def autocast_loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = F.linear(x, w.t())
        z = torch.softmax(y, dim=-1)
        with torch.autocast("cpu", enabled=False):
            exact = y.float() @ w.t()
        return F.mse_loss(z, torch.zeros_like(z)) + F.layer_norm(y, (5,)).sum() + exact.pow(2).sum()


def test_autocast_matches() -> None:
    assert_matches_eager(loss_and_gradients(autocast_loss), floats(4, 3), floats(3, 5, seed=7), rtol=3e-2, atol=3e-2)


def test_autocast_op_lists() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            product = x @ w
            return [
                product,
                product.relu(),
                product + 1.0,
                torch.softmax(product, -1),
                F.mse_loss(product, product * 0),
                product.pow(2),
            ]

    args = floats(4, 3), floats(3, 5)
    dtypes = [spec.dtype for spec in capture(fn, *args).outputs]
    assert dtypes == [output.dtype for output in fn(*args)]
    assert torch.bfloat16 in dtypes and torch.float32 in dtypes


def test_autocast_from_outside_is_seen() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        captured = capture(lambda x, w: x @ w, floats(4, 3), floats(3, 5))
    assert captured.outputs[0].dtype == torch.bfloat16
