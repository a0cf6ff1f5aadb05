"""``F.scaled_dot_product_attention`` of 16-bit tensors, and of large float32 ones, as one op.

PyTorch's own decomposition, the only one that can be traced, computes 16-bit attention in float32 throughout, at several times
the cost on an accelerator. Its fused kernels, and the op here, multiply 16-bit numbers, accumulate and take the softmax in
float32, and recompute the probabilities in the backward pass instead of keeping them. Those that dropout has set to zero are
drawn again there by the number of the draw. float32 attention with few scores stays the decomposition, which keeps them, and is
faster then. A gradient that is to be differentiated again is the decomposition's.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from xlatrain.bridge.errors import CaptureError
from xlatrain.bridge.fake_kernels import fake_kernel
from xlatrain.bridge.patches import patched
from xlatrain.bridge.random import drawn_by_torch, next_index

_LIBRARY = torch.library.Library("xlatrain", "FRAGMENT")
_LIBRARY.define("attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool is_causal, float scale) -> (Tensor, Tensor)")
_LIBRARY.define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? mask, bool is_causal, float scale, Tensor out, "
    "Tensor logsumexp) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "banded_attention(Tensor q, Tensor k, Tensor v, Tensor? query_segments, Tensor? key_segments, int? left, int? right, "
    "float scale) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "banded_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? query_segments, Tensor? key_segments, "
    "int? left, int? right, float scale, Tensor out, Tensor logsumexp) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "dropout_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool is_causal, float scale, float p, int index) -> "
    "(Tensor, Tensor)"
)
_LIBRARY.define(
    "dropout_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? mask, bool is_causal, float scale, "
    "Tensor out, Tensor logsumexp, float p, int index) -> (Tensor, Tensor, Tensor)"
)

_HALF = (torch.bfloat16, torch.float16)
_decomposition = F.scaled_dot_product_attention
_float32: contextvars.ContextVar[bool] = contextvars.ContextVar("float32_attention", default=False)


@fake_kernel(_LIBRARY, "attention")
@fake_kernel(_LIBRARY, "dropout_attention")
@fake_kernel(_LIBRARY, "banded_attention")
def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes of the output (…, H, L, V), in the dtype of ``q``, and of the log-sum-exp (…, H, L), float32."""
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=torch.float32)


