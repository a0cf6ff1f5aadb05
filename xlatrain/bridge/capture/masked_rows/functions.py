"""Functions of torch on :class:`MaskedRows`: of each element, of each row, and of their shape."""

from __future__ import annotations

import functools
import math
import traceback
from typing import Any

import torch
import torch.nn.functional as F

from xlatrain.bridge.capture.masked_rows.masked_rows import RULES, MaskedRows, Rule, derived
from xlatrain.bridge.capture.masked_rows.rules import all_rows, dims_of, found_in, goes_beside, put_in, rule_of, together
from xlatrain.bridge.capture.masked_rows.sizes import Sizes
from xlatrain.bridge.errors import CaptureError, user_line

# Element by element


@rule_of(
    "abs absolute neg negative positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square pow float_power sigmoid "
    "logit tanh relu sin cos tan asin acos atan sinh cosh asinh acosh atanh atan2 arctan2 erf erfc erfinv lgamma digamma "
    "reciprocal sign sgn round floor ceil trunc frac clamp clamp_min clamp_max clip nan_to_num add sub subtract rsub mul "
    "multiply div divide true_divide floor_divide remainder fmod maximum minimum fmax fmin lerp addcmul addcdiv where eq "
    "ne lt gt le ge isnan isfinite isinf isclose logical_and logical_or logical_not logical_xor bitwise_and bitwise_or "
    "bitwise_xor bitwise_not masked_fill heaviside logaddexp logaddexp2 xlogy hypot float double half bfloat16 long int "
    "short bool byte type detach clone contiguous dropout alpha_dropout gelu silu mish softplus elu selu celu "
    "leaky_relu relu6 hardtanh hardsigmoid hardswish hardshrink softshrink tanhshrink softsign threshold logsigmoid "
    "zeros_like ones_like full_like rand_like randn_like empty_like bernoulli __add__ __radd__ __iadd__ __sub__ __rsub__ "
    "__isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ __itruediv__ __div__ __rdiv__ __idiv__ __floordiv__ "
    "__rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __neg__ __pos__ __abs__ __invert__ __and__ __or__ __xor__ __rand__ "
    "__ror__ __eq__ __ne__ __lt__ __gt__ __le__ __ge__ add_ sub_ mul_ div_ clamp_ exp_ log_ relu_ sigmoid_ tanh_ neg_ abs_ "
    "pow_ masked_fill_ sqrt_"
)
def element_by_element(func: Any, args: Any, kwargs: Any) -> Any:
    one = together(args, kwargs)
    if one is None or "out" in kwargs:
        return NotImplemented
    behind = one.rows.ndim - one.axis
    if not all(goes_beside(one, other) for other in (*found_in((args, kwargs)), *args, *kwargs.values())):
        return NotImplemented
    name = getattr(func, "__name__", "")
    if (name.startswith("__i") and name != "__invert__") or (name.endswith("_") and not name.endswith("__")):
        if type(args[0]) is not MaskedRows:
            return NotImplemented
        func(args[0].rows, *all_rows(args[1:]), **all_rows(kwargs))
        return args[0]
    made = func(*all_rows(args), **all_rows(kwargs))
    return one.like(made, made.ndim - behind) if isinstance(made, torch.Tensor) else NotImplemented


@rule_of("to type_as")
def _to(func: Any, args: Any, kwargs: Any) -> Any:
    return (
        args[0].like(func(*all_rows(args), **all_rows(kwargs)))
        if type(args[0]) is MaskedRows
        else func(*all_rows(args), **kwargs)
    )


# Along other dims


def _along(place: int = 1, default: Any = None) -> Rule:
    """Functions of values along dims that they are told; results have as many dims."""

    def rule(func: Any, args: Any, kwargs: Any) -> Any:
        one = together(args, kwargs)
        if one is None or any(each.axis != one.axis for each in found_in((args, kwargs))) or "out" in kwargs:
            return NotImplemented
        given = dims_of(args, kwargs, one.rows.ndim, place, default)
        if given is None or one.axis in given:
            return NotImplemented
        made = func(*all_rows(args), **all_rows(kwargs))
        return one.like(made) if isinstance(made, torch.Tensor) else put_in(made, [one.like(each) for each in made])

    return rule


