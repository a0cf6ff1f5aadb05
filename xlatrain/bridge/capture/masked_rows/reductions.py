"""Sums, means and losses over :class:`MaskedRows`: rows that are not selected do not count."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from xlatrain.bridge.capture.cut import UnknownValueError, ask, assume
from xlatrain.bridge.capture.masked_rows.functions import element_by_element
from xlatrain.bridge.capture.masked_rows.masked_rows import MaskedRows, beside
from xlatrain.bridge.capture.masked_rows.rules import all_rows, dims_of, extreme, found_in, put_in, rule_of, together

# Reductions

_IDENTITIES: dict[str, Callable[[MaskedRows], float | int]] = {
    **dict.fromkeys(("sum", "nansum", "norm", "vector_norm", "any", "count_nonzero"), lambda x: 0),
    **dict.fromkeys(("all", "prod"), lambda x: 1),
    "logsumexp": lambda x: -math.inf,
}


def _reduced_dims(x: MaskedRows, args: Any, kwargs: Any, place: int) -> list[int]:
    dims = dims_of(args, kwargs, x.rows.ndim, place)
    return dims or list(range(x.rows.ndim))


def _behind(x: MaskedRows, made: torch.Tensor, dims: list[int]) -> MaskedRows:
    """Rows of which other dims were reduced."""
    return x.like(made, x.axis if made.ndim == x.rows.ndim else x.axis - sum(dim < x.axis for dim in dims))


@rule_of(" ".join(_IDENTITIES))
def _reduction(func: Any, args: Any, kwargs: Any) -> Any:
    x, name = args[0], func.__name__.removeprefix("linalg_")
    if len(list(found_in((args, kwargs)))) > 1 or "out" in kwargs:
        return NotImplemented
    dims = _reduced_dims(x, args, kwargs, 2 if "norm" in name else 1)
    if x.axis not in dims:
        return _behind(x, func(x.rows, *args[1:], **kwargs), dims)
    if "norm" in name and kwargs.get("p", kwargs.get("ord", args[1] if len(args) > 1 else 2)) not in (1, 2, 1.0, 2.0, "fro"):
        return NotImplemented
    return func(x.filled(_IDENTITIES[name](x)), *args[1:], **kwargs)


@rule_of("mean")
def _mean(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    dims = _reduced_dims(x, args, kwargs, 1)
    if x.axis not in dims:
        return _behind(x, func(x.rows, *args[1:], **kwargs), dims)
    dtype = kwargs.get("dtype") or x.rows.dtype
    if not dtype.is_floating_point or {*kwargs} - {"dim", "keepdim", "dtype", "axis"}:
        return NotImplemented
    keepdim = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    return _divided(x.filled(0), x, dims, dtype, keepdim=keepdim)


def _divided(
    filled: torch.Tensor, x: MaskedRows, dims: list[int], dtype: torch.dtype, *, keepdim: bool = False, less: int = 0
) -> torch.Tensor:
    """The sum over ``dims`` by the number of elements that count, less some."""
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    each = math.prod(filled.shape[dim] for dim in dims if dim != x.axis)
    count = x.valid.sum().to(wide) * each - less
    return (filled.sum(dims, keepdim=keepdim, dtype=wide) / count).to(dtype)


@rule_of("var std")
def _variance(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    if len(args) > 1 or not {*kwargs} <= {"unbiased", "correction"}:
        return NotImplemented
    less = kwargs.get("correction", int(kwargs.get("unbiased", True)))
    dims = list(range(x.rows.ndim))
    mean = _divided(x.filled(0), x, dims, x.rows.dtype)
    far = x.like((x.rows - mean).square())
    variance = _divided(far.filled(0), x, dims, x.rows.dtype, less=1 if less is None else less)
    return variance if func in (torch.var, torch.Tensor.var) else variance.sqrt()


@rule_of("max min amax amin")
def _most(func: Any, args: Any, kwargs: Any) -> Any:
    if len(list(found_in((args, kwargs)))) > 1:
        return element_by_element(func, args, kwargs) if func.__name__ in ("max", "min") else NotImplemented
    x = args[0]
    if type(x) is not MaskedRows or (len(args) > 1 and isinstance(args[1], torch.Tensor)):
        return NotImplemented
    dims = _reduced_dims(x, args, kwargs, 1)
    if x.axis not in dims:
        made = func(x.rows, *args[1:], **kwargs)
        return _behind(x, made, dims) if isinstance(made, torch.Tensor) else put_in(made, [_behind(x, one, dims) for one in made])
    if (func.__name__ in ("max", "min") and len(dims) < x.rows.ndim) or (
        func.__name__ in ("max", "min") and (args[1:] or kwargs)
    ):
        return NotImplemented  # it returns indices too
    if not _some(x):
        return NotImplemented  # torch raises
    return func(x.filled(extreme(x, largest=func.__name__ in ("min", "amin"))), *args[1:], **kwargs)


@rule_of("median")
def _median(func: Any, args: Any, kwargs: Any) -> Any:
    (x,) = args
    if kwargs or not x.rows.is_floating_point():
        return NotImplemented
    ordered = x.filled(math.inf).flatten().sort().values
    count = x.valid.sum() * (x.rows.numel() // x.rows.shape[x.axis])
    middle = ordered.index_select(0, (count - 1).div(2, rounding_mode="floor").clamp(min=0).reshape(1)).reshape(())
    return torch.where((count == 0) | x.filled(0).isnan().any(), math.nan, middle)


@rule_of("bincount")
def _bincount(func: Any, args: Any, kwargs: Any) -> Any:
    x, weights, minlength = (*args, *[kwargs.get("weights"), kwargs.get("minlength", 0)][len(args) - 1 :])
    if type(x) is not MaskedRows or (weights is not None and (type(weights) is not MaskedRows or not weights.is_beside(x))):
        return NotImplemented
    if weights is not None:
        return func(x.rows, weights.filled(0), minlength)
    return func(x.rows, x.valid.float(), minlength).to(torch.int64)


@rule_of("argmax argmin")
def _place_of_most(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    dims = _reduced_dims(x, args, kwargs, 1)
    return NotImplemented if x.axis in dims else _behind(x, func(x.rows, *args[1:], **kwargs), dims)


def _some(x: MaskedRows) -> bool:
    """Whether any row is selected: a value that the step asks for."""
    try:
        return ask(x.valid, lambda valid: bool(valid.any()), "whether any element is True")
    except UnknownValueError:
        none = x.valid.any().logical_not()  # the first guess is False
    try:
        return not assume(none, lambda: none.reshape(()).to(torch.int32))
    except UnknownValueError:
        return False


# Losses


def _loss(func: Any, args: Any, kwargs: Any) -> Any:
    given = _signature(func).bind(*args, **kwargs)
    given.apply_defaults()
    said = given.arguments
    one = together(*said.values())
    if one is None or said.get("size_average") is not None or said.get("reduce") is not None or one.axis != 0:
        return NotImplemented
    if any(each.axis != 0 for each in found_in(list(said.values()))):
        return NotImplemented
    reduction = said["reduction"]
    if reduction not in ("none", "mean", "sum"):
        return NotImplemented
    count = one.rows.shape[0]
    for name, value in said.items():
        plain = isinstance(value, torch.Tensor) and type(value) is not MaskedRows and name in ("input", "target")
        if plain and value.ndim >= max(one.rows.ndim, 1) and value.shape[0] != 1:
            return NotImplemented
    each = func(**{**all_rows(dict(said)), "reduction": "none"})
    if each.ndim == 0 or each.shape[0] != count:
        return NotImplemented
    rows = one.like(each, 0)
    return rows if reduction == "none" else rows.mean() if reduction == "mean" else rows.sum()


@functools.cache
def _signature(func: Any) -> inspect.Signature:
    return inspect.signature(func)


_LOSSES = (
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss kl_div "
    "poisson_nll_loss triplet_margin_loss cosine_embedding_loss margin_ranking_loss multilabel_soft_margin_loss "
    "triplet_margin_with_distance_loss hinge_embedding_loss"
)
rule_of(_LOSSES, (F,))(_loss)


@rule_of("cross_entropy nll_loss", (F,))
def _class_loss(func: Any, args: Any, kwargs: Any) -> Any:
    """Cross entropy: targets that do not count are those that the caller would have ignored."""
    given = _signature(func).bind(*args, **kwargs)
    given.apply_defaults()
    said = given.arguments
    one, target = together(*said.values()), said["target"]
    if one is None or type(said["input"]) is not MaskedRows or type(target) is not MaskedRows or one.axis or target.axis:
        return NotImplemented
    if target.dtype.is_floating_point:
        return _loss(func, args, kwargs)
    if said["reduction"] == "none":
        return _loss(func, args, kwargs)
    ignored = torch.where(beside(target.valid, target.rows, 0), target.rows, said["ignore_index"])
    return func(**{**said, "input": said["input"].rows, "target": ignored})


@rule_of("cosine_similarity pairwise_distance")
def _pairwise(func: Any, args: Any, kwargs: Any) -> Any:
    one = together(args)
    if (
        one is None
        or one.axis != 0
        or any(each.axis != 0 or each.rows.ndim != 2 for each in found_in(args))
        or len(args) > 2
        or kwargs
    ):
        return NotImplemented
    if any(type(each) is not MaskedRows for each in args):
        return NotImplemented
    return one.like(func(*all_rows(args)), 0)
