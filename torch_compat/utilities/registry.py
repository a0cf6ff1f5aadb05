"""Names that users register for classes. API: ``StrategyRegistry`` and ``AcceleratorRegistry`` of Lightning 2.6."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_compat.utilities.exceptions import ArgumentValueError


class Registry(dict[str, dict[str, Any]]):
    """A registry: name → ``{"description", "init_params", kind: class, f"{kind}_name": name}``.

    Args:
        kind: what is registered, ``"strategy"`` or ``"accelerator"``.
        title: the plural, as a title.
    """

    def __init__(self, kind: str, title: str) -> None:
        super().__init__()
        self._kind = kind
        self._title = title

    def _add(self, name: str, made: Callable[..., Any] | None, description: str, override: bool, params: dict[str, Any]) -> Any:
        """Register ``made`` under ``name``, or give a decorator that does.

        Raises:
            TypeError: a name that is no string.
            MisconfigurationException, ValueError: the name is taken, and ``override`` is False.
        """
        if not isinstance(name, str):
            raise TypeError(f"`name` must be a str, found {name!r}")
        if name in self and not override:
            raise ArgumentValueError(f"'{name}' is already present in the registry: `override=True` takes its place.")

        def add(cls: Callable[..., Any]) -> Callable[..., Any]:
            kind = self._kind
            self[name] = {"description": description, "init_params": params, kind: cls, f"{kind}_name": name}
            return cls

        return add if made is None else add(made)

    def get(self, name: str, default: Any | None = None) -> Any:
        """A new object of the class registered under ``name``, made with its ``init_params``; or ``default``.

        Raises:
            KeyError: there is no such name, and no default.
        """
        if name in self:
            entry = self[name]
            return entry[self._kind](**entry["init_params"])
        if default is not None:
            return default
        raise KeyError(f"'{name}' not found in registry. Available names: {', '.join(sorted(self)) or 'none'}")

    def remove(self, name: str) -> None:
        """Forget ``name``."""
        self.pop(name)

    def __str__(self) -> str:
        return f"Registered {self._title}: {', '.join(self)}"


class StrategyRegistryType(Registry):
    """Strategies by name: after ``StrategyRegistry.register("mine", Mine)`` there is ``Trainer(strategy="mine")``."""

    def __init__(self) -> None:
        super().__init__("strategy", "Strategies")

    def register(
        self,
        name: str,
        strategy: Callable[..., Any] | None = None,
        description: str | None = None,
        override: bool = False,
        **init_params: Any,
    ) -> Any:
        """Register a class; without ``strategy`` a decorator. ``init_params`` are given to its constructor."""
        return self._add(name, strategy, description or "", override, init_params)

    def available_strategies(self) -> list[str]:
        """The registered names."""
        return list(self)


class AcceleratorRegistryType(Registry):
    """Accelerators by name: after ``AcceleratorRegistry.register("mine", Mine)`` there is ``Trainer(accelerator="mine")``."""

    def __init__(self) -> None:
        super().__init__("accelerator", "Accelerators")

    def register(
        self,
        name: str,
        accelerator: Callable[..., Any] | None = None,
        description: str = "",
        override: bool = False,
        **init_params: Any,
    ) -> Any:
        """Register a class; without ``accelerator`` a decorator. ``init_params`` are given to its constructor."""
        return self._add(name, accelerator, description, override, init_params)

    def available_accelerators(self) -> set[str]:
        """The registered names."""
        return set(self)
