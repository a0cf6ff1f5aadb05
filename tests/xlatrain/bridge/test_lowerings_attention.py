"""Attention, forward and backward, against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.xlatrain.bridge._compare import as_host, assert_matches_eager, assert_same, floats, run_captured, with_gradients
from xlatrain.bridge.capture.capture import capture


@pytest.mark.parametrize("grouped_queries", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal: bool, grouped_queries: bool) -> None:
    heads = 2 if grouped_queries else 4

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped_queries)

    assert_matches_eager(with_gradients(fn), floats(2, 4, 6, 8), floats(2, heads, 6, 8, seed=1), floats(2, heads, 6, 8, seed=2))


def test_attention_with_fully_masked_rows() -> None:
    mask = torch.tensor([[True, True, False], [False, False, False], [True, False, True]])
    fn = with_gradients(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    assert_matches_eager(fn, floats(1, 2, 3, 4), floats(1, 2, 3, 4, seed=1), floats(1, 2, 3, 4, seed=2))


HALF_ATTENTION: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, 4),
    "scaled": ({"scale": 0.3}, 4),
    "causal": ({"is_causal": True}, 4),
    "grouped queries": ({"is_causal": True, "enable_gqa": True}, 2),
    "masked": ({"attn_mask": torch.tensor([[[[True, False, True, True, False, True]]], [[[True] * 6]]])}, 4),
    "biased": ({"attn_mask": torch.linspace(-2, 2, 36).reshape(6, 6).to(torch.bfloat16)}, 4),
}


@pytest.mark.parametrize("case", HALF_ATTENTION)
def test_attention_in_bfloat16(case: str) -> None:
    options, heads = HALF_ATTENTION[case]
    args = [floats(2, h, 6, 8, seed=i, dtype=torch.bfloat16) for i, h in enumerate((4, heads, heads))]
    fn = with_gradients(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options))
    targets = {node.target for node in capture(fn, *args).graph.graph.nodes}
    ops = torch.ops.xlatrain
    dense = {ops.attention.default, ops.attention_backward.default}
    banded = {ops.banded_attention.default, ops.banded_attention_backward.default}  # a mask of keys alone: segments
    assert (banded if case == "masked" else dense) <= targets
    assert_matches_eager(fn, *args, rtol=3e-2, atol=3e-2)


def test_attention_in_bfloat16_with_dropout() -> None:
    """The backward pass drops what the forward pass dropped: the same numbers as with that mask written out."""
    args = [floats(2, 4, 6, 8, seed=i, dtype=torch.bfloat16) for i in range(3)]

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.4, is_causal=True)

    ones = torch.eye(6, dtype=torch.bfloat16).expand(2, 4, 6, 6)
    kept = torch.from_numpy(run_captured(fn, args[0], args[1], ones).astype("float32")) != 0
    allowed = torch.ones(6, 6).tril().bool().expand_as(kept)
    assert not (kept & ~allowed).any() and 0.4 < float(kept[allowed].float().mean()) < 0.8

    def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = (q.float() @ k.float().mT / 8**0.5).masked_fill(~allowed, -torch.inf)
        return (scores.softmax(-1) * kept / 0.6 @ v.float()).to(torch.bfloat16)

    assert_same(run_captured(with_gradients(fn), *args), as_host(with_gradients(written_out)(*args)), rtol=3e-2, atol=3e-2)


def test_attention_in_bfloat16_of_a_fully_masked_query() -> None:
    mask = torch.tensor([[True, True, False], [False, False, False], [True, False, True]])
    args = [floats(1, 2, 3, 4, seed=i, dtype=torch.bfloat16) for i in range(3)]
    out, grads = run_captured(with_gradients(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)), *args)
    assert not out[:, :, 1].any() and not grads[0][:, :, 1].any()
    assert all(bool(torch.from_numpy(grad.astype("float32")).isfinite().all()) for grad in grads)


def test_attention_under_autocast() -> None:
    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    args = [floats(2, 4, 6, 8, seed=i) for i in range(3)]
    assert_matches_eager(with_gradients(fn), *args, rtol=3e-2, atol=3e-2)
