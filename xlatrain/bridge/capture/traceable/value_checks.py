"""Checks of tensors: of their values, by libraries on the host, left out while a step is captured; of dtypes, put in.

A captured tensor has no values. The checks only raise; without them an invalid argument gives what its formula gives (a NaN). Or
they look for a shorter way to the same result. Products of two dtypes, which eager torch refuses, PyTorch's tracer does not see,
and XLA would promote them silently.
"""

from __future__ import annotations

import contextlib
import functools
import math
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributions
import torch.fx
import torch.nn.functional as F
from torch._library import simple_registry
from torch.nn.modules import transformer

from xlatrain.bridge.errors import CaptureError, user_line
from xlatrain.bridge.patches import patched


def _no_check(*_: Any, **__: Any) -> None:
    """A replacement of ``torch._check_tensor_all_with`` that checks nothing."""


def _assert_now(tensor: torch.Tensor, assert_msg: str = "Expected Tensor with single nonzero value, but got zero") -> None:
    """``torch._assert_async`` as a question of Python's: an op without a result has no place in a graph.

    Whoever captures the step knows the answer, or goes on for a likely one that the program checks (``assert tensor``, too).
    """
    if not tensor:
        raise RuntimeError(assert_msg)


def _is_said_to_be_causal(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """A replacement of the check whether a mask of ``nn.Transformer`` and its parts is the causal one, a hint to attention.

    Attention uses the mask itself without that hint.
    """
    return is_causal is True


def _no_fast_path() -> bool:
    """Encoder layers in ``eval()`` would be one op, which no XLA program has: their formula is compiled instead."""
    return False


def _without_nesting(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``nn.TransformerEncoder.forward``, refused where torch might go through nested tensors.

    Raises (when called):
        CaptureError: padded positions of the result would be zero, if the values of the mask say that padding is at the end.
    """
    is_enabled = torch.backends.mha.get_fastpath_enabled

    @functools.wraps(forward)
    def checked(self: Any, src: torch.Tensor, mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None) -> Any:
        may_nest = getattr(self, "use_nested_tensor", False) and not self.layers[0].training and is_enabled()
        differentiated = torch.is_grad_enabled() and any(p.requires_grad for p in (src, *self.layers[0].parameters()))
        if may_nest and mask is None and src_key_padding_mask is not None and not differentiated:
            raise CaptureError(
                f"{user_line(traceback.extract_stack()) or 'the step'}\n  cannot be captured: nn.TransformerEncoder in eval() "
                "gives zeros at padded positions if every row of src_key_padding_mask ends in its padding: its values decide.\n"
                "  Fix: make it with enable_nested_tensor=False, which gives every position its value, as in training."
            )
        return forward(self, src, mask, src_key_padding_mask, is_causal)

    return checked


def _without_variance_check(gaussian_nll_loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``F.gaussian_nll_loss`` for a tensor ``var``; formula, shape and reduction checks are the documented ones."""

    @functools.wraps(gaussian_nll_loss)
    def loss(
        input: torch.Tensor,
        target: torch.Tensor,
        var: torch.Tensor | float,
        full: bool = False,
        eps: float = 1e-6,
        reduction: str = "mean",
    ) -> torch.Tensor:
        if not isinstance(var, torch.Tensor):
            return gaussian_nll_loss(input, target, var, full=full, eps=eps, reduction=reduction)
        if reduction not in ("none", "mean", "sum"):
            raise ValueError(f"{reduction} is not valid")
        if var.shape != input.shape:
            if input.shape[:-1] == var.shape:
                var = var.unsqueeze(-1)
            elif input.ndim != var.ndim or sum(v for i, v in zip(input.shape, var.shape, strict=True) if i != v) != 1:
                raise ValueError("var is of incorrect size")
        var = var.clone()
        with torch.no_grad():
            var.clamp_(min=eps)
        value = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
        if full:
            value = value + 0.5 * math.log(2 * math.pi)
        return value if reduction == "none" else value.mean() if reduction == "mean" else value.sum()

    return loss


def _showing_what_is_no_class(one_hot: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``F.one_hot`` where classes that torch refuses show: their rows are the smallest number, or zeros where it is traced."""

    @functools.wraps(one_hot)
    def encoded(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
        rows = one_hot(tensor, num_classes)
        outside = (tensor < 0) | (tensor >= rows.size(-1))
        return torch.where(outside.unsqueeze(-1), torch.iinfo(rows.dtype).min, rows)

    return encoded


@contextlib.contextmanager
def without_value_checks() -> Iterator[None]:
    """Within the block: no ``torch._check_tensor_all``, no argument checks of ``torch.distributions`` (unless asked for by
    ``validate_args=True``), no check of ``F.gaussian_nll_loss``'s variance, no look at the values of ``nn.Transformer``'s
    masks, none of the ops that its layers are in ``eval()``. What is no class shows in ``F.one_hot``. ``torch._assert_async`` is
    an ``if`` on its tensor."""
    patches = (
        (torch, "_check_tensor_all_with", _no_check),
        (torch, "_assert_async", _assert_now),
        (torch.distributions.Distribution, "_validate_args", False),
        (transformer, "_detect_is_causal_mask", _is_said_to_be_causal),
        (torch.backends.mha, "get_fastpath_enabled", _no_fast_path),
        (torch.nn.TransformerEncoder, "forward", _without_nesting(torch.nn.TransformerEncoder.forward)),
        (F, "gaussian_nll_loss", _without_variance_check(F.gaussian_nll_loss)),
        (F, "one_hot", _showing_what_is_no_class(F.one_hot)),
    )
    with patched(patches):
        yield


_LINALG_CHECK = "aten::_linalg_check_errors"


@contextlib.contextmanager
def without_linalg_checks() -> Iterator[None]:
    """Within the block ``torch.linalg``'s check for singular matrices counts as an op without effect, and drops out of the graph.

    Newer versions of torch (2.13) else thread a token through the graph to keep it. The result then is inf or NaN.
    """
    entry = simple_registry.singleton.find(_LINALG_CHECK)
    holder = getattr(entry, "effect", None)  # absent in torch 2.11
    effect = holder.effect if holder is not None else None
    if holder is None or effect is None:
        yield
        return
    holder.register(None)
    try:
        yield
    finally:
        holder.register(effect)


_OPERANDS = {
    "aten.mm.default": slice(0, 2),
    "aten.addmm.default": slice(0, 3),
    "aten.bmm.default": slice(0, 2),
    "aten.convolution.default": slice(0, 3),
}
"""Ops whose operands must have one dtype, and which of their arguments these are."""


def check_operand_dtypes(graph: torch.fx.Graph, user_line: Callable[[torch.fx.Node], str | None]) -> None:
    """Refuse products of tensors of different dtypes, as torch does when it runs them.

    Raises:
        RuntimeError: names the user's line and the dtypes.
    """
    for node in graph.nodes:
        places = _OPERANDS.get(str(node.target)) if node.op == "call_function" else None
        if places is None:
            continue
        values = [arg.meta["val"] for arg in node.args[places] if isinstance(arg, torch.fx.Node)]
        dtypes = list(dict.fromkeys(value.dtype for value in values))
        if len(dtypes) > 1:
            operands = _NAMED.get(str(node.target)) or f"the operands of {str(node.target).split('.')[1]}"
            error = RuntimeError(
                f"{operands} must have the same dtype, but got {' and '.join(map(_scalar_type, dtypes))}; convert one of them "
                "(x.to(layer.weight.dtype)), or choose the Trainer's precision"
            )
            if (line := user_line(node)) is not None:
                error.add_note(f"in {line}")
            raise error


_NAMED = {"aten.mm.default": "mat1 and mat2", "aten.addmm.default": "mat1 and mat2"}
"""Operands as torch's own errors call them."""


def _scalar_type(dtype: torch.dtype) -> str:
    """A dtype by the name that torch's kernels have for it (``Double``)."""
    return torch.empty(0, dtype=dtype).type().rpartition(".")[2].removesuffix("Tensor")
