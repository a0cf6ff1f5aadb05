"""Embeddings, embedding bags and grouped products, forward and backward, against torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.xlatrain.bridge._compare import as_host, assert_matches_eager, assert_same, floats, run_captured, with_gradients
from xlatrain.bridge.capture.decompositions.grouped_matmul import grouped_matmul_decompositions

Cases = dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]

INDICES = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9, 1])

OFFSETS = torch.tensor([0, 4, 4, 7])

BAGS: Cases = {
    "sum": (lambda w: F.embedding_bag(INDICES, w, OFFSETS, mode="sum"), (floats(10, 3),)),
    "mean": (lambda w: F.embedding_bag(INDICES, w, OFFSETS, mode="mean"), (floats(10, 3),)),
    "max": (lambda w: F.embedding_bag(INDICES, w, OFFSETS, mode="max"), (floats(10, 3),)),
    "two dims": (lambda w: F.embedding_bag(INDICES.reshape(3, 3), w, mode="max"), (floats(10, 3),)),
    "padding": (lambda w: F.embedding_bag(INDICES, w, OFFSETS, mode="mean", padding_idx=4), (floats(10, 3),)),
    "padding max": (lambda w: F.embedding_bag(INDICES, w, OFFSETS, mode="max", padding_idx=2), (floats(10, 3),)),
    "weighted": (
        lambda w, s: F.embedding_bag(INDICES, w, OFFSETS, mode="sum", per_sample_weights=s),
        (floats(10, 3), floats(9)),
    ),
    "last offset": (
        lambda w: F.embedding_bag(INDICES, w, torch.tensor([0, 4, 7, 9]), mode="sum", include_last_offset=True),
        (floats(10, 3),),
    ),
}


@pytest.mark.parametrize("case", BAGS)
def test_embedding_bag(case: str) -> None:
    fn, args = BAGS[case]
    assert_matches_eager(with_gradients(fn), *args)


def test_embedding_bag_by_frequency() -> None:
    """Documented: each row's gradient is divided by how often the row was used. torch 2.13's CPU kernel does not."""

    def bag(w: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(INDICES, w, OFFSETS, mode="sum", scale_grad_by_freq=True)

    def by_hand(w: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(INDICES, minlength=10).clamp(min=1)
        scaled = w / counts[:, None]
        exact = F.embedding_bag(INDICES, scaled, OFFSETS, mode="sum")
        return exact + (F.embedding_bag(INDICES, w, OFFSETS, mode="sum") - exact).detach()

    weight = floats(10, 3)
    assert_same(run_captured(with_gradients(bag), weight), as_host(with_gradients(by_hand)(weight)))


EMBEDDINGS: Cases = {
    "plain": (lambda w: F.embedding(INDICES.reshape(3, 3), w), (floats(10, 3),)),
    "padding": (lambda w: F.embedding(INDICES, w, padding_idx=4), (floats(10, 3),)),
    "by frequency": (lambda w: F.embedding(INDICES, w, scale_grad_by_freq=True), (floats(10, 3),)),
}


@pytest.mark.parametrize("case", EMBEDDINGS)
def test_embedding(case: str) -> None:
    fn, args = EMBEDDINGS[case]
    assert_matches_eager(with_gradients(fn), *args)


ENDS = torch.tensor([2, 2, 7], dtype=torch.int32)

GROUPED: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "rows": ((7, 8), (3, 8, 16)),
    "columns": ((3, 16, 8), (8, 7)),
    "contraction": ((16, 7), (7, 8)),
}


@pytest.mark.parametrize("case", GROUPED)
def test_grouped_mm(case: str) -> None:
    shape_a, shape_b = GROUPED[case]
    a, b = floats(*shape_a), floats(*shape_b, seed=4)

    def grouped(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._grouped_mm(a, b, ENDS)

    def by_hand(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ends = [0, *ENDS.tolist()]
        parts = [slice(start, end) for start, end in itertools.pairwise(ends)]
        if case == "rows":
            return torch.cat([a[part] @ b[i] for i, part in enumerate(parts)])
        if case == "columns":
            return torch.cat([a[i] @ b[:, part] for i, part in enumerate(parts)], dim=1)
        return torch.stack([a[:, part] @ b[part] for part in parts])

    expected = as_host(with_gradients(by_hand)(a, b))
    assert_same(run_captured(with_gradients(grouped), a, b), expected, rtol=1e-4, atol=1e-5)


def test_a_library_whose_grouped_product_has_no_backward_op() -> None:
    """transformers before 5.23: its forward op alone is decomposed, and no step fails for the other one."""
    library = torch.library.Library("xlatrain_test_experts", "DEF")
    library.define("grouped_mm_fallback(Tensor a, Tensor b, Tensor offs) -> Tensor")
    ops = torch.ops.xlatrain_test_experts
    assert set(grouped_matmul_decompositions(ops)) == {torch.ops.aten._grouped_mm.default, ops.grouped_mm_fallback.default}
