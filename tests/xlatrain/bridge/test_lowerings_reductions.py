"""Reductions, sorting and softmax where sample inputs rarely reach: ties, NaN, nothing to reduce, masked rows."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.xlatrain.bridge._compare import assert_as_eager
from xlatrain.bridge.capture.capture import capture
from xlatrain.bridge.lower.interpret import lower

INF, NAN = float("inf"), float("nan")

EXTREMES = {
    "ties": torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0]]),
    "nan": torch.tensor([[1.0, NAN, 3.0, NAN], [INF, -INF, 0.0, NAN]]),
}


@pytest.mark.parametrize("x", EXTREMES.values(), ids=EXTREMES.keys())
def test_extremes_with_ties_and_nan(x):
    assert_as_eager(lambda x: [x.argmax(1), x.argmin(1), *x.max(1), *x.min(1), x.amax(1), x.max(), x.min()], x)
    assert_as_eager(lambda x: [*torch.cummax(x, 1), *torch.cummin(x, 1)], x)
    assert_as_eager(lambda x: [*x.sort(dim=1, stable=True), *x.sort(dim=1, descending=True, stable=True)], x)
    assert_as_eager(lambda x: [x.median(1).values, x.nanmedian(1).values, x.median()], x)


def test_topk_of_ints_bools_and_smallest():
    x = torch.tensor([[3, 9, -4, 7], [0, 5, 6, -8]])
    assert_as_eager(lambda x: [*x.topk(2), *x.topk(3, largest=False), *x.topk(1, dim=0)], x)
    assert_as_eager(lambda x: x.float().topk(2, largest=False), x)


def test_nan_of_either_sign_is_the_greatest():
    x = torch.copysign(torch.tensor([1.0, NAN, 3.0, 2.0]), torch.tensor([1.0, -1.0, 1.0, 1.0]))
    assert_as_eager(lambda x: [*x.topk(2), *x.topk(2, largest=False), *x.sort(), x.argmax(), *x.kthvalue(3)], x)


def test_reductions_without_elements():
    x = torch.zeros(0, 3)
    assert_as_eager(lambda x: [x.sum(0), x.prod(0), x.mean(0), x.var(0), x.any(0), x.all(0), x.logsumexp(0)], x)


def test_variance_with_too_few_elements():
    assert_as_eager(lambda x: [x.var(1), x.var(1, correction=2), x.std(), torch.var_mean(x, 1)[0]], torch.tensor([[2.0], [3.0]]))


def test_integer_and_bool_sums_are_wide():
    assert_as_eager(lambda x: [x.sum(), x.cumsum(0), x.prod(0)], torch.full((5,), 100, dtype=torch.uint8)[:2])
    assert_as_eager(lambda x: [x.sum(), x.cumsum(0)], torch.ones(300, dtype=torch.bool))


def test_bfloat16_sums_and_softmax_round_once():
    torch.manual_seed(0)
    x = torch.randn(4, 1000).bfloat16()
    assert_as_eager(lambda x: [x.sum(1), x.mean(1), x.cumsum(1), x.softmax(1), x.logsumexp(1)], x, rtol=8e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax_of_attention_gives_zeros_where_all_of_a_row_is_masked(dtype):
    """The softmax is one op, which looks at each row's largest element and not once more at all of them."""

    def probabilities(scores, dim=-1):
        scores = scores.detach().requires_grad_()
        found = torch.ops.aten._safe_softmax(scores, dim)
        return found, torch.autograd.grad((found * scores.detach().nan_to_num(0, 0, 0)).sum(), scores)[0]

    scores = torch.tensor(
        [[-INF] * 4, [1.0, -INF, 2.0, -3.0], [NAN, 0.0, 1.0, -INF], [INF, 1.0, 0.0, -1.0], [-200.0, -100.0, -90.0, 0.5]]
    )
    assert_as_eager(probabilities, scores.to(dtype), rtol=1e-6 if dtype == torch.float32 else 1e-2)
    assert_as_eager(lambda x: probabilities(x, 0), scores.T.to(dtype), rtol=1e-6 if dtype == torch.float32 else 1e-2)
    assert_as_eager(lambda x: torch.ops.aten._safe_softmax(x, -1, torch.float32), scores.to(dtype))
    assert_as_eager(lambda x: torch.ops.aten._safe_softmax(x, 0), torch.tensor(-INF, dtype=dtype))
    mask = torch.tensor([[True, False, True], [False] * 3])
    attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask)  # noqa: E731
    qkv = [torch.randn(2, length, 4, generator=torch.Generator().manual_seed(0)) for length in (2, 3, 3)]
    assert_as_eager(attend, *qkv)
    assert "aten.any" not in str(capture(attend, *qkv).graph.graph)


def test_a_mean_over_more_elements_than_int32_counts() -> None:
    def moments(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        outer = x[:, None] * y
        total = outer.mean() + outer.std()
        return total, torch.autograd.grad(total, [x, y])

    captured = capture(moments, *(torch.empty(1 << 20, device="meta", requires_grad=True) for _ in range(2)))
    inputs = [jax.ShapeDtypeStruct((1 << 20,), np.float32)] * 2
    assert [out.shape for out in jax.eval_shape(lower(captured), inputs, None)] == [(), (1 << 20,), (1 << 20,)]
