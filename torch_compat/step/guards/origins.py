"""The owners of code that a step calls (the user, a library, Python itself), and the names written in it."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Iterator

from torch_compat.step.values import policy
from xlatrain.bridge.errors import is_user_file

_HEAP_TYPE = 1 << 9
_IMPORTS = ("IMPORT_NAME",)


def is_library(module: str) -> bool:
    return module.partition(".")[0] in policy.LIBRARIES


@functools.cache
def is_third_party(module: str) -> bool:
    """Whether a module is of an installed package whose functions get notes."""
    root = module.partition(".")[0]
    if not root or root in policy.NO_NOTES or root in sys.stdlib_module_names or root == "lightning":
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and file.endswith(".py") and not is_user_file(file)


@functools.cache
def is_constant(kind: type) -> bool:
    """Whether objects of a class of an installed package never change, but for what they remember of themselves."""
    return _is_listed(kind, policy.CONSTANTS)


@functools.cache
def is_kept_in_c(kind: type) -> bool:
    """Whether a capture cannot take back what a step changes of an object of the class, whatever it does with one."""
    return _is_listed(kind, policy.KEPT_IN_C)


def _is_listed(kind: type, names: frozenset[str]) -> bool:
    return any(f"{one.__module__}.{one.__qualname__}" in names for one in kind.__mro__)


@functools.cache
def is_of_user(kind: type) -> bool:
    """Whether the methods of a class are the user's: of data sets, too, whose attributes are data."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" if file is None else is_user_file(file)


def is_noted(function: types.FunctionType) -> bool:
    """Whether a function gets notes, if its source is there."""
    return is_user_file(function.__code__.co_filename) or is_third_party(str(function.__globals__.get("__name__", "")))


def is_house(module: str) -> bool:
    """Whether a module is of these packages."""
    return module.partition(".")[0] in ("torch_compat", "xlatrain")


def is_heap_type(kind: type) -> bool:
    """Whether a class can get attributes."""
    return bool(kind.__flags__ & _HEAP_TYPE)


def is_ours(function: types.FunctionType) -> bool:
    return str(function.__globals__.get("__name__", "")).startswith(("torch_compat.", "xlatrain.", "torch.", "jax."))


def is_pythons(function: types.FunctionType) -> bool:
    return str(function.__globals__.get("__name__", "")).partition(".")[0] in sys.stdlib_module_names


def is_generated(file: str) -> bool:
    """Whether code was made by a program: ``exec``, ``eval``, a data class."""
    return file.startswith("<") and not file.startswith(("<frozen", "<__array_function__")) and not is_user_file(file)


def is_made(kind: type) -> bool:
    """Whether a class has methods that a program has made in no module."""
    return bool(kind.__flags__ & _HEAP_TYPE) and kind.__module__ == "builtins"


def dunders(kind: type) -> list[str]:
    return [name for name in vars(kind) if name.startswith("__")]


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> frozenset[str]:
    """Names of globals and attributes in a function, and in those inside of it."""
    inner = [names_of(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


@functools.lru_cache(maxsize=4096)
def globals_of(code: types.CodeType) -> frozenset[str]:
    """Names of globals in a function, and in those inside of it, also of those that it assigns."""
    inner = [globals_of(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    own = {
        one.argval
        for one in dis.get_instructions(code)
        if one.opname.endswith(("_GLOBAL", "_NAME")) and one.opname not in _IMPORTS
    }
    return frozenset(own).union(*inner)


@functools.lru_cache(maxsize=4096)
def imports_of(code: types.CodeType) -> frozenset[tuple[str, tuple[str, ...]]]:
    """Modules that a function, or one inside of it, imports itself, with the names that it takes from them.

    A relative one has its dots.
    """
    inner = [imports_of(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    read = list(dis.get_instructions(code))
    own = {
        ("." * read[index - 2].argval + one.argval, tuple(read[index - 1].argval or ()))
        for index, one in enumerate(read)
        if one.opname in _IMPORTS
    }
    return frozenset(own).union(*inner)


def texts_of(code: types.CodeType) -> Iterator[str]:
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from texts_of(one)
        elif type(one) is str:
            yield one
