"""Lists Lightning's public API as it finds it: run unchanged under stock Lightning, and under ``python -m torch_compat``.

``compat_inventory.py OUT`` discovers; ``compat_inventory.py OUT WANTED`` looks up what another inventory lists.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

from tools.stock_globals import Globals, discover_globals, names

MODULES = (
    "lightning.pytorch", "lightning.pytorch.core.hooks", "lightning.pytorch.core.optimizer",
    "lightning.pytorch.callbacks", "lightning.pytorch.strategies", "lightning.pytorch.accelerators",
    "lightning.pytorch.plugins", "lightning.pytorch.plugins.environments", "lightning.pytorch.loggers",
    "lightning.pytorch.profilers", "lightning.pytorch.tuner", "lightning.pytorch.cli", "lightning.pytorch.utilities",
    "lightning.pytorch.demos", "lightning.fabric", "lightning.fabric.strategies", "lightning.fabric.accelerators",
    "lightning.fabric.plugins", "lightning.fabric.plugins.environments", "lightning.fabric.loggers",
    "lightning.fabric.utilities", "lightning.fabric.wrappers", "lightning",
    "lightning.pytorch.core.saving", "lightning.pytorch.loops", "lightning.pytorch.plugins.io", "lightning.pytorch.serve",
    "lightning.pytorch.trainer.states", "lightning.pytorch.utilities.combined_loader", "lightning.pytorch.utilities.exceptions",
    "lightning.pytorch.utilities.model_summary", "lightning.pytorch.utilities.parsing", "lightning.pytorch.utilities.seed",
    "lightning.pytorch.utilities.types", "lightning.fabric.plugins.collectives", "lightning.fabric.utilities.seed",
    "lightning.fabric.utilities.spike", "lightning.fabric.utilities.throughput", "lightning.fabric.utilities.types",
)  # fmt: skip
_STOCK = ("lightning.", "lightning_fabric.", "pytorch_lightning.")


def discover() -> dict[str, dict[str, Any]]:
    """Module → public name → what it is."""
    seen: set[int] = set()
    found: dict[str, dict[str, Any]] = {}
    listed = {id(value) for module in MODULES for value in _public(importlib.import_module(module)).values()}
    for module in MODULES:
        found[module] = {}
        for name, value in _public(importlib.import_module(module)).items():
            again = id(value) in seen  # `lightning.Trainer` is `lightning.pytorch.Trainer`: its members are listed once
            seen.add(id(value))
            members = [] if again or not isinstance(value, type) else _members(value, listed)
            found[module][name] = _describe(value, members)
    return found


def missing_imports(wanted: Globals) -> list[str]:
    """The modules and names that cannot be imported, of all globals of stock's modules."""
    missing: list[str] = []
    for module, entry in wanted.items():
        try:
            found = importlib.import_module(module)
        except ImportError:
            missing.append(module)
        else:
            missing += [f"{module}.{name}" for name in names(entry) if not hasattr(found, name)]
    return missing


def look_up(wanted: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The same names, where they are; else ``{"missing": what the import says}``."""
    found: dict[str, dict[str, Any]] = {}
    for module, listed in wanted.items():
        found[module] = {}
        for name, entry in listed.items():
            try:
                value = getattr(importlib.import_module(module), name)
            except (AttributeError, ImportError) as error:
                found[module][name] = {"missing": "" if isinstance(error, AttributeError | ModuleNotFoundError) else str(error)}
                continue
            if refused := getattr(value, "_refused", None):  # it can be imported, and raises where it is used
                found[module][name] = {"missing": refused}
            else:
                found[module][name] = _describe(value, list(entry.get("members", {})))
    return found


def _public(module: Any) -> dict[str, Any]:
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if (inspect.isclass(value) or inspect.isfunction(value)) and _is_of(module, value)
    ]
    return {name: getattr(module, name) for name in names if not name.startswith("_")}


def _is_of(module: Any, value: Any) -> bool:
    """Whether a name belongs to a module without ``__all__``: a package gathers from Lightning, a plain module defines itself."""
    home = getattr(value, "__module__", "") or ""
    return home.startswith(_STOCK) if hasattr(module, "__path__") else home == module.__name__


def _members(cls: type, listed: set[int]) -> list[str]:
    """Public names that Lightning adds to a class and to no base of it that is in the table itself."""
    inherited = {name for base in cls.__mro__[1:] if id(base) in listed or not _lightnings(base) for name in dir(base)}
    own = {name for base in cls.__mro__ if _lightnings(base) for name in vars(base)}
    instance = _instance(cls)
    attributes = set() if instance is None else set(vars(instance))
    return sorted(name for name in (own | attributes) - inherited if not name.startswith("_"))


def _lightnings(cls: type) -> bool:
    return cls.__module__.startswith(_STOCK)


def _instance(cls: type) -> Any:
    """An instance to look for attributes on, of the classes whose attributes scripts use."""
    if cls.__name__ == "Trainer":
        return cls(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    return cls() if cls.__name__ in ("LightningModule", "LightningDataModule", "Callback") else None


def _describe(value: Any, members: list[str]) -> dict[str, Any]:
    if not isinstance(value, type):
        return {"kind": "function" if callable(value) else "value", "signature": _signature(value) if callable(value) else None}
    entry: dict[str, Any] = {"kind": "class", "signature": _signature(value), "bases": _bases(value), "members": {}}
    if issubclass(value, enum.Enum):
        entry["values"] = {one.name: str(one.value) for one in value}
    instance = _instance(value) if members else None
    for name in members:
        member = inspect.getattr_static(value, name, None)
        if member is None and not hasattr(value, name):
            entry["members"][name] = {"kind": "value"} if instance is not None and hasattr(instance, name) else None
        elif isinstance(member, staticmethod | classmethod) or inspect.isfunction(member):
            entry["members"][name] = {"kind": "method", "signature": _signature(getattr(value, name))}
        elif callable(found := getattr(value, name)) and not isinstance(found, type):  # wrapped by a decorator
            entry["members"][name] = {"kind": "method", "signature": _signature(found)}
        else:
            entry["members"][name] = {"kind": "value"}
    return entry


def _bases(cls: type) -> list[str]:
    """The public classes above a class, by name, of which ``isinstance`` may be asked; each package has its own private ones."""
    ours = {"ABC", "Generic", "Protocol", "object", cls.__name__}
    return sorted({base.__name__ for base in cls.__mro__[1:] if not base.__name__.startswith("_")} - ours)


def _signature(value: Any) -> list[list[Any]] | None:
    """Parameters as ``[name, kind, default]``; None where Python cannot tell."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return None
    return [[parameter.name, parameter.kind.name, _default(parameter.default)] for parameter in parameters]


def _default(value: Any) -> str | None:
    if value is inspect.Parameter.empty:
        return None
    if isinstance(value, type) or inspect.isroutine(value):
        return value.__qualname__
    if isinstance(value, enum.Enum):
        value = value.value
    return re.sub(r" at 0x[0-9a-f]+", "", re.sub(r"\b(lightning|torch_compat)(\.\w+)*\.", "", repr(value)))


if __name__ == "__main__":
    out, *wanted_files = sys.argv[1:]
    if wanted_files:
        wanted = json.loads(Path(wanted_files[0]).read_text())
        result = {"api": look_up(wanted["api"]), "missing": missing_imports(wanted["globals"])}
    else:
        result = {"api": discover(), "globals": discover_globals()}
    Path(out).write_text(json.dumps(result))
