"""Grouped matrix products (mixtures of experts): one custom op in place of torch's and of transformers' own.

``aten._grouped_mm`` accepts bfloat16 only while it is traced, and transformers' replacement for the other dtypes loops over
values. Both compute what ``xlatrain::grouped_mm`` computes for every dtype.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from xlatrain.bridge.errors import CaptureError, user_line
from xlatrain.bridge.fake_kernels import fake_kernel

_LIBRARY = torch.library.Library("xlatrain", "FRAGMENT")
_LIBRARY.define("grouped_mm(Tensor a, Tensor b, Tensor? offs) -> Tensor")


@fake_kernel(_LIBRARY, "grouped_mm")
def _fake(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor:
    """Shape of the grouped product of ``a`` and ``b``: (groups, M, N) where both have as many dims, else (M, N)."""
    groups = () if a.ndim != b.ndim else (a.shape[0],) if offs is None else (offs.shape[0],)
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]))


@register_flop_formula(torch.ops.xlatrain.grouped_mm)
def _flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """FLOPs by shapes: each row, or each summed element, belongs to one group unless all groups are as large."""
    return 2 * (a[0] if len(a) == len(b) == 3 else 1) * a[-2] * a[-1] * b[-1]


def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The decomposition of ``aten._grouped_mm``.

    Raises:
        CaptureError: a bias was given.
    """
    if bias is not None:
        raise CaptureError(
            f"{user_line(traceback.extract_stack()) or 'the step'}\n  cannot be captured: _grouped_mm with a bias has no "
            "lowering.\n  Fix: add the bias afterwards."
        )
    out = torch.ops.xlatrain.grouped_mm(a, b, offs)
    return out if out_dtype is None else out.to(out_dtype)


def _experts_backward(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients by ``a`` and ``b``, in their shapes."""
    return grouped_mm(grad, b.mT, offs), grouped_mm(a.mT, grad, offs)


def grouped_matmul_decompositions(
    library: torch._ops._OpNamespace = torch.ops.transformers,
) -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """Decompositions of torch's op and, once transformers is imported, of its fallback; before 5.23 that had no backward op."""
    table: dict[torch._ops.OpOverload, Callable[..., Any]] = {torch.ops.aten._grouped_mm.default: grouped_mm}
    for name, function in (("grouped_mm_fallback", grouped_mm), ("grouped_mm_fallback_backward", _experts_backward)):
        if hasattr(library, name):
            table[getattr(library, name).default] = function
    return table
