"""Functions of ``torch.jit.script`` while a step is captured: the Python functions that they were made of run.

TorchScript's interpreter runs ops where nobody can take a value that a step asks for, or put another function in the place of
torch's. What ``torch.jit.trace`` has made stays: it is what it was for its example.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from xlatrain.bridge.patches import patched

_MADE_BY_SCRIPT = "ScriptFunction"
"""The name that ``torch.jit.script`` gives, and ``torch.jit.trace`` does not."""
_FRACTION = "FloatType"


def traceable_scripted_functions() -> contextlib.AbstractContextManager[Any]:
    """Within the block calls of scripted functions are those of their Python functions."""
    call: Callable[..., Any] = torch.jit.ScriptFunction.__call__

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = getattr(self, "_torchdynamo_inline", None)
        if function is None or getattr(self, "__name__", None) != _MADE_BY_SCRIPT or _asks_for_script(function):
            return call(self, *args, **kwargs)
        arguments = self.schema.arguments
        fractions = {one.name for one in arguments if one.type.kind() == _FRACTION}
        names = [one.name for one in arguments[: len(args)]]
        given = [_fraction(one) if name in fractions else one for name, one in zip(names, args, strict=True)]
        return function(*given, **{name: _fraction(one) if name in fractions else one for name, one in kwargs.items()})

    return patched([(torch.jit.ScriptFunction, "__call__", called)])


def _asks_for_script(function: Any) -> bool:
    """Whether it asks if it is scripted, and then does something else."""
    return "is_scripting" in getattr(getattr(function, "__code__", None), "co_names", ("is_scripting",))


def _fraction(value: Any) -> Any:
    """A whole number for an argument that is a fraction, as TorchScript takes it."""
    return float(value) if type(value) is int else value
