"""Names of stock Lightning that have no meaning on a mesh: they can be imported, and raise where they are used.

So a script that imports one, or asks ``isinstance(trainer.strategy, DeepSpeedStrategy)``, runs; one that makes one is told
what to use instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch_compat.utilities.exceptions import MisconfigurationException


def refusing(module: str, reasons: Mapping[str, str], base: Callable[[], type] | None = None) -> Callable[[str], Any]:
    """A module's ``__getattr__`` that makes its refused names, each once.

    Args:
        module: under which users know them, ``"lightning.pytorch.strategies"``.
        reasons: name → why, and what to use instead. A capital letter first (or after ``_``) says that it is a class.
        base: gives the base of the classes, so that ``issubclass`` answers as in stock.
    """
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in reasons:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if name not in made:
            text = f"{module}.{name} is not offered on an XLA mesh: {reasons[name]}"
            is_class = name.lstrip("_")[:1].isupper()
            made[name] = _class(name, text, object if base is None else base()) if is_class else _function(name, text)
        return made[name]

    return get


def reason(value: Any) -> str | None:
    """The reason that a refused name gives when it is used; None for any other object."""
    return vars(value).get("_refused") if isinstance(value, type) or (callable(value) and hasattr(value, "__dict__")) else None


def _class(name: str, text: str, base: type) -> type:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise MisconfigurationException(text)

    # `__new__`, so that subclasses with an `__init__` of their own are refused too; abstract methods come later.
    return type(base)(name, (base,), {"__new__": refuse, "__doc__": text, "_refused": text, "__module__": __name__})


def _function(name: str, text: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise MisconfigurationException(text)

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = text
    vars(refuse)["_refused"] = text
    return refuse