@fake_kernel(_LIBRARY, "attention_backward")
@fake_kernel(_LIBRARY, "dropout_attention_backward")
@fake_kernel(_LIBRARY, "banded_attention_backward")
def _fake_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    """Shapes of the gradients: those of q, k and v."""
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, mask, ctx.is_causal, ctx.scale, *ctx.dropout = inputs
    ctx.save_for_backward(q, k, v, mask, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    q, k, v, mask, out, logsumexp = ctx.saved_tensors
    if torch.is_grad_enabled() and not ctx.dropout:  # with create_graph
        return *_differentiable(grad, q, k, v, mask, ctx.is_causal, ctx.scale), None, None, None
    backward = torch.ops.xlatrain.dropout_attention_backward if ctx.dropout else torch.ops.xlatrain.attention_backward
    grads = backward(grad, q, k, v, mask, ctx.is_causal, ctx.scale, out, logsumexp, *ctx.dropout)
    return *grads, None, None, None, *(None for _ in ctx.dropout)


def _differentiable(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> list[torch.Tensor | None]:
    """The gradients by q, k and v, in their shapes, through PyTorch's decomposition; None by those that need none."""
    q, k, v = inputs = [x.view_as(x) for x in (q, k, v)]  # which may be one tensor
    out = _decomposition(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=q.shape[:-2] != k.shape[:-2])
    found = iter(torch.autograd.grad(out, [x for x in inputs if x.requires_grad], grad, create_graph=True))
    return [next(found) if x.requires_grad else None for x in inputs]


def _no_double_backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, ...]:
    raise CaptureError(
        "the step cannot be captured: it differentiates the gradient of a scaled_dot_product_attention with dropout that is one "
        "op here.\n"
        "  Fix: write that attention out, F.dropout(torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1), p) @ v; or call it on "
        "float32 tensors with fewer than 2**24 scores, outside of autocast, on a mesh without a tensor axis."
    )


for _op in ("attention", "dropout_attention"):
    torch.library.register_autograd(f"xlatrain::{_op}", _backward, setup_context=_save, lib=_LIBRARY)
    torch.library.register_autograd(f"xlatrain::{_op}_backward", _no_double_backward, lib=_LIBRARY)


def _fused(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Make ``F.scaled_dot_product_attention`` use the op where :func:`_is_one_op`; else ``original``."""

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = (x.to(dtype) if x.dtype == torch.float32 else x for x in (query, key, value))
        if not _is_one_op(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa):
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        if dropout_p > 0:
            drawn = (float(dropout_p), next_index())
            return torch.ops.xlatrain.dropout_attention(query, key, value, attn_mask, is_causal, factor, *drawn)[0]
        return torch.ops.xlatrain.attention(query, key, value, attn_mask, is_causal, factor)[0]

    return attention


def _is_one_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> bool:
    """Whether the op computes this attention, and is to. What is wrong is not its business, but torch's to word."""
    if query.dtype not in (*_HALF, torch.float32) or not query.dtype == key.dtype == value.dtype:
        return False
    if query.dtype == torch.float32 and not (_float32.get() or _is_large(query, key)):
        return False
    if dropout_p > 0 and drawn_by_torch():  # which draws for the probabilities, kept as the decomposition keeps them
        return False
    if not 0 <= dropout_p < 1 or (is_causal and mask is not None) or inside_functorch() or forward_ad._current_level >= 0:
        return False
    return _fit(query, key, value, enable_gqa) and (mask is None or _masks(mask, query, key))


def _is_large(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether keeping the probabilities, as the decomposition does, would take much memory: 64 MiB of a layer, or more."""
    return query.ndim > 1 and query.shape[:-1].numel() * key.shape[-2] >= 1 << 24


def _fit(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> bool:
    """Whether the op takes queries (…, H, L, E), keys (…, K, S, E) and values (…, K, S, V) of these shapes.

    None may be empty, and the dims before L and S are equal; with ``enable_gqa`` K may divide H.
    """
    if query.ndim < 3 or query.ndim != key.ndim or key.shape[:-1] != value.shape[:-1] or query.shape[-1] != key.shape[-1]:
        return False
    if not (query.numel() and key.numel() and value.numel()):
        return False
    lead, key_lead = query.shape[:-2], key.shape[:-2]
    if lead == key_lead:
        return True
    return enable_gqa and query.ndim == 4 and lead[:-1] == key_lead[:-1] and lead[-1] % key_lead[-1] == 0


def _masks(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether the mask needs no gradient, and broadcasts to the shape of the scores (…, H, L, S)."""
    scores = (*query.shape[:-1], key.shape[-2])
    sizes = zip(reversed(mask.shape), reversed(scores), strict=False)
    fits = mask.ndim <= len(scores) and all(size in (1, full) for size, full in sizes)
    return fits and not mask.requires_grad and mask.dtype in (torch.bool, torch.float32, query.dtype)


def inside_functorch() -> bool:
    """Whether ``torch.func`` transforms the running code, which it cannot do to ops of ours."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def float32_attention() -> Iterator[None]:
    """Within the block, float32 attention is one op too, see :func:`fused_attention`."""
    token = _float32.set(True)
    try:
        yield
    finally:
        _float32.reset(token)


@contextlib.contextmanager
def fused_attention() -> Iterator[None]:
    """Within the block ``F.scaled_dot_product_attention`` of 16-bit tensors, of large ones, or under autocast, is one op.

    Masks that need a gradient and unequal leading dims stay PyTorch's decomposition.
    """
    with patched([(F, "scaled_dot_product_attention", _fused(F.scaled_dot_product_attention))]):
        yield
