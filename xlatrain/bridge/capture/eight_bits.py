"""Linear layers whose products are computed in eight bits, forward and backward, each tensor scaled to the range of its dtype.

Parameters, gradients and what lies between layers keep their dtypes: a layer quantises what it multiplies, and scales the
product. All of that is ops of torch; only the product is an op of its own, which a TPU computes in the dtypes of its operands.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function_variadic
from torch.utils.flop_counter import register_flop_formula

from xlatrain.bridge.fake_kernels import fake_kernel
from xlatrain.bridge.patches import patched

_LIBRARY = torch.library.Library("xlatrain", "FRAGMENT")
_LIBRARY.define("eight_bit_product(Tensor a, Tensor b, int[] a_dims, int[] b_dims) -> Tensor")


@fake_kernel(_LIBRARY, "eight_bit_product")
def _fake(a: torch.Tensor, b: torch.Tensor, a_dims: Sequence[int], b_dims: Sequence[int]) -> torch.Tensor:
    shape = (*_others(a.shape, a_dims), *_others(b.shape, b_dims))
    return a.new_empty(shape, dtype=_sum_dtype(a.dtype))


@torch.library.impl("xlatrain::eight_bit_product", "CompositeExplicitAutograd", lib=_LIBRARY)
def _product(a: torch.Tensor, b: torch.Tensor, a_dims: Sequence[int], b_dims: Sequence[int]) -> torch.Tensor:
    """The op where torch runs it: in float64, in which products are exact, and sums of int8 too."""
    dims: Any = (list(a_dims), list(b_dims))
    return torch.tensordot(a.double(), b.double(), dims).to(_sum_dtype(a.dtype))


@register_flop_formula(torch.ops.xlatrain.eight_bit_product)
def _flops(a: Any, b: Any, a_dims: Sequence[int], b_dims: Sequence[int], *, out_shape: Any = None, **_: Any) -> int:
    """FLOPs of the product of tensors of these shapes."""
    return 2 * torch.Size(a).numel() * torch.Size(_others(b, b_dims)).numel()


def _others(shape: Sequence[int], dims: Sequence[int]) -> list[int]:
    """The sizes of the dims that are not contracted."""
    return [size for dim, size in enumerate(shape) if dim not in dims]


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.int32 if dtype == torch.int8 else torch.float32


@dataclass(frozen=True)
class EightBits:
    """How a linear layer computes its three products.

    Attributes:
        values: the dtype of inputs and weights: ``torch.int8`` or a float8.
        gradients: that of gradients by outputs.
        per_channel: scales for each row of an input, output channel of a weight, and row or channel of gradients, whichever is
            not summed over; False: one for each tensor.
        margin: powers of two that are left free above the largest value.
        wide: which products are not in eight bits: that of the forward pass, those of the gradients by input and by weight.
    """

    values: torch.dtype
    gradients: torch.dtype
    per_channel: bool = False
    margin: int = 0
    wide: tuple[bool, bool, bool] = (False, False, False)


class Quantised(NamedTuple):
    """Values in eight bits, and the float32 scale by which they have to be multiplied, with as many dims."""

    values: torch.Tensor
    scale: torch.Tensor


def quantised(x: torch.Tensor, dtype: torch.dtype, dims: Sequence[int] | None = None, margin: int = 0) -> Quantised:
    """``x`` in an eight-bit ``dtype``.

    Args:
        x: floating point; where it is not finite, neither is its value times the scale.
        dtype: rounds to nearest, ties to even.
        dims: share a scale; None: all.
        margin: powers of two that are left free above the largest value.
    """
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    x = x.float()
    extreme = x.abs().amax(list(range(x.ndim)) if dims is None else list(dims), keepdim=True)
    scale = torch.where(extreme == 0, 1.0, extreme * (2.0**margin / largest))
    x = x / scale
    if dtype == torch.int8:
        x = x.round()
    return Quantised(x.clamp(-largest, largest).to(dtype), scale)


def eight_bit_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: EightBits) -> torch.Tensor:
    """``x @ weight.T + bias`` with its products, and those of its gradients, in eight bits.

    Args:
        x: (…, inputs), floating point.
        weight: (outputs, inputs).
        bias: (outputs,), or None.
        how: dtypes and scales.

    Returns:
        (…, outputs), in the dtype of autocast where that is on, else in that of ``x``.
    """
    if has_torch_function_variadic(x, weight):
        return handle_torch_function(eight_bit_linear, (x, weight), x, weight, bias, how)
    if x.numel() == 0:
        return F.linear(x, weight, bias)
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    with torch.autocast(device, enabled=False):
        rows = x.unsqueeze(0) if x.ndim == 1 else x
        y: Any = _EightBitLinear.apply(rows, weight, how, dtype)
        y = y.squeeze(0) if x.ndim == 1 else y
        return y if bias is None else y + bias.to(dtype)


class _EightBitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, how: EightBits, dtype: torch.dtype) -> torch.Tensor:
        ctx.how, ctx.dtypes = how, (x.dtype, weight.dtype)
        inputs = quantised(x, how.values, [-1] if how.per_channel else None, how.margin)
        if how.wide[0]:
            y = x.to(dtype) @ weight.to(dtype).mT
        else:
            weights = _of_weight(weight, how)
            y = _product_of(inputs, weights, [-1], [1]) * inputs.scale * weights.scale.reshape(-1)
        # The weight is there in the backward pass, and quantised again; of the input eight bits are kept.
        ctx.save_for_backward(weight, *([x.to(dtype)] if how.wide[2] else inputs))
        return y.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():  # torch's once_differentiable lets those pass in which ``grad`` is a constant
            raise RuntimeError(
                "create_graph=True: linear layers in eight bits have no second derivative. Exclude them "
                "(EightBitPrecision(exclude=[…])), or use precision='bf16-mixed'"
            )
        how: EightBits = ctx.how
        weight, *inputs = ctx.saved_tensors
        of_x, of_weight = ctx.dtypes
        by_x = _by_input(grad, weight, how).to(of_x) if ctx.needs_input_grad[0] else None
        by_weight = _by_weight(grad, inputs, how).to(of_weight) if ctx.needs_input_grad[1] else None
        return by_x, by_weight, None, None


def _by_input(grad: torch.Tensor, weight: torch.Tensor, how: EightBits) -> torch.Tensor:
    """The gradient by the input, (…, inputs); ``grad`` is (…, outputs)."""
    if how.wide[1]:
        return grad @ weight.to(grad.dtype)
    weights = _of_weight(weight, how)
    gradients = _of_gradient(grad, weights.scale.reshape(-1), [-1], how)
    product = _product_of(gradients, weights, [-1], [0]) * gradients.scale
    return product if how.per_channel else product * weights.scale


def _by_weight(grad: torch.Tensor, inputs: Sequence[torch.Tensor], how: EightBits) -> torch.Tensor:
    """The gradient by the weight, (outputs, inputs); ``inputs`` is (…, inputs), quantised unless its product is a wide one."""
    rows = list(range(grad.ndim - 1))
    if how.wide[2]:
        return grad.flatten(0, -2).mT @ inputs[0].flatten(0, -2)
    values = Quantised(*inputs)
    gradients = _of_gradient(grad, values.scale, rows, how)
    product = _product_of(gradients, values, rows, rows) * gradients.scale.reshape(-1, 1)
    return product if how.per_channel else product * values.scale.reshape(1, 1)


def _of_weight(weight: torch.Tensor, how: EightBits) -> Quantised:
    return quantised(weight, how.values, [1] if how.per_channel else None, how.margin)


def _of_gradient(grad: torch.Tensor, scale: torch.Tensor, dims: list[int], how: EightBits) -> Quantised:
    """A gradient in eight bits.

    Args:
        grad: (…, outputs).
        scale: of the other factor. Where each channel has its own, those of the dims that are summed over are multiplied with
            the gradient before that is quantised.
        dims: are summed over.
        how: dtypes and scales.
    """
    if how.per_channel:
        return quantised(grad.float() * scale, how.gradients, dims, how.margin)
    return quantised(grad, how.gradients, None, how.margin)


def _product_of(a: Quantised, b: Quantised, a_dims: list[int], b_dims: list[int]) -> torch.Tensor:
    """The product of the values."""
    dims = [dim % a.values.ndim for dim in a_dims]
    return torch.ops.xlatrain.eight_bit_product(a.values, b.values, dims, b_dims)


@contextlib.contextmanager
def eight_bit_layers(how: EightBits, selects: Callable[[torch.nn.Module], bool]) -> Iterator[None]:
    """Linear layers that ``selects`` says yes to compute in eight bits in the block.

    Layers are :class:`torch.nn.Linear` and, once transformers is imported, its ``Conv1D``; a subclass with a ``forward`` of its
    own that does not call theirs is none.
    """
    linear = torch.nn.Linear.forward

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        return eight_bit_linear(input, self.weight, self.bias, how) if selects(self) else linear(self, input)

    patches: list[tuple[Any, str, Any]] = [(torch.nn.Linear, "forward", forward)]
    if (conv := transposed_linear()) is not None:
        transposed = conv.forward

        def conv_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            return eight_bit_linear(x, self.weight.mT, self.bias, how) if selects(self) else transposed(self, x)

        patches.append((conv, "forward", conv_forward))
    with patched(patches):
        yield


def transposed_linear() -> Any:
    """The linear layer of GPT-2 in transformers, whose weight is (inputs, outputs); None while nobody has imported it."""
    return getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
