"""A search of user code for reads of gradients between steps.

After the update a compiled step's gradients are gone, unless somebody wants to see them: to let them out costs a second program.
No hook says that it reads ``p.grad`` in ``on_train_batch_end``, but its code does.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from inspect import getattr_static
from typing import Any

from torch_compat.run import hook_calls as call
from torch_compat.step.values.mocks import is_mock_class
from torch_compat.utilities.model_helpers import unwrapped

_NAMES = frozenset({"grad", "grad_norm", "clip_grad_norm_", "clip_grad_value_", "get_total_norm"})
_MOST = 16  # functions around one another
_DEPTH = 3  # how far calls of the user's own functions are followed


def reads_gradients_between_steps(owner: Any, in_step: frozenset[str]) -> bool:
    """Whether a hook of ``owner`` (a module or callback), or a function that it calls, mentions gradients.

    A wrong yes costs time only. Calls through other objects are not followed.

    Args:
        in_step: hooks that see gradients anyway.
    """
    kind = type(owner)
    if kind.__module__.startswith("torch_compat."):
        return False
    hooks = [name for name in dir(kind) if name.startswith("on_") and name not in in_step and call.has_own(name, owner)]
    return any(_mentions(one, kind, _DEPTH) for name in hooks for one in _functions(getattr(owner, name, None)))


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """The functions in Python that a call of ``value`` runs: of a method, a partial, something that wraps another."""
    found = [value]
    for one in found:  # which grows
        if type(one) is types.FunctionType:
            yield one
        if isinstance(one, types.MethodType | staticmethod | classmethod):
            found.append(one.__func__)
        elif isinstance(one, functools.partial):
            found += [one.func, *one.args]
        elif is_mock_class(type(one)):
            found.append(unwrapped(one))
        wrapped = getattr_static(one, "__wrapped__", None)
        if wrapped is not None and len(found) < _MOST:
            found.append(wrapped)


def _mentions(function: types.FunctionType, kind: type, depth: int) -> bool:
    names = set(_names(function.__code__))
    if names & _NAMES:
        return True
    if depth == 0:
        return False
    held = [getattr_static(kind, name, None) for name in names] + [function.__globals__.get(name) for name in names]
    own = {one for value in held for one in _functions(value)} - {function}
    return any(
        _mentions(one, kind, depth - 1) for one in own if not (one.__module__ or "").startswith(("torch.", "torch_compat."))
    )


def _names(code: types.CodeType) -> Iterator[str]:
    """Attributes and globals that the code uses, functions inside of it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
