"""Names of stock Lightning that have no meaning on a mesh, or that it deprecated: they can be imported, and say so when used.

So a script that imports one, or asks ``isinstance(trainer.strategy, DeepSpeedStrategy)``, runs; one that makes one is told
what to use instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn


def reason(value: Any) -> str | None:
    """The reason that a refused name gives when it is used; None for any other object."""
    return vars(value).get("_refused") if isinstance(value, type) or (callable(value) and hasattr(value, "__dict__")) else None


def refused_class(module: str, name: str, text: str, base: type = object) -> type:
    """A subclass of ``base`` that raises ``MisconfigurationException`` with ``text`` when it, or a subclass, is made."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        from torch_compat.utilities.exceptions import MisconfigurationException

        raise MisconfigurationException(text)

    # `__new__`, so that subclasses with an `__init__` of their own are refused too; abstract methods come later.
    return type(base)(name, (base,), {"__new__": refuse, "__doc__": text, "_refused": text, "__module__": module})


def refused_function(module: str, name: str, text: str) -> Callable[..., NoReturn]:
    """A function that raises ``MisconfigurationException`` with ``text``."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        from torch_compat.utilities.exceptions import MisconfigurationException

        raise MisconfigurationException(text)

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__module__, refuse.__doc__ = module, text
    vars(refuse)["_refused"] = text
    return refuse


def removed_class(module: str, name: str, why: str) -> type:
    """A class that raises ``NotImplementedError`` when it is made or a method is called, as those that stock removed."""
    text = f"The `{name}` class has been removed: {why}"

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(text)

    return _Removed(name, (), {"__init__": refuse, "__doc__": text, "_refused": text, "__module__": module})


class _Removed(type):
    """The class of removed classes: every method is there, and raises."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        return cls.__init__


def deprecated_class(module: str, name: str, says: str, of: type, arguments: Sequence[Any] = ()) -> type:
    """A subclass of ``of`` that warns when it is made; it is made with ``arguments`` alone, where there are any."""
    text = says.format(name=name, new=of.__name__)

    def warn_and_make(self: Any, *args: Any, **kwargs: Any) -> None:
        from torch_compat.utilities.rank_zero import rank_zero_deprecation

        rank_zero_deprecation(text, stacklevel=6)
        if arguments:
            args, kwargs = tuple(arguments), {}
        of.__init__(self, *args, **kwargs)  # pyright: ignore[reportGeneralTypeIssues]

    return type(of)(name, (of,), {"__init__": warn_and_make, "__doc__": text, "__module__": module})
