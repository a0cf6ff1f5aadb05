"""The arithmetic of captured steps: what the model asks for, whatever is computed again, and what kernels compute."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import xlatrain.bridge
from xlatrain.bridge.capture.attention import float32_attention
from xlatrain.bridge.capture.capture import capture
from xlatrain.bridge.capture.masks.band import CAUSAL, WHOLE, Band
from xlatrain.bridge.jax_function import JaxFunction
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


_WITHOUT_PRODUCTS = {
    *("barrier", "split_rows", "split_features", "whole_over_fsdp", "to_host", "to_device", "update", "ctc_loss", "jax_value"),
    *("normal", "uniform", "randint", "randperm", "gamma", "poisson", "binomial", "trunc_normal_"),
    *("log_normal", "cauchy", "bernoulli", "exponential", "geometric", "whole_range"),
    *("rows_of_features", "features_of_rows", "linear_sum_assignment"),
}
_BY_THEIR_REQUEST = {"attention", "banded_attention", "dropout_attention"}
"""Whose pairs are counted by what a band lets see."""


def test_each_op_of_ours_is_counted() -> None:
    for module in pkgutil.walk_packages(xlatrain.bridge.__path__, "xlatrain.bridge."):
        importlib.import_module(module.name)
    counted = {name for name in dir(torch.ops.xlatrain) if any(getattr(torch.ops.xlatrain, name) is one for one in flop_registry)}
    attention = {f"{name}{suffix}" for name in _BY_THEIR_REQUEST for suffix in ("", "_backward")}
    names = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("xlatrain::")}
    assert names == counted | attention | _WITHOUT_PRODUCTS | {"while_loop"}


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_experts_count_for_the_tokens_that_choose_them(gated: bool, transposed: bool) -> None:
    tokens, features, inner, experts, chosen = 12, 8, 16, 6, 2
    up = torch.randn(experts, (1 + gated) * inner, features)
    down = torch.randn(experts, features, inner)
    up, down = ((one.mT if transposed else one).contiguous().requires_grad_() for one in (up, down))
    x, weights = torch.randn(tokens, features, requires_grad=True), torch.rand(tokens, chosen)
    index = torch.randint(experts, (tokens, chosen))

    def step(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = torch.ops.xlatrain.experts(x, index, weights, up, down, "silu", gated, transposed, 0)
        return torch.autograd.grad(out.square().sum(), (x, up, down))

    graph = capture(step, x, up, down).graph.graph
    assert model_flops(graph) == 3 * 2 * tokens * chosen * (2 + gated) * inner * features


@pytest.mark.parametrize(
    ("a", "b", "product"),
    [((8, 4), (3, 4, 5), 8 * 4 * 5), ((3, 8, 4), (4, 9), 8 * 4 * 9), ((8, 12), (12, 5), 8 * 12 * 5), ((3, 8, 4), (3, 4, 5), 480)],
)
def test_grouped_products(a: tuple[int, ...], b: tuple[int, ...], product: int) -> None:
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        groups = None if len(a) == len(b) == 3 else torch.empty(3, dtype=torch.int32)
        torch.ops.xlatrain.grouped_mm(torch.empty(a), torch.empty(b), groups)
    assert counter.get_total_flops() == 2 * product


def test_recurrences_and_functions_of_jax() -> None:
    lstm, x = torch.nn.LSTM(6, 8), torch.randn(5, 3, 6)
    function = JaxFunction(lambda a, b: ([a @ b], []))
    weight = torch.randn(8, 7, requires_grad=True)

    def step(x: torch.Tensor, weight: torch.Tensor, *params: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h, _ = torch.func.functional_call(lstm, dict(zip(dict(lstm.named_parameters()), params, strict=True)), (x,))
        (out,), _ = function(h.reshape(-1, 8), weight)
        return torch.autograd.grad(out.square().sum(), (weight, *params))

    graph = capture(step, x, weight, *lstm.parameters()).graph.graph
    given, state, last = 2 * 5 * 3 * 32 * 6, 2 * 5 * 3 * 32 * 8, 2 * 5 * 3 * 8 * 7
    assert model_flops(graph) == 2 * given + 3 * state + 3 * last  # nobody asks for the gradient of x
