"""Autocast: which ops run in bfloat16 is torch's decision, visible in the graph."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.xlatrain.bridge._compare import assert_matches_eager, floats, loss_and_gradients
from xlatrain.bridge.capture.autocast import FLOAT32, LOWER, WIDEST, as_on_a_gpu, registered
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


def _dtypes(function: Callable[..., Any], *tensors: torch.Tensor, device: str = "cpu") -> list[torch.dtype]:
    """The dtypes that a captured function gives under autocast."""

    def under_autocast(*tensors: torch.Tensor) -> Any:
        with torch.autocast(device, torch.bfloat16, cache_enabled=False):
            return function(*tensors)

    return [output.dtype for output in capture(under_autocast, *tensors).outputs]


@pytest.mark.parametrize(
    ("function", "on_a_gpu", "on_a_cpu"),
    [
        (lambda h: torch.softmax(h, -1), torch.float32, torch.bfloat16),
        (lambda h: h.exp(), torch.float32, torch.bfloat16),
        (lambda h: h.sum(), torch.float32, torch.bfloat16),
        (lambda h: h.sum(dtype=torch.bfloat16), torch.bfloat16, torch.bfloat16),
        (lambda h: h**2, torch.float32, torch.bfloat16),
        (lambda h: F.layer_norm(h, h.shape[-1:]), torch.float32, torch.bfloat16),
        (lambda h: F.cross_entropy(h, torch.tensor([0, 1])), torch.float32, torch.float32),
        (lambda h: F.gelu(h), torch.bfloat16, torch.bfloat16),
        (lambda h: h @ h.mT, torch.bfloat16, torch.bfloat16),
        (lambda h: torch.mv(h.float(), h[0].float()), torch.bfloat16, torch.float32),
        (lambda h: torch.addcmul(h, h, h.float()), torch.float32, torch.float32),
        (lambda h: F.avg_pool3d(h[None, None, None], (1, 1, 2)), torch.bfloat16, torch.float32),
        (lambda h: torch.softmax(h.double(), -1), torch.float64, torch.float64),
    ],
)
def test_op_lists_of_cuda(function: Callable[..., Any], on_a_gpu: torch.dtype, on_a_cpu: torch.dtype) -> None:
    h = torch.randn(2, 4, dtype=torch.bfloat16)
    with as_on_a_gpu():
        assert _dtypes(function, h) == [on_a_gpu]
        assert _dtypes(function, h, device="cuda") == [on_a_gpu]
    assert _dtypes(function, h) == [on_a_cpu]


def test_recurrences_on_a_gpu() -> None:
    gru, x = torch.nn.GRU(3, 5), torch.randn(4, 2, 3)
    assert _dtypes(gru, x) == [torch.float32, torch.float32]
    with as_on_a_gpu():
        assert _dtypes(gru, x) == [torch.bfloat16, torch.bfloat16]


def test_what_libraries_ask_of_autocast_on_a_gpu() -> None:
    with as_on_a_gpu(), torch.autocast("cuda", torch.float16):
        assert torch.is_autocast_enabled()
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") == torch.float16
    with as_on_a_gpu(), as_on_a_gpu():
        assert not torch.is_autocast_enabled("cuda")


def test_every_op_of_cudas_lists_is_known() -> None:
    """The dispatcher knows which ops CUDA's autocast is about, in a build without CUDA too."""
    of_cuda_alone = {
        *("cudnn_convolution", "cudnn_convolution_transpose", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "_cudnn_rnn"),
        "_scaled_dot_product_flash_attention",
    }
    known = {*FLOAT32, *LOWER, *WIDEST}
    for name in registered("AutocastCUDA") - of_cuda_alone - known:
        if "::" not in name:  # that one is another library's, with a kernel of its own for the CPU's autocast
            assert re.search("[dD]imname|names_", name), name  # of torch 2.11: calls the op without names of dims, which is known
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CompositeImplicitAutograd")
    assert "softmax.int" in registered("AutocastCUDA")
