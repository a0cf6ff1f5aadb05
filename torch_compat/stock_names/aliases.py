"""Lightning's import names as aliases of our modules.

A finder in front of ``sys.meta_path`` answers for ``lightning``, ``pytorch_lightning`` and ``lightning_fabric`` and everything
below them, so that the real packages are never found, whether installed or not. An alias is the *same* module object as ours:
classes are identical through every spelling. Where there is none of ours, a module is made of stock's names
(:mod:`torch_compat.stock_names.table`).
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

from torch_compat.stock_names import table
from torch_compat.stock_names.first_import import first_import
from torch_compat.stock_names.removed_names import in_modules
from torch_compat.stock_names.table import ERAS, ROOTS, target_name

# Longest prefix first: what `__name__` begins with in `pytorch_lightning` and in the modules that answer for it.
_ROOTS_OF_1_X = (f"{ERAS}.", "torch_compat.")


class StockModule(types.ModuleType):
    """A module behind one of Lightning's names: it has all names that stock's has, its submodules among them.

    Importing stock imports nearly all of its modules, so that scripts write ``L.fabric.strategies.fsdp.X`` after ``import
    lightning as L`` alone. Here a name is looked for, and a submodule imported, when it is asked for.
    """

    def __getattr__(self, name: str) -> Any:
        found = self._found(name)
        vars(self).setdefault(name, found)
        return found

    def _found(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in ("__all__", "__version__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        names = table.behind().get(self.__name__, [self.__name__])
        for module in names:
            try:
                return table.look_up(module, name)
            except (LookupError, ImportError):  # not there, or of a package that is not installed
                continue
        if (submodule := _submodule(self.__name__, names, name)) is not None:
            return submodule
        if (own := vars(self).get("__getattr__")) is not None:
            return own(name)  # for its message
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        # Importing a submodule ends with this, so that all below `torch_compat` are of this class.
        if isinstance(value, Overlay) and not isinstance(self, Overlay):
            return  # `pytorch_lightning.utilities.types` in our `utilities`
        super().__setattr__(name, with_stock_names(value) if isinstance(value, types.ModuleType) else value)


class Overlay(StockModule):
    """A module of ``pytorch_lightning``: names of earlier eras, and for the rest our module of today."""

    def _found(self, name: str) -> Any:
        below = f"{self.__name__}.{name}"
        if table.is_overlay(below) or below in table.by_hand()["modules"]:
            return module_behind(below)
        own, today = table.by_hand()["names"][self.__name__], self._today()
        if name in own:
            return table.look_up(self.__name__, name)
        if name == "__all__":
            return sorted({*today.__all__, *own})
        try:
            return getattr(today, name)
        except AttributeError:
            with contextlib.suppress(LookupError):
                return table.look_up(self.__name__, name)
            if (removed := in_modules(below.removeprefix(f"{ERAS}."))) is not None:
                raise AttributeError(removed) from None
            raise

    def _today(self) -> Any:
        return first_import(str(target_name(self.__name__)))

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._today()), *table.by_hand()["names"][self.__name__]})


_made: dict[str, StockModule] = {}  # where there is no module of ours


def module_behind(name: str) -> types.ModuleType | None:
    """The module that one of Lightning's names gives; None: there is none."""
    place = _place(name)
    if place is None:
        return None
    kind, at = place
    if kind is None:
        return with_stock_names(first_import(at))
    if at not in _made:
        module = _made[at] = kind(at)
        module.__path__ = []  # submodules are found by the finder
        module.__file__ = table.__file__
    return _made[at]


def _place(name: str) -> tuple[type[StockModule] | None, str] | None:
    """The class of the module to make for one of Lightning's names, and its name; no class: it is ours. None: there is none."""
    if table.is_overlay(name):
        return Overlay, name
    known = table.stock().get(table.canonical(name))
    if known is not None and "same_as" in known and name not in table.by_hand()["modules"]:
        return _place(known["same_as"])
    ours = target_name(name)
    if ours is not None and table.exists(ours):
        return None, ours
    return None if known is None else (StockModule, table.canonical(name))


def _submodule(package: str, names: Sequence[str], name: str) -> types.ModuleType | None:
    """The module ``name`` of Lightning's below any of the package's ``names``, or of ours below it; None: there is none."""
    below = [f"{parent}.{name}" for parent in names]
    found = next((module_behind(one) for one in below if _place(one) is not None), None)
    if found is None and _is_ours_name(package) and table.exists(f"{package}.{name}"):
        return with_stock_names(first_import(f"{package}.{name}"))
    return found


class AliasFinder(importlib.abc.MetaPathFinder):
    """Finds our module for one of Lightning's names; raises where there is none, so that no later finder is asked."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        below = next((fullname[len(root) :] for root in _ROOTS_OF_1_X if fullname.startswith(root)), None)
        if below is not None and (removed := in_modules(below)) is not None:
            # Under another name than the one asked for: else `from package import name` would take it for "no submodule".
            raise ModuleNotFoundError(removed, name=below)
        if fullname.partition(".")[0] not in ROOTS:
            return None
        if _place(fullname) is None:
            ours = target_name(fullname) or fullname
            raise ModuleNotFoundError(
                f"`{fullname}` is not offered in this version of torch_compat (there is no module `{ours}`)."
                " The real package is not used in its place: remove the import, or run the script without torch_compat.",
                name=ours,
            )
        return importlib.machinery.ModuleSpec(fullname, AliasLoader(), is_package=True)


class AliasLoader(importlib.abc.Loader):
    """Puts our module into ``sys.modules`` under the alias."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        found = module_behind(module.__name__)
        assert found is not None, module.__name__
        if found.__spec__ is None:  # made here; that of a module of ours stays untouched
            found.__spec__ = module.__spec__
        if not hasattr(found, "__path__"):  # `trainer.connectors.data_connector` is `trainer.connectors`
            vars(found)["__path__"] = []
        sys.modules[module.__name__] = found  # which is what the import system returns


def with_stock_names(module: types.ModuleType) -> types.ModuleType:
    """The module; if it is ours, it and those in it have all of stock's names from here on."""
    if type(module) is types.ModuleType and _is_ours_name(module.__name__):
        module.__class__ = StockModule
        for value in list(vars(module).values()):
            if isinstance(value, types.ModuleType):
                with_stock_names(value)
    return module


def _is_ours_name(name: str) -> bool:
    return name.partition(".")[0] == "torch_compat"


def refuse_real_packages() -> None:
    """Raises ``ImportError`` if one of the real packages is imported already."""
    for root in ROOTS:
        module = sys.modules.get(root)
        if module is None or isinstance(module, StockModule):
            continue
        raise ImportError(
            f"`{root}` was imported from {getattr(module, '__file__', None) or 'an unknown place'} before"
            " `torch_compat.install()`: classes of two packages would be mixed."
            " Call `torch_compat.install()` before anything imports Lightning (the first lines of the script),"
            " or run `python -m torch_compat script.py`."
        )


def has_finder() -> bool:
    return any(isinstance(finder, AliasFinder) for finder in sys.meta_path)


def add_finder() -> None:
    """Puts the finder in front, once."""
    if not has_finder():
        sys.meta_path.insert(0, AliasFinder())


def remove_finder() -> None:
    """Takes the finder away, and from ``sys.modules`` the names that it has answered for."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, AliasFinder)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ROOTS]:
        del sys.modules[name]
