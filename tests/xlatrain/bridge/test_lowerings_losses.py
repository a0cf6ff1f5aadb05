"""Losses, forward and backward, against torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.xlatrain.bridge._compare import assert_matches_eager, floats, with_gradients
from xlatrain.bridge.capture.capture import capture
from xlatrain.bridge.errors import CaptureError
from xlatrain.bridge.lower.interpret import lower

Cases = dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]

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


def test_item_is_refused_by_line() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    with pytest.raises(CaptureError, match=r"test_lowerings_losses.py:\d+: return x \* x.sum\(\).item\(\)"):
        lower(capture(fn, floats(3)))
