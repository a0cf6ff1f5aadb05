"""A classmethod that refuses to be called on an instance."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any


class _ClassMethodOnly:
    """A classmethod that refuses instances: ``instance.load_from_checkpoint(…)`` returns a new object, a frequent mistake."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = method
        self.__doc__ = method.__doc__

    def __get__(self, instance: object | None, owner: type) -> Callable[..., Any]:
        @functools.wraps(self.method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if instance is not None:
                raise TypeError(
                    f"The classmethod `{owner.__name__}.{self.method.__name__}` cannot be called on an instance. It makes "
                    f"another instance and leaves this one unchanged: `model = {owner.__name__}.{self.method.__name__}(...)`."
                )
            return self.method(owner, *args, **kwargs)

        return call


if TYPE_CHECKING:
    class_method_only = classmethod
else:
    class_method_only = _ClassMethodOnly