@rule_of("pad", (F,))
def _pad(func: Any, args: Any, kwargs: Any) -> Any:
    x, pad = args[0], args[1] if len(args) > 1 else kwargs["pad"]
    apart = type(x) is MaskedRows and x.axis < x.rows.ndim - len(pad) // 2
    return x.like(func(*all_rows(args), **kwargs)) if apart else NotImplemented


@rule_of("bucketize searchsorted")
def _buckets(func: Any, args: Any, kwargs: Any) -> Any:
    values, boundaries = args if func is torch.bucketize else args[::-1]
    if type(values) is not MaskedRows or kwargs.get("sorter") is not None or "out" in kwargs:
        return NotImplemented
    if type(boundaries) is MaskedRows:  # those of each row
        beside = boundaries.is_beside(values) and boundaries.axis == values.axis < values.rows.ndim - 1
        return values.like(func(*all_rows(args), **kwargs)) if beside else NotImplemented
    return values.like(func(*all_rows(args), **kwargs)) if boundaries.ndim == 1 else NotImplemented


rule_of("softmax log_softmax gumbel_softmax softmin cumsum cumprod flip roll sort argsort")(_along(1))
rule_of("normalize")(_along(2, 1))
rule_of("topk kthvalue")(_along(2, -1))
rule_of("glu")(_along(1, -1))
rule_of("chunk split tensor_split")(_along(2, 0))
rule_of("repeat_interleave")(_along(2))


@rule_of("gather take_along_dim index_select")
def _gather(func: Any, args: Any, kwargs: Any) -> Any:
    one = together(args, kwargs)
    if one is None:
        return NotImplemented
    if func in (torch.index_select, torch.Tensor.index_select) and type(args[0]) is not MaskedRows:
        x, dim, index = args
        return one.like(func(x, dim, index.rows), dim % x.ndim) if index.axis == 0 and index.rows.ndim == 1 else NotImplemented
    return _along(1)(func, args, kwargs)


@rule_of("cat concat concatenate")
def _cat(func: Any, args: Any, kwargs: Any) -> Any:
    parts = args[0]
    one = next(found_in(args))
    (dim,) = dims_of(args, kwargs, one.rows.ndim, 1, 0) or (0,)
    if any(each.axis != one.axis for each in found_in(args)):
        return NotImplemented
    if dim != one.axis:
        whole = together(args) is not None and all(type(each) is MaskedRows for each in parts)
        return one.like(func(all_rows(parts), dim)) if whole else NotImplemented
    how = tuple(each.valid if type(each) is MaskedRows else each.shape[dim] for each in parts)

    def join() -> torch.Tensor:
        ones = functools.partial(torch.ones, dtype=torch.bool, device=one.device)
        return torch.cat([each if isinstance(each, torch.Tensor) else ones(each) for each in how])

    valid = derived(one.valid, how, join)
    return MaskedRows.of(func(all_rows(parts), dim), valid, dim)


@rule_of("stack")
def _stack(func: Any, args: Any, kwargs: Any) -> Any:
    one = together(args)
    if one is None or any(type(each) is not MaskedRows or each.axis != one.axis for each in args[0]):
        return NotImplemented
    (dim,) = dims_of(args, kwargs, one.rows.ndim + 1, 1, 0) or (0,)
    return one.like(func(all_rows(args[0]), dim), one.axis + (dim <= one.axis))


# Row by row


