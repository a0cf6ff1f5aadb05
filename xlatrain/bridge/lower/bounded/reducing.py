"""Reductions and products: what is no part of the tensors is left out of them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from xlatrain.bridge.lower.bounded.call import BoundedCall
from xlatrain.bridge.lower.bounded.rules import rule
from xlatrain.bridge.lower.operands import accumulate_dtype, canonical_dim, canonical_dims, is_float
from xlatrain.bridge.lower.registry import lowering_of, resolve


def _axes(call: BoundedCall) -> tuple[int, ...]:
    has_dim = any(one.name == "dim" for one in call.node.target._schema.arguments)  # pyright: ignore
    return canonical_dims(call.argument("dim") if has_dim else None, call.args[0].ndim)


def _smallest(dtype: Any) -> Any:
    return False if dtype == np.bool_ else -np.inf if is_float(dtype) else np.iinfo(dtype).min


def _largest(dtype: Any) -> Any:
    return True if dtype == np.bool_ else np.inf if is_float(dtype) else np.iinfo(dtype).max


@rule("aten.sum.dim_IntList", "aten.any.default")
@rule("aten.any.dim", "aten.any.dims")
def _zeros(call: BoundedCall) -> Any:
    call.mask_arg(0, 0, _axes(call))
    return call.default()


@rule("aten.prod.default", "aten.prod.dim_int")
def _ones(call: BoundedCall) -> Any:
    call.mask_arg(0, 1, _axes(call))
    return call.default()


@rule("aten.amax.default", "aten.max.default", "aten.max.dim", "aten.argmax.default")
def _maximum(call: BoundedCall) -> Any:
    _refuse_flat_places(call)
    call.mask_arg(0, _smallest(call.args[0].dtype), _axes(call))
    return call.default()


@rule("aten.amin.default", "aten.min.default", "aten.min.dim", "aten.argmin.default")
def _minimum(call: BoundedCall) -> Any:
    _refuse_flat_places(call)
    call.mask_arg(0, _largest(call.args[0].dtype), _axes(call))
    return call.default()


def _refuse_flat_places(call: BoundedCall) -> None:
    if "arg" in str(call.node.target) and call.argument("dim") is None and call.args[0].ndim > 1:
        raise call.refuse("a place in the flattened tensor")


@rule("aten.linalg_vector_norm.default")
def _norm(call: BoundedCall) -> Any:
    if call.argument("ord", 2) < 0:
        raise call.refuse("a norm of negative order")
    return _zeros(call)


@rule("aten.mean.default", "aten.mean.dim")
def _mean(call: BoundedCall) -> Any:
    x, axes = call.args[0], _axes(call)
    dims = call.dims(call.operand(0))
    named = {name: call.argument(name) for name in ("dtype",)}
    keepdim = bool(call.argument("keepdim")) if "dim" in str(call.node.target) else False
    lowering = lowering_of(_SUM)
    assert lowering is not None
    total = lowering(call.masked(x, dims, 0, axes), axes, keepdim, **named)
    return total / call.count(x.shape, dims, axes, total.dtype)


_SUM: Any = resolve("aten.sum.dim_IntList")


@rule("aten.var.correction", "aten.var_mean.correction")
def _variance(call: BoundedCall) -> Any:
    x, axes = call.args[0], _axes(call)
    dims = call.dims(call.operand(0))
    keepdim = bool(call.argument("keepdim"))
    wide = x.astype(accumulate_dtype(x.dtype))
    count = call.count(x.shape, dims, axes, jnp.finfo(wide.dtype).dtype)
    average = jnp.sum(call.masked(wide, dims, 0, axes), axis=axes, keepdims=True) / count
    squares = jnp.sum(call.masked(jnp.square(jnp.abs(wide - average)), dims, 0, axes), axis=axes, keepdims=True)
    correction = call.argument("correction")
    variance = squares / jnp.maximum(count - float(1 if correction is None else correction), 0)
    kept = [one if keepdim else jnp.squeeze(one, axis=axes) for one in (variance, average)]
    return tuple(kept) if "_mean" in str(call.node.target) else kept[0]


# -- products ----------------------------------------------------------------------------------------------------------


def _product(call: BoundedCall, left: int) -> Any:
    """The dims over which a product of two matrices sums are 0 where there is nothing: NaN times 0 would be NaN."""
    right = left + 1
    call.mask_arg(left, 0, {call.args[left].ndim - 1})
    call.mask_arg(right, 0, {max(call.args[right].ndim - 2, 0)})
    return call.default()


@rule("aten.mm.default", "aten.bmm.default")
def _matrices(call: BoundedCall) -> Any:
    return _product(call, 0)


@rule("aten.addmm.default", "aten.addmv.default")
def _added_matrices(call: BoundedCall) -> Any:
    call.refuse_broadcast(call.operand(0))
    return _product(call, 1)


@rule("aten.convolution.default")
def _convolution(call: BoundedCall) -> Any:
    """Beyond a sequence's or image's end are zeros, as in its padding."""
    _refuse_transposed(call)
    call.mask_arg(0)
    return call.default()


@rule("aten.convolution_backward.default", sizes=("bias_sizes",))
def _convolution_backward(call: BoundedCall) -> Any:
    _refuse_transposed(call)
    call.mask_arg(0)
    call.mask_arg(1)
    return call.default()


def _refuse_transposed(call: BoundedCall) -> None:
    if call.argument("transposed") or any(call.dims(call.operand_named("weight"))):
        raise call.refuse("a transposed convolution, or one by a tensor that changes its size")


@rule("aten._cdist_forward.default", "aten._cdist_backward.default")
def _distances(call: BoundedCall) -> Any:
    if any(any(call.dims(node)[:-2]) for node in call.node.all_input_nodes):
        raise call.refuse("their number of matrices changes")
    for place in range(len(call.args)):
        call.mask_arg(place)
    return call.default()


# -- softmax, layer norm -----------------------------------------------------------------------------------------------


@rule("aten._softmax.default", "aten._log_softmax.default", "aten._safe_softmax.default")
def _softmax(call: BoundedCall) -> Any:
    x = call.args[0]
    call.mask_arg(0, _smallest(x.dtype), {canonical_dim(call.args[1], x.ndim)})
    return call.default()


@rule("aten.native_layer_norm.default")
def _layer_norm(call: BoundedCall) -> Any:
    _refuse_normalized(call, 0)
    return call.default()


@rule("aten.native_layer_norm_backward.default")
def _layer_norm_backward(call: BoundedCall) -> Any:
    """Gradients of weights are sums over rows."""
    _refuse_normalized(call, 1)
    for place in (0, 1, 3, 4):
        call.mask_arg(place)
    return call.default()


def _refuse_normalized(call: BoundedCall, place: int) -> None:
    if any(call.dims(call.operand(place))[-len(call.argument("normalized_shape")) :]):
        raise call.refuse("it normalizes over a dim whose size changes")
