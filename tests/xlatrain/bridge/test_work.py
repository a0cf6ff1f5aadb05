"""The arithmetic of captured steps: what the model asks for, whatever is computed again, and what kernels compute."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from xlatrain.bridge.capture.attention import float32_attention
from xlatrain.bridge.capture.capture import capture
from xlatrain.bridge.capture.masks.band import CAUSAL, WHOLE, Band
from xlatrain.bridge.lower.kernels.choice import SWITCH
from xlatrain.bridge.lower.kernels.splash import Blocks
from xlatrain.bridge.lower.work import kernel_flops, model_flops
from xlatrain.mesh.mesh import make_mesh


@pytest.mark.parametrize("recomputed", [False, True])
def test_what_is_recomputed_counts_once(recomputed: bool) -> None:
    def block(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ a) @ b

    def step(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = checkpoint(block, x, a, b, use_reentrant=False) if recomputed else block(x, a, b)
        return torch.autograd.grad(out.square().sum(), (a, b))

    args = torch.randn(8, 16), torch.randn(16, 32, requires_grad=True), torch.randn(32, 24, requires_grad=True)
    graph = capture(step, *args).graph.graph
    products = sum("mm" in str(node.target) for node in graph.nodes)
    assert products == (6 if recomputed else 5)  # both forward, both weights' gradients, the activation's; and tanh's input again
    assert model_flops(graph) == 2 * 2 * 8 * 16 * 32 + 3 * 2 * 8 * 32 * 24


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return torch.autograd.grad(out.square().sum(), (q, k, v))


def test_attention_counts_what_is_seen_and_kernels_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [torch.randn(8, heads, 256, 64, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)]
    with float32_attention():
        graph = capture(attention, *made).graph.graph
    of_pair = 2 * 64 * 4 * 8
    assert model_flops(graph) == 6 * of_pair * (256 * 257 // 2)
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    assert kernel_flops(graph, mesh) == 0
    monkeypatch.setenv(SWITCH, "interpret")
    assert kernel_flops(graph, mesh) == (2 + 5) * of_pair * 256 * 256


@pytest.mark.parametrize(("band", "computed"), [(WHOLE, 16), (CAUSAL, 10), (Band(1024, 0), 7), (Band(0, 0), 4)])
def test_blocks_that_nobody_sees_are_not_counted(band: Band, computed: int) -> None:
    assert Blocks.of(4096, 4096, 128, 2).computed(band) == computed * 1024 * 1024


def test_pairs_of_a_band() -> None:
    assert [band.pairs(4, 6) for band in (WHOLE, CAUSAL, Band(1, 1))] == [24, 10, 11]
