"""Something to do when a module is imported, if anybody ever imports it."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence

Action = Callable[[types.ModuleType], None]


def when_imported(name: str, action: Action) -> None:
    """Call ``action`` with the module ``name``: now, if it is imported, else right after its code has run.

    Asked for again before that, the same action is called once.
    """
    if name in sys.modules:
        action(importlib.import_module(name))  # which waits for a thread that is at it
    elif (waiting := _Waiting(name, action)) not in sys.meta_path:
        sys.meta_path.insert(0, waiting)


class _Waiting(importlib.abc.MetaPathFinder):
    """Leaves the finding to the finders after it, once, and has the action called behind the loading."""

    def __init__(self, name: str, action: Action) -> None:
        self._awaited = (name, action)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Waiting) and self._awaited == other._awaited

    def __hash__(self) -> int:
        return hash(self._awaited)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        name, action = self._awaited
        if fullname != name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)
            return None
        spec.loader = _Loading(spec.loader, self, action)
        return spec


class _Loading(importlib.abc.Loader):
    """Loads with the loader that was found, and leaves no trace of itself."""

    def __init__(self, loader: importlib.abc.Loader, waiting: _Waiting, action: Action) -> None:
        self._loader = loader
        self._waiting = waiting
        self._action = action

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        try:
            self._loader.exec_module(module)
        except BaseException:
            sys.meta_path.insert(0, self._waiting)  # whoever catches that may import it again
            raise
        self._action(module)
