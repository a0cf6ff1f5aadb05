"""Questions about signatures (``lightning.pytorch.utilities.signature_utils``)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def is_param_in_hook_signature(
    hook_fx: Callable[..., Any], param: str, explicit: bool = False, min_args: int | None = None
) -> bool:
    """Whether a hook can be given ``param``.

    Args:
        hook_fx: the hook, a method: its first parameter does not count. Decorated functions are unwrapped.
        param: the parameter's name.
        explicit: it must be named; else ``*args`` (or, where ``min_args`` is given, enough parameters) will do.
        min_args: the number of parameters that is enough.
    """
    hook_fx = inspect.unwrap(hook_fx)
    spec = inspect.getfullargspec(hook_fx)
    args = spec.args[1:]  # a hook's first is its owner
    if param in args or param in spec.kwonlyargs:
        return True
    if explicit:
        return False
    return spec.varargs is not None or (min_args is not None and len(args) >= min_args)
