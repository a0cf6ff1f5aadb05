"""``torch._foreach_*`` ops, functional and in place, and whole optimizer steps on them, against torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.xlatrain.bridge._compare import assert_matches_eager, floats

Tensors = list[torch.Tensor]


def lists(seed: int = 0) -> Tensors:
    return [floats(3, 2, seed=seed, requires_grad=False).abs() + 0.5, floats(4, seed=seed + 1, requires_grad=False).abs() + 0.5]


CASES: dict[str, Callable[[Tensors, Tensors, Tensors], Any]] = {
    "add alpha": lambda a, b, c: torch._foreach_add(a, b, alpha=0.3),
    "add number": lambda a, b, c: torch._foreach_add(a, 2),
    "add numbers": lambda a, b, c: torch._foreach_add(a, [1.0, 2.0]),
    "add tensor": lambda a, b, c: torch._foreach_add(a, c[0][0, 0], alpha=2),
    "sub alpha": lambda a, b, c: torch._foreach_sub(a, b, alpha=0.3),
    "mul": lambda a, b, c: torch._foreach_mul(a, b),
    "div tensor": lambda a, b, c: torch._foreach_div(a, c[0][0, 0]),
    "addcmul": lambda a, b, c: torch._foreach_addcmul(a, b, c, 0.5),
    "addcmul numbers": lambda a, b, c: torch._foreach_addcmul(a, b, c, [0.5, 2.0]),
    "addcdiv tensor": lambda a, b, c: torch._foreach_addcdiv(a, b, c, torch.tensor([0.5, 2.0])),
    "lerp": lambda a, b, c: torch._foreach_lerp(a, b, 0.3),
    "lerp tensors": lambda a, b, c: torch._foreach_lerp(a, b, c),
    "pow": lambda a, b, c: torch._foreach_pow(a, b),
    "pow of a number": lambda a, b, c: torch._foreach_pow(2.0, b),
    "norm": lambda a, b, c: torch._foreach_norm(a),
    "norm inf": lambda a, b, c: torch._foreach_norm(a, float("inf")),
    "max": lambda a, b, c: torch._foreach_max(a),
    "maximum": lambda a, b, c: torch._foreach_maximum(a, b),
    "maximum number": lambda a, b, c: torch._foreach_maximum(a, 1.0),
    "minimum numbers": lambda a, b, c: torch._foreach_minimum(a, [1.0, 0.7]),
    "clamp": lambda a, b, c: torch._foreach_clamp_max(torch._foreach_clamp_min(a, 0.6), b),
    "sqrt": lambda a, b, c: torch._foreach_sqrt(a),
    "neg": lambda a, b, c: torch._foreach_neg(a),
}


@pytest.mark.parametrize("case", CASES)
def test_foreach(case: str) -> None:
    assert_matches_eager(CASES[case], lists(), lists(3), lists(5))


def test_foreach_in_place() -> None:
    def fn(a: Tensors, b: Tensors) -> Tensors:
        torch._foreach_mul_(a, 0.9)
        torch._foreach_add_(a, b, alpha=0.1)
        torch._foreach_addcdiv_(a, b, torch._foreach_sqrt(b), value=-0.5)
        torch._foreach_zero_(b)
        torch._foreach_copy_(b, torch._foreach_neg(a))
        return [x.clone() for x in (*a, *b)]

    assert_matches_eager(fn, lists(), lists(3))


@pytest.mark.parametrize("max_norm", [0.1, 100.0])
def test_clip_grad_norm(max_norm: float) -> None:
    def fn(grads: Tensors) -> tuple[torch.Tensor, Tensors]:
        parameters = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)
        return norm, [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]

    assert_matches_eager(fn, lists())
