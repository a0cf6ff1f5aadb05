"""The table of stock's names: which module of ours answers for one of stock's, and what a name that ours lacks gives.

``table.toml`` is written by hand; ``stock.json``, the globals of stock's modules, by ``make compat-table``.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import importlib.util
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch_compat.stock_names.refused import deprecated_class, refused_class, refused_function, removed_class
from torch_compat.stock_names.removed_names import in_modules

ROOTS = ("lightning", "pytorch_lightning", "lightning_fabric")
ERAS = "pytorch_lightning"
"""The import name that accepts names of eras 1.3 to 1.6."""

CANONICAL = {ERAS: "lightning.pytorch", "lightning_fabric": "lightning.fabric"}
"""Other names of stock's packages."""
_BRACES = re.compile(r"(.*)\{(.*)\}(.*)")
_MISSING = object()


@functools.cache
def stock() -> dict[str, dict[str, Any]]:
    """Stock's module → its globals, as ``tools/stock_globals.py`` writes them."""
    return json.loads(Path(__file__).with_name("stock.json").read_text(encoding="utf-8"))


@functools.cache
def by_hand() -> dict[str, Any]:
    """``table.toml``, its braces expanded."""
    read = tomllib.loads(Path(__file__).with_name("table.toml").read_text(encoding="utf-8"))
    modules = {name: ours for key, ours in read["modules"].items() for name, _ in _expanded(key)}
    names = {module: _references(entries) for module, entries in read["names"].items()}
    deprecated: dict[str, dict[str, Any]] = {}
    for group in read["deprecated"]:
        for name, of in _references(group["classes"]).items():
            deprecated.setdefault(group["module"], {})[name] = (of, group["says"], group.get("arguments", ()))
    refused, removed = (
        {module: _by_name(whys) for key, whys in read[kind].items() for module, _ in _expanded(key)}
        for kind in ("refused", "removed")
    )
    return {**read, "modules": modules, "names": names, "deprecated": deprecated, "refused": refused, "removed": removed}


def _expanded(key: str) -> Iterator[tuple[str, str]]:
    """``a{b,c}d`` → ``abd`` and ``acd``, each with what stood in the braces."""
    if (match := _BRACES.fullmatch(key)) is None:
        yield key, key
    else:
        yield from ((match[1] + part + match[3], part) for part in match[2].split(","))


def _references(entries: dict[str, str]) -> dict[str, str]:
    return {name: to + part if to.endswith(":") else to for key, to in entries.items() for name, part in _expanded(key)}


def _by_name(whys: dict[str, list[str]]) -> dict[str, str]:
    return {name: why for why, names in whys.items() for name in names}


def canonical(name: str) -> str:
    """The name of stock's module in ``lightning``."""
    root, dot, tail = name.partition(".")
    return CANONICAL.get(root, root) + dot + tail


def target_name(name: str) -> str | None:
    """The name that our module behind an import name has, whether there is one or not; None: none of Lightning's."""
    modules, tail = by_hand()["modules"], ""
    while name not in modules:
        head, dot, last = name.rpartition(".")
        if not dot:
            return None
        name, tail = head, f".{last}{tail}"
    found = modules[name] + tail
    return found if found.startswith("torch_compat") else target_name(found)


def is_overlay(name: str) -> bool:
    """Whether a module of stock's is one of its own here: names of earlier eras over today's."""
    return name.startswith(ERAS) and name in by_hand()["names"]


@functools.cache
def behind() -> dict[str, list[str]]:
    """Our module → the modules of stock's that it answers for."""
    found: dict[str, list[str]] = {}
    names = {**dict.fromkeys(stock()), **by_hand()["modules"]}
    for name in sorted(names, key=lambda name: name.startswith("lightning.fabric")):  # where one of ours is both's: the Trainer's
        if not is_overlay(name) and (ours := target_name(name)) is not None:
            found.setdefault(ours, []).append(name)
    return found


def exists(name: str) -> bool:
    """Whether there is such a module of ours; nothing is imported but its parents."""
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        # A parent that does not exist, or is no package, or a name that stock removed; but not a third-party module that the
        # parent needs.
        if error.name is not None and (name.startswith(error.name) or in_modules(error.name) is not None):
            return False
        raise


