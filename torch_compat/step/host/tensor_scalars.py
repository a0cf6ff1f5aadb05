"""Tensors in place of Python numbers where torch's ops want numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.overrides import TorchFunctionMode

from torch_compat.step.host.factors import multiplied
from torch_compat.step.host.host_future import HostFuture
from torch_compat.step.host.scalars import HostScalar


class TensorScalars(TorchFunctionMode):
    """A mode in which ``p.add_(g, alpha=lr)`` and ``p.addcdiv_(m, d, value=lr)`` take a tensor for their number.

    The tensor is multiplied first. Counters and options, which are host values, become tensors; so do numbers of the step.

    That is how an optimizer's learning rate can be an input of a captured graph: torch would call ``lr.item()``.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = multiplied(func, args, kwargs or {})
        kinds = set(map(type, (*args, *kwargs.values())))
        for kind in (HostFuture, HostScalar):  # beside a parameter torch does not ask their class
            if kind in kinds:
                return kind.__torch_function__(func, types, args, kwargs)
        return func(*args, **kwargs)
