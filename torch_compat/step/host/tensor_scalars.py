"""Tensors in place of Python numbers where torch's ops want numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torch_compat.step.host.scalars import HostScalar

_WITH_ALPHA = frozenset({"add", "add_", "sub", "sub_", "subtract", "subtract_"})
_WITH_VALUE = frozenset({"addcmul", "addcmul_", "addcdiv", "addcdiv_"})


class TensorScalars(TorchFunctionMode):
    """A mode in which ``p.add_(g, alpha=lr)`` and ``p.addcdiv_(m, d, value=lr)`` take a tensor for their number.

    The tensor is multiplied first. Counters and options, which are host values, become tensors.

    That is how an optimizer's learning rate can be an input of a captured graph: torch would call ``lr.item()``.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        for factor in ("alpha", "value"):
            if type(number := kwargs.get(factor)) is HostScalar and name in _WITH_ALPHA | _WITH_VALUE:
                kwargs[factor] = number.tensor()
        if name in _WITH_ALPHA and isinstance(kwargs.get("alpha"), torch.Tensor):
            args, kwargs = _scale(args, kwargs, "alpha", 1, "other")
        elif name in _WITH_VALUE and isinstance(kwargs.get("value"), torch.Tensor):
            args, kwargs = _scale(args, kwargs, "value", 1, "tensor1")
        if any(type(one) is HostScalar for one in (*args, *kwargs.values())):  # beside a parameter torch does not ask its class
            return HostScalar.__torch_function__(func, types, args, kwargs)
        return func(*args, **kwargs)


def _scale(
    args: tuple[Any, ...], kwargs: dict[str, Any], factor_name: str, position: int, name: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``args`` and ``kwargs`` with the named operand multiplied by the factor, which is left out."""
    factor = kwargs.pop(factor_name)
    if name in kwargs:
        return args, {**kwargs, name: kwargs[name] * factor}
    return (*args[:position], args[position] * factor, *args[position + 1 :]), kwargs
