"""The globals of every module of the installed stock Lightning: where an imported name comes from, what is defined there.

Run under stock by :mod:`tools.compat_inventory`; ``torch_compat/stock_names/stock.json`` is the result.
"""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_LONGEST_VALUE = 200  # characters; longer tables are written by hand, where somebody needs them

Globals = dict[str, dict[str, Any]]


def discover_globals() -> Globals:
    """Module → what it holds; empty entries are left out, and dunder names.

    ``from``: module → names, or ``"name as alias"``; ``modules``: name → imported module; ``classes``: name → bases;
    ``functions``; ``values``: name → expression; ``same_as``: the module that an old path is.
    """
    walked = pkgutil.walk_packages(importlib.import_module("lightning").__path__, "lightning.", onerror=lambda name: None)
    names = ["lightning", *(info.name for info in walked if ".__" not in info.name)]
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:  # of a package that is not installed
            continue
    found = {name: _globals(sys.modules[name]) for name in names if name in sys.modules}
    for name, module in list(sys.modules.items()):  # old paths, which stock puts there itself
        if name.startswith("lightning.") and name not in found and module.__name__ in found:
            found[name] = {"same_as": module.__name__}
    return dict(sorted(found.items()))


def render(found: Globals) -> str:
    """JSON, a module a line."""
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in found.items()) + "\n}\n"


def names(entry: dict[str, Any]) -> Iterator[str]:
    """All names of a module's entry."""
    for imported in entry.get("from", {}).values():
        yield from (name.rpartition(" as ")[2] for name in imported)
    for kind in ("modules", "classes", "functions", "values"):
        yield from entry.get(kind, ())


def _globals(module: types.ModuleType) -> dict[str, Any]:
    body = ast.parse(Path(str(module.__file__)).read_text()).body
    imported, assigned = dict(_imported(body)), dict(_assigned(body))
    found: dict[str, Any] = {"from": {}, "modules": {}, "classes": {}, "functions": [], "values": {}}
    for name, value in vars(module).items():
        if name == "__all__":
            found["values"][name] = repr(list(value))
        if name.startswith("__") and name.endswith("__"):
            continue
        home = getattr(value, "__module__", None)
        if isinstance(value, types.ModuleType):
            if value.__name__ != f"{module.__name__}.{name}":
                found["modules"][name] = value.__name__
        elif name in imported or (name not in assigned and home != module.__name__ and _is_at(home, value)):
            origin, attribute = imported.get(name) or (home, value.__qualname__)
            found["from"].setdefault(origin, []).append(name if attribute == name else f"{attribute} as {name}")
        elif isinstance(value, type) and home == module.__name__:
            found["classes"][name] = [f"{base.__module__}:{base.__qualname__}" for base in value.__bases__ if base is not object]
        elif home == module.__name__ and name not in assigned and callable(value):
            found["functions"].append(name)
        else:
            expression = assigned.get(name, "")
            found["values"][name] = expression if len(expression) <= _LONGEST_VALUE else ""
    return {key: value for key, value in found.items() if value}


def _is_at(home: Any, value: Any) -> bool:
    return isinstance(home, str) and getattr(sys.modules.get(home), getattr(value, "__qualname__", ""), None) is value


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements outside of functions and classes."""
    for node in body:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _imported(body: Sequence[ast.stmt]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Name → module and name there."""
    for node in _statements(body):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield from ((alias.asname or alias.name, (node.module, alias.name)) for alias in node.names if alias.name != "*")


def _assigned(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Name → expression."""
    for node in _statements(body):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, ast.unparse(node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, ast.unparse(node.value)
