"""The Trainer's arguments from environment variables: ``PL_TRAINER_MAX_EPOCHS=3 python train.py``.

API: ``lightning.pytorch.utilities.argparse``.
"""

from __future__ import annotations

import functools
import inspect
import os
from argparse import Namespace
from ast import literal_eval
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")

_TEMPLATE = "PL_%(cls_name)s_%(cls_argument)s"


def _parse_env_variables(cls: type, template: str = _TEMPLATE) -> Namespace:
    """The arguments of ``cls`` that environment variables give; a value is a Python literal, or else a string.

    Args:
        cls: the class whose constructor's arguments are looked for.
        template: the variables' names, made of ``cls_name`` and ``cls_argument`` in capitals.
    """
    found = {}
    for name in inspect.signature(cls).parameters:
        text = os.environ.get(template % {"cls_name": cls.__name__.upper(), "cls_argument": name.upper()})
        if text:
            found[name] = _value(text)
    return Namespace(**found)


def _value(text: str) -> Any:
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _defaults_from_env_vars(fn: Callable[P, T]) -> Callable[P, T]:
    """A constructor whose arguments, where the caller leaves them out, come from environment variables.

    Its signature stays what it was, for type checkers too.
    """
    construct_from: Callable[..., T] = fn

    @functools.wraps(fn)
    def construct(self: Any, *args: Any, **kwargs: Any) -> T:
        cls = type(self)
        if args:  # by name, so that a variable does not come a second time
            names = [name for name in inspect.signature(cls).parameters if name not in ("args", "kwargs")]
            kwargs.update(zip(names, args, strict=False))
        return construct_from(self, **{**vars(_parse_env_variables(cls)), **kwargs})

    return cast("Callable[P, T]", construct)
