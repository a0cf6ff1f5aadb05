"""``torchmetrics.functional`` in a captured step: traced like any other function, where its checks would need values.

Its functions validate their arguments by looking at values (``torch.unique(target)``). While a step is captured there are none,
so the part of a validation that needs them is left out, as XLA leaves out every check of values; shapes and dtypes are still
checked.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from xlatrain.bridge.patches import patched

_NEED_VALUES = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


@contextlib.contextmanager
def traceable_metric_functions() -> Iterator[None]:
    """Let validations look at shapes and dtypes only, and counting have a static shape."""
    patches: list[tuple[Any, str, Any]] = []
    for module in [found for name, found in sys.modules.items() if name.startswith("torchmetrics.")]:
        for attribute in _replaced(module):
            patches.append((module, attribute, _STATIC.get(attribute) or _without_values(getattr(module, attribute))))
    with patched(patches):
        yield


def _replaced(module: ModuleType) -> list[str]:
    """The names in the module of functions that look at values: looked up again only when it has more names, or fewer."""
    size, found = _looked_up.get(module, (-1, []))
    if size != len(vars(module)):
        validations = [name for name, value in vars(module).items() if name.endswith("_tensor_validation") and callable(value)]
        found = [*validations, *(name for name in _STATIC if name in vars(module))]
        _looked_up[module] = len(vars(module)), found
    return found


_looked_up: weakref.WeakKeyDictionary[ModuleType, tuple[int, list[str]]] = weakref.WeakKeyDictionary()


@functools.cache
def _without_values(validation: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(validation)
    def validate(*args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(*_NEED_VALUES):
            validation(*args, **kwargs)

    return validate


def _bincount(x: torch.Tensor, minlength: int | None = None) -> torch.Tensor:
    """Count how often each of 0 … ``minlength - 1`` occurs in ``x``: int64[minlength]."""
    if minlength is None:
        return torch.bincount(x)  # of a shape that depends on values: refused with the user's line
    return torch.zeros(minlength, dtype=torch.long).scatter_add(0, x.long(), torch.ones_like(x, dtype=torch.long))


def normalize_logits_if_needed(tensor: torch.Tensor, normalization: str | None) -> torch.Tensor:
    """Probabilities of ``tensor``, in its shape and dtype; it may hold logits, which have values outside of 0 to 1."""
    if not normalization:
        return tensor
    probabilities = tensor.sigmoid() if normalization == "sigmoid" else tensor.softmax(1)
    return torch.where(((tensor < 0) | (tensor > 1)).any(), probabilities, tensor)


_STATIC: dict[str, Callable[..., Any]] = {one.__name__: one for one in (_bincount, normalize_logits_if_needed)}
"""Functions that stand for those of torchmetrics of the same names."""