@rule_of("linear")
def _linear(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    if len(list(found_in((args, kwargs)))) > 1 or type(x) is not MaskedRows or x.axis == x.rows.ndim - 1:
        return NotImplemented
    return x.like(func(x.rows, *args[1:], **kwargs))


@rule_of("matmul __matmul__ mm")
def _matmul(func: Any, args: Any, kwargs: Any) -> Any:
    x, y = args
    if type(x) is not MaskedRows or type(y) is MaskedRows or x.axis == x.rows.ndim - 1 or y.ndim > 2:
        return NotImplemented
    return x.like(func(x.rows, y))


@rule_of("embedding")
def _embedding(func: Any, args: Any, kwargs: Any) -> Any:
    indices = args[0]
    if type(indices) is not MaskedRows or kwargs.get("max_norm") is not None or type(args[1]) is MaskedRows:
        return NotImplemented
    return indices.like(func(indices.rows, *args[1:], **kwargs))


@rule_of("one_hot")
def _one_hot(func: Any, args: Any, kwargs: Any) -> Any:
    classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
    return args[0].like(func(*all_rows(args), **kwargs)) if classes != -1 else NotImplemented


@rule_of("layer_norm rms_norm")
def _layer_norm(func: Any, args: Any, kwargs: Any) -> Any:
    x, shape = args[0], args[1] if len(args) > 1 else kwargs["normalized_shape"]
    if len(list(found_in((args, kwargs)))) > 1 or x.axis >= x.rows.ndim - len(shape):
        return NotImplemented
    return x.like(func(*all_rows(args), **kwargs))


def _of_samples(dims: int) -> Rule:
    def rule(func: Any, args: Any, kwargs: Any) -> Any:
        x = args[0]
        if type(x) is not MaskedRows or len(list(found_in((args, kwargs)))) > 1 or x.axis != 0 or x.rows.ndim < dims:
            return NotImplemented
        return x.like(func(x.rows, *args[1:], **kwargs))

    return rule


rule_of("group_norm")(_of_samples(2))


# Other shapes


@rule_of("unsqueeze")
def _unsqueeze(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    (dim,) = dims_of(args, kwargs, x.rows.ndim + 1) or (0,)
    return x.like(func(x.rows, dim), x.axis + (dim <= x.axis))


@rule_of("squeeze")
def _squeeze(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    dims = dims_of(args, kwargs, x.rows.ndim)
    if dims is not None and x.axis in dims:
        return NotImplemented
    dims = [dim for dim in (range(x.rows.ndim) if dims is None else dims) if x.rows.shape[dim] == 1 and dim != x.axis]
    return x.like(x.rows.squeeze(tuple(dims)), x.axis - sum(dim < x.axis for dim in dims))


@rule_of("view reshape flatten")
def _reshape(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    shape: tuple[Any, ...] = args[1:] if len(args) > 1 else (-1,)
    if len(shape) == 1 and isinstance(shape[0], list | tuple | torch.Size):
        shape = tuple(shape[0])
    if func in (torch.flatten, torch.Tensor.flatten):
        if len(args) > 1 or kwargs:
            return NotImplemented
        shape = (-1,)
    ones = next((place for place, size in enumerate(shape) if type(size) is not int or size != 1), len(shape))
    if ones < len(shape) and shape[ones] is x.count():
        shape = (-1, *shape[ones + 1 :])
    else:
        ones = 0
    if any(size != 1 for size in x.rows.shape[: x.axis]) or kwargs or not shape or type(shape[0]) is not int or shape[0] != -1:
        return NotImplemented
    if any(type(size) is not int for size in shape):
        return NotImplemented
    rest = math.prod(shape[1:])
    each = math.prod(x.rows.shape[x.axis + 1 :])
    if rest <= 0 or each % rest:
        return NotImplemented
    times = each // rest
    rows = x.rows.reshape(*[1] * ones, x.rows.shape[x.axis] * times, *shape[1:])
    if times == 1:
        return x.like(rows, ones)
    return MaskedRows.of(rows, derived(x.valid, (times,), lambda: x.valid.repeat_interleave(times)), ones)


@rule_of("expand")
def _expand(func: Any, args: Any, kwargs: Any) -> Any:
    x, *shape = args
    shape = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], list | tuple | torch.Size) else shape
    axis = len(shape) - x.rows.ndim + x.axis
    if shape[axis] != -1:
        return NotImplemented
    return x.like(x.rows.expand(shape), axis)


@rule_of("expand_as view_as")
def _expand_as(func: Any, args: Any, kwargs: Any) -> Any:
    one = together(args)
    x, other = args
    if one is None or type(x) is not MaskedRows or type(other) is not MaskedRows:
        return NotImplemented
    behind = x.rows.ndim - x.axis, other.rows.ndim - other.axis
    return x.like(func(x.rows, other.rows), other.axis) if behind[0] == behind[1] else NotImplemented


@rule_of("transpose swapaxes")
def _transpose(func: Any, args: Any, kwargs: Any) -> Any:
    x, *dims = args
    if kwargs or len(dims) != 2:
        return NotImplemented
    first, second = (int(dim) % x.rows.ndim for dim in dims)
    return x.like(x.rows.transpose(first, second), {first: second, second: first}.get(x.axis, x.axis))


@rule_of("t")
def _t(func: Any, args: Any, kwargs: Any) -> Any:
    return _transpose(func, (args[0], 0, 1), kwargs) if args[0].rows.ndim == 2 else NotImplemented


@rule_of("permute")
def _permute(func: Any, args: Any, kwargs: Any) -> Any:
    x, *dims = args
    dims = list(dims[0]) if len(dims) == 1 and isinstance(dims[0], list | tuple) else dims
    return x.like(x.rows.permute(dims), [int(dim) % x.rows.ndim for dim in dims].index(x.axis))


@rule_of("unbind")
def _unbind(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    (dim,) = dims_of(args, kwargs, x.rows.ndim, 1, 0) or (0,)
    return NotImplemented if dim == x.axis else tuple(x.like(one, x.axis - (dim < x.axis)) for one in x.rows.unbind(dim))


@rule_of("__iter__", (torch.Tensor,))
def _iter(func: Any, args: Any, kwargs: Any) -> Any:
    found = _unbind(func, (args[0], 0), {})
    return NotImplemented if found is NotImplemented else iter(found)


@rule_of("__len__", (torch.Tensor,))
def _len(func: Any, args: Any, kwargs: Any) -> Any:
    return args[0].rows.shape[0] if args[0].axis else NotImplemented


@rule_of("size", (torch.Tensor,))
def _size(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    dims = dims_of(args, kwargs, x.rows.ndim)
    if dims is None:
        return _shape(func, args, kwargs)
    return x.count() if x.axis in dims else x.rows.shape[dims[0]]


@rule_of("numel nelement")
def _numel(func: Any, args: Any, kwargs: Any) -> Any:
    x, count = args[0], args[0].count()
    each = math.prod(size for dim, size in enumerate(x.rows.shape) if dim != x.axis)
    return count if count is NotImplemented else count * each


def _shape(func: Any, args: Any, kwargs: Any) -> Any:
    x, count = args[0], args[0].count()
    if count is NotImplemented:
        return Sizes(x)
    return tuple(count if dim == x.axis else size for dim, size in enumerate(x.rows.shape))


RULES[getattr(torch.Tensor, "shape").__get__] = _shape  # noqa: B009  a descriptor


@rule_of("dim ndimension is_floating_point is_complex is_signed element_size get_device is_contiguous", (torch, torch.Tensor))
def _about(func: Any, args: Any, kwargs: Any) -> Any:
    return func(args[0].rows, *args[1:], **kwargs)


for _name in (
    "ndim",
    "dtype",
    "device",
    "requires_grad",
    "is_cuda",
    "layout",
    "is_sparse",
    "is_leaf",
    "is_meta",
    "is_mps",
    "is_xpu",
):
    if hasattr(torch.Tensor, _name):
        RULES[getattr(torch.Tensor, _name).__get__] = _about


@rule_of("register_hook retain_grad requires_grad_", (torch.Tensor,))
def _hooks(func: Any, args: Any, kwargs: Any) -> Any:
    raise CaptureError(
        f"{user_line(traceback.extract_stack()) or 'the step'}\n  cannot be captured: it asks for the gradient of rows "
        "that a mask selects, or hooks into it.\n  Fix: ask for that of the tensor itself."
    )


RULES[torch.autograd.grad] = _hooks
for _name in ("grad", "grad_fn"):
    RULES[getattr(torch.Tensor, _name).__get__] = _hooks


def _data(func: Any, args: Any, kwargs: Any) -> Any:
    return args[0].like(args[0].rows.data)


RULES[getattr(torch.Tensor, "data").__get__] = _data  # noqa: B009  a descriptor