def look_up(module: str, name: str) -> Any:
    """The object that a name in stock's ``module`` gives here, where our module has none of its own.

    Raises:
        LookupError: the table does not have it.
        ImportError: it comes from a package that is not installed.
    """
    home, table = canonical(module), by_hand()
    for section in (module, home):
        if (to := table["names"].get(section, {}).get(name)) is not None:
            return _evaluate(home, to[1:]) if to.startswith("=") else _reference(to)
    entry = stock().get(home, {})
    if (kept := _said_by_hand(module, name, entry)) is not _MISSING:
        return kept
    for origin, names in entry.get("from", {}).items():
        for one in names:
            attribute, _, alias = one.partition(" as ")
            if name == (alias or attribute):
                return of_stock(origin, attribute)
    if (imported := entry.get("modules", {}).get(name)) is not None:
        return _module(imported) if _is_stocks(imported) else importlib.import_module(imported)
    if expression := entry.get("values", {}).get(name):
        return _evaluate(home, expression)
    if any(name in entry.get(kind, ()) for kind in ("classes", "functions", "values")):
        return _refused(home, name, next(why for _, said in _sections(module, "refused") if (why := said.get("*"))))
    raise LookupError(name)


def of_stock(module: str, name: str) -> Any:
    """A name of a module that stock imports from: stock's own, which is looked up here, or another's."""
    if not _is_stocks(module):
        return getattr(importlib.import_module(module), name)
    ours = _module(module)
    if name in vars(ours):
        return vars(ours)[name]
    if (own := vars(ours).get("__getattr__")) is not None:
        with contextlib.suppress(AttributeError):
            return own(name)
    return vars(ours).setdefault(name, look_up(module, name))


def _module(name: str) -> Any:
    from torch_compat.stock_names.aliases import module_behind

    found = module_behind(name)
    if found is None:
        raise LookupError(name)
    return found


def _is_stocks(module: str) -> bool:
    return module.partition(".")[0] in ROOTS


def _reference(to: str) -> Any:
    home, _, attribute = to.partition(":")
    return of_stock(home, attribute) if _is_stocks(home) else getattr(importlib.import_module(home), attribute)


def _evaluate(module: str, expression: str) -> Any:
    return eval(expression, _Names(module))  # of our own table


class _Names(dict[str, Any]):
    """The names that an expression of a module of stock's sees."""

    def __init__(self, module: str) -> None:
        super().__init__(__name__=module)

    def __missing__(self, name: str) -> Any:
        try:
            return of_stock(self["__name__"], name)
        except LookupError:
            return vars(builtins)[name]


def _sections(module: str, kind: str) -> Iterator[tuple[str, Any]]:
    """The sections of a kind for a module, then for those above it: name and content."""
    table = by_hand()[kind]
    for name in dict.fromkeys((module, canonical(module))):
        while name:
            if name in table:
                yield name, table[name]
            name = name.rpartition(".")[0]


def _said_by_hand(module: str, name: str, entry: dict[str, Any]) -> Any:
    """The class or function that the table names itself: of this module, or above it where stock has the name here."""
    own = (module, canonical(module))
    there = any(name in entry.get(held, ()) for held in ("classes", "functions", "values"))
    for kind in ("deprecated", "removed", "refused"):
        for section, content in _sections(module, kind):
            if name in content and name != "*" and (there or section in own):
                return _made(kind, section, name)
    return _MISSING


@functools.cache
def _made(kind: str, section: str, name: str) -> Any:
    said = by_hand()[kind][section][name]
    if kind == "deprecated":
        to, says, arguments = said
        return deprecated_class(_home(section), name, says, _reference(to), arguments)
    return removed_class(_home(section), name, said) if kind == "removed" else _refused(section, name, said)


def _refused(module: str, name: str, why: str) -> Any:
    entry = next((one for at, one in stock().items() if at.startswith(canonical(module)) and name in one.get("classes", ())), {})
    text = f"{module}.{name} is not offered on an XLA mesh: {why}"
    is_function = name in stock().get(canonical(module), {}).get("functions", ())
    if is_function or not (entry or name.lstrip("_")[:1].isupper()):
        return refused_function(_home(module), name, text)
    return refused_class(_home(module), name, text, _base(module, entry.get("classes", {}).get(name)))


def _home(module: str) -> str:
    """The ``__module__`` of what is made for one of stock's: ours, so that nobody who looks for it imports the real package."""
    ours = target_name(module)
    return ours if ours is not None and exists(ours) else __name__


def _base(module: str, bases: Sequence[str] | None) -> type:
    """The base of a refused class: stock's, if it is one of stock's or an exception; of a class of earlier eras the table's."""
    if bases is None:
        return next((_reference(to) for _, to in _sections(module, "bases")), object)
    for base in bases:
        home, _, attribute = base.partition(":")
        if (_is_stocks(home) or home == "builtins") and isinstance(found := of_stock(home, attribute), type):
            return found
    return object
