"""Functions of installed packages that a step may call, and that may be replaced in mid-run (``F.cross_entropy = …``)."""

from __future__ import annotations

import types
from collections.abc import Collection
from typing import Any

import torch

from torch_compat.step.values.names import Name
from xlatrain.bridge.errors import is_user_file

_PLAIN = (bool, int, float, str, type(None))
_HEAP_TYPE = 1 << 9


class LibraryNames:
    """The names in modules and classes of installed packages that the user's code, and its layers, use."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], Name] = {}
        self._classes: dict[type, None] = {torch.Tensor: None}

    def add_module(self, module: types.ModuleType, names: Collection[str]) -> None:
        """Code uses these names, of which some may be the module's, or of a module in it."""
        waiting, known = [module], {module}
        while waiting:
            holder = waiting.pop()
            for name, value in [(name, vars(holder)[name]) for name in names if name in vars(holder)]:
                if isinstance(value, types.ModuleType) and value not in known:
                    known.add(value)
                    waiting.append(value)
                elif not callable(value) and not isinstance(value, _PLAIN):
                    continue
                self._note(vars(holder), holder.__name__, name)
                if isinstance(value, type):
                    self.add_class(value)

    def add_class(self, kind: type) -> None:
        """Code has an object of this class, or the class itself."""
        self._classes.update((one, None) for one in kind.__mro__ if one.__flags__ & _HEAP_TYPE and one is not torch.nn.Module)

    def add_function(self, function: types.FunctionType) -> None:
        """Add a function that code uses, and the functions that it calls; not those that these call in turn."""
        names = function.__code__.co_names
        for name in names:
            value = function.__globals__.get(name)
            if isinstance(value, types.ModuleType):
                self.add_module(value, names)
            elif callable(value):
                self._note(function.__globals__, str(function.__module__), name)

    def names(self, used: Collection[str]) -> list[Name]:
        """The names that were found; of classes what is among the ``used`` names, such as ``forward``."""
        found = list(self._found.values())
        for kind in self._classes:
            for name, value in vars(kind).items():
                if name in used and _is_method(value) and not name.startswith("__"):
                    found.append(Name(f"{kind.__module__}.{kind.__qualname__}.{name}", vars(kind), name, owner=kind))
        return found

    def replaced(self, used: Collection[str]) -> list[types.FunctionType]:
        """The user's own functions among them."""
        values = [name.holder[name.name] for name in self.names(used)]
        return [one for one in values if isinstance(one, types.FunctionType) and is_user_file(one.__code__.co_filename)]

    def _note(self, holder: dict[str, Any], where: str, name: str) -> None:
        if (id(holder), name) not in self._found:
            self._found[id(holder), name] = Name(f"{where}.{name}", holder, name)


def _is_method(value: Any) -> bool:
    return isinstance(value, types.FunctionType | staticmethod | classmethod | property)
