"""Grid sampling, distances, embedding bags, grouped products and losses, forward and backward, against torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.xlatrain.bridge._compare import as_host, assert_matches_eager, assert_same, floats, run_captured, with_gradients
from xlatrain.bridge.capture.capture import capture
from xlatrain.bridge.lower.interpret import lower

Cases = dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]

GRID = (floats(2, 3, 6, 2, seed=3).detach() * 0.8).requires_grad_()
EDGES = torch.tensor([-1.0, 1.0, 0.0, -0.75, 0.75, -1.5, 1.5, 3.7])
GRID_ON_EDGES = torch.cartesian_prod(EDGES, EDGES).reshape(1, 8, 8, 2)


@pytest.mark.parametrize(
    ("mode", "padding", "align"),
    [
        *itertools.product(["bilinear", "nearest"], ["zeros", "border", "reflection"], [True, False]),
        *(("bicubic", padding, align) for padding, align in (("zeros", True), ("border", False), ("reflection", False))),
    ],
)
def test_grid_sample(mode: str, padding: str, align: bool) -> None:
    def fn(image: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(image, grid, mode=mode, padding_mode=padding, align_corners=align)

    assert_matches_eager(with_gradients(fn), floats(2, 3, 4, 5), GRID, rtol=1e-4, atol=1e-4)
    if mode != "bilinear":
        return  # nearest: positions half-way between two pixels are decided by rounding; bicubic: positions are not limited
    image = floats(1, 2, 4, 5).detach()
    assert_matches_eager(with_gradients(fn), image, GRID_ON_EDGES.clone().requires_grad_(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_grid_sample_3d(padding: str) -> None:
    grid = floats(1, 2, 3, 4, 3, seed=3)
    fn = with_gradients(lambda image, grid: F.grid_sample(image, grid, padding_mode=padding, align_corners=False))
    assert_matches_eager(fn, floats(1, 2, 3, 4, 5), grid, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, float("inf")])
def test_cdist(p: float) -> None:
    x1, x2 = floats(2, 4, 3), floats(2, 5, 3, seed=5)
    with torch.no_grad():
        x2[0, 1] = x1[0, 2]  # a distance of zero
    fn = with_gradients(lambda a, b: torch.cdist(a, b, p=p, compute_mode="donot_use_mm_for_euclid_dist"))
    assert_matches_eager(fn, x1, x2, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_pdist(p: float) -> None:
    assert_matches_eager(with_gradients(lambda x: F.pdist(x, p)), floats(5, 3), rtol=1e-4, atol=1e-5)


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


LABELS = torch.tensor([1, 0, 4])
LOSSES: Cases = {
    "cross entropy": (lambda x, w: F.cross_entropy(x, LABELS, w.detach().abs(), label_smoothing=0.1), (floats(3, 5), floats(5))),
    "cross entropy ignored": (lambda x: F.cross_entropy(x, torch.tensor([1, -100, 4])), (floats(3, 5),)),
    "cross entropy all ignored": (lambda x: F.cross_entropy(x, torch.full((3,), -100), reduction="sum"), (floats(3, 5),)),
    "cross entropy of probabilities": (lambda x, y: F.cross_entropy(x, y.softmax(1)), (floats(3, 5), floats(3, 5, seed=2))),
    "cross entropy of images": (lambda x: F.cross_entropy(x, torch.arange(12).reshape(1, 3, 4) % 5), (floats(1, 5, 3, 4),)),
    "nll": (lambda x: F.nll_loss(x.log_softmax(1), LABELS, reduction="none"), (floats(3, 5),)),
    "bce": (lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()), (floats(3, 5), floats(3, 5, seed=2))),
    "bce logits": (
        lambda x, y, w: F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=w.detach().abs()),
        (floats(3, 5), floats(3, 5, seed=2), floats(5)),
    ),
    "mse": (lambda x, y: F.mse_loss(x, y), (floats(3, 5), floats(3, 5, seed=2))),
    "l1": (lambda x, y: F.l1_loss(x, y), (floats(3, 5), floats(3, 5, seed=2))),
    "smooth l1": (lambda x, y: F.smooth_l1_loss(x, y, beta=0.5), (floats(3, 5), floats(3, 5, seed=2))),
    "huber": (lambda x, y: F.huber_loss(x, y, delta=0.7), (floats(3, 5), floats(3, 5, seed=2))),
    "kl": (lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"), (floats(3, 5), floats(3, 5, seed=2))),
    "gaussian nll": (
        lambda x, y, v: F.gaussian_nll_loss(x, y, v.exp(), full=True),
        (floats(3, 5), floats(3, 5, seed=2), floats(3, 5)),
    ),
    "poisson nll": (lambda x, y: F.poisson_nll_loss(x, y.exp(), full=True), (floats(3, 5), floats(3, 5, seed=2))),
    "multi margin": (lambda x, w: F.multi_margin_loss(x, LABELS, p=2, weight=w.detach(), margin=0.7), (floats(3, 5), floats(5))),
    "multi margin none": (lambda x: F.multi_margin_loss(x, LABELS, reduction="none"), (floats(3, 5),)),
    "multilabel margin": (
        lambda x: F.multilabel_margin_loss(x, torch.tensor([[3, 0, -1, 1, 2], [4, -1, 0, 0, 0], [-1, 1, 2, 3, 4]])),
        (floats(3, 5),),
    ),
    "multilabel soft margin": (
        lambda x, y: F.multilabel_soft_margin_loss(x, (y > 0).float()),
        (floats(3, 5), floats(3, 5, seed=2)),
    ),
    "triplet": (lambda a, p, n: F.triplet_margin_loss(a, p, n), (floats(3, 5), floats(3, 5, seed=2), floats(3, 5, seed=3))),
    "cosine": (lambda a, b: F.cosine_embedding_loss(a, b, torch.tensor([1, -1, 1])), (floats(3, 5), floats(3, 5, seed=2))),
    "soft margin": (lambda x: F.soft_margin_loss(x, torch.ones(3, 5)), (floats(3, 5),)),
    "hinge": (lambda x: F.hinge_embedding_loss(x, torch.tensor([[1.0, -1, 1, -1, 1]] * 3)), (floats(3, 5),)),
}


@pytest.mark.parametrize("case", LOSSES)
def test_loss(case: str) -> None:
    fn, args = LOSSES[case]
    assert_matches_eager(with_gradients(fn), *args, rtol=2e-5)


CTC_TARGETS = torch.tensor([[1, 2, 2, 1], [3, 1, 4, 4], [2, 0, 0, 0]])
CTC_LENGTHS = torch.tensor([4, 3, 0])


@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("concatenated", [False, True])
@pytest.mark.parametrize("blank", [0, 5])
def test_ctc_loss(blank: int, concatenated: bool, as_tensors: bool) -> None:
    targets = torch.cat([row[:n] for row, n in zip(CTC_TARGETS, CTC_LENGTHS, strict=True)]) if concatenated else CTC_TARGETS

    def fn(x: torch.Tensor, targets: torch.Tensor, *lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
        input_lengths, target_lengths = lengths if lengths else ([9, 7, 4], CTC_LENGTHS.tolist())
        loss = F.ctc_loss(x, targets, input_lengths, target_lengths, blank, reduction="none")
        mean = F.ctc_loss(x.log_softmax(2), targets, input_lengths, target_lengths, blank)
        return loss, mean, *torch.autograd.grad((loss * torch.tensor([1.0, 2.0, 3.0])).sum() + mean, x)

    lengths = (torch.tensor([9, 7, 4]), CTC_LENGTHS) if as_tensors else ()
    log_probs = floats(9, 3, 6).detach().log_softmax(2).requires_grad_()
    assert_matches_eager(fn, log_probs, targets, *lengths, rtol=1e-4, atol=1e-5)


def test_ctc_loss_of_an_impossible_alignment() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        infinite = F.ctc_loss(x, CTC_TARGETS[:2], [4, 9], [4, 3], reduction="none")
        zero = F.ctc_loss(x, CTC_TARGETS[:2], [4, 9], [4, 3], reduction="none", zero_infinity=True)
        return infinite, zero, *torch.autograd.grad(zero.sum(), x)

    assert_matches_eager(fn, floats(9, 2, 6).detach().log_softmax(2).requires_grad_(), rtol=1e-4, atol=1e-5)


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
    assert {torch.ops.xlatrain.attention.default, torch.ops.xlatrain.attention_backward.default} <= targets
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


def test_item_is_refused_by_line() -> None:
    from xlatrain.bridge.errors import CaptureError

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    with pytest.raises(CaptureError, match=r"test_lowerings_b_sampling.py:\d+: return x \* x.sum\(\).item\(\)"):
        lower(capture(fn, floats(3)))
