"""The names that a step's code uses, and where Python finds them: looked up without running it."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import dis
import functools
import linecache
import os
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torch_compat.step.guards.library_names import LibraryNames
from torch_compat.step.guards.parameter_hooks import called_by_autograd
from torch_compat.step.values.names import Attributes, Cell, Defaults, Name, State
from torch_compat.step.values.user_objects import attributes_of, is_user_class
from xlatrain.bridge.errors import is_user_file

_Function = types.FunctionType
_TRAINER = ("trainer", "_trainer")
_STATE = ("stage", "fn")
_FOLLOWED = frozenset({"current_epoch", "global_step", "is_last_batch", "estimated_stepping_batches"})
"""Of the Trainer: counters that a captured step knows as its inputs, and what never changes."""
_SETTINGS = (bool, int, float, str, type(None))
_CONTAINERS = (dict, list, tuple, set, deque)
_EMPTY = (dict, OrderedDict, list, tuple, set)
_MANY = 1000  # entries: data, not functions
_DEPTH = 4
_BY_TEXT = frozenset({"getattr", "hasattr", "attrgetter", "methodcaller"})
_OF_ANY_NAME = frozenset({"attrgetter", "methodcaller", "vars", "__dict__", "globals", "eval", "exec"})

_NOT_OPERATORS = frozenset(
    {"__init__", "__new__", "__post_init__", "__del__", "__repr__", "__getstate__", "__setstate__", "__reduce__"}
)


@dataclass(frozen=True)
class UserCode:
    """The names, classes and caches that user code may use when a step runs.

    Attributes:
        names: all names outside of modules and other roots.
        classes: the user's classes whose methods may be called.
        caches: functions that keep their results (``functools.cache``).
        functions: that it may call.
    """

    names: list[Name]
    classes: list[type]
    caches: list[Any]
    functions: list[types.FunctionType]


def user_code(step: str, module: torch.nn.Module, roots: Mapping[str, Any], functions: Iterable[Any] = ()) -> UserCode:
    """The code that ``module``'s method ``step`` leads to.

    Args:
        functions: that run instead, or besides.
    """
    search = _Search(module, roots, functions)
    search.run(step)
    return UserCode(_told_apart(search.found), list(search.classes), list(search.caches), list(search.functions))


def looked_at(step: str, module: torch.nn.Module, roots: Mapping[str, Any], functions: Iterable[Any] = ()) -> frozenset[str]:
    """The names of attributes and variables with which the step's code does more than ``name.append(…)`` and ``name[…] = …``."""
    search = _Search(module, roots, functions)
    search.run(step)
    found: set[str] = set()
    for function in search.functions:
        code = function.__code__
        lines = _looks(code.co_filename, len(linecache.getlines(code.co_filename)))
        last = _last_line(code)
        found.update(name for name, line in lines if code.co_firstlineno <= line <= last)
        if not lines:  # no source
            found |= _names(code)
    return frozenset(found)


def _told_apart(names: list[Name]) -> list[Name]:
    """Names with a number where another has the same text: variables of functions that one function made, classes of one name."""
    count: dict[str, int] = {}
    for index, name in enumerate(names):
        count[name.text] = number = count.get(name.text, 0) + 1
        if number > 1:
            names[index] = dataclasses.replace(name, text=f"{name.text} ({number})")
    return names


class _Search:
    def __init__(self, module: torch.nn.Module, roots: Mapping[str, Any], functions: Iterable[Any]) -> None:
        self._trainer = module.__dict__.get("_trainer")
        owners = [*module.modules(), *roots.values()]
        kinds = {kind: None for owner in owners for kind in type(owner).__mro__}
        self.classes = {kind: None for kind in kinds if is_user_class(kind)}
        self._library = LibraryNames()
        # What owners hold, by the name that code must use to get there; "" where that need not be the user's code.
        self._held: dict[str, list[Any]] = {"": list(functions)}
        for kind in kinds.keys() - self.classes.keys():
            if issubclass(kind, torch.nn.Module):
                self._library.add_class(kind)
                self._held[""].append(vars(kind).get("forward"))
        for owner in owners:
            if isinstance(owner, torch.nn.Module):
                self._held[""] += called_by_autograd(owner)
            seen = _is_users_own(type(owner))
            for name, value in list(vars(owner).items()):
                if type(value) in _EMPTY and not value:  # most of what a module has: dicts of hooks
                    continue
                if not isinstance(value, (torch.Tensor, *_SETTINGS)):
                    self._held.setdefault(name if seen else "", []).append(value)
        self.found: list[Name] = []
        self.caches: dict[Any, None] = {}
        self._known: set[tuple[int, str]] = set()
        self._used: set[str] = set()
        self.functions: dict[_Function, None] = {}
        self._waiting: list[_Function] = []
        self._opened: set[int] = set()
        self._any_name = False  # code computes the names of the attributes that it reads

    def run(self, step: str) -> None:
        self._used |= {getattr(step, "method", step), "forward", "__call__", ""}
        before = -1
        while before != len(self.functions) or self._waiting:
            before = len(self.functions)
            while self._waiting:
                self._read(self._waiting.pop())
            for replaced in self._library.replaced(self._used):
                self._follow(replaced)
            for name in list(self._held if self._any_name else self._used & self._held.keys()):
                for value in self._held.pop(name):
                    self._follow(value)
            for kind in list(self.classes):
                for name in self._used_of(kind):
                    self._class_attribute(kind, name)
        self.found += self._library.names(self._used)

    def _used_of(self, kind: type) -> set[str]:
        """Names among a class's attributes; where names are computed, all but hooks, which other code calls."""
        if not self._any_name:
            return (self._used | _operators(kind)) & vars(kind).keys()
        others = [vars(base) for base in kind.__mro__ if not is_user_class(base)]
        return {name for name in vars(kind) if name in self._used or not any(name in base for base in others)}

    def _follow(self, value: Any, depth: int = 0) -> None:
        """Follow a value that the step may call, or whose methods it may call; or a container or object of such values."""
        if isinstance(value, _SETTINGS):
            return
        if isinstance(value, (types.MethodType, staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, functools.partial):
            for argument in (*value.args, *value.keywords.values()):
                self._follow(argument, depth + 1)
            value = value.func
        if isinstance(value, functools._lru_cache_wrapper):
            self.caches[value] = None
            value = value.__wrapped__
        if isinstance(value, _Function):
            if not is_user_file(value.__code__.co_filename):
                self._library.add_function(value)
            elif value not in self.functions:
                self.functions[value] = None
                self._waiting.append(value)
            return
        kind = value if isinstance(value, type) else type(value)
        if is_user_class(kind):
            self.classes.update((one, None) for one in kind.__mro__ if is_user_class(one))
        else:
            self._library.add_class(kind)
        self._open(value, kind, depth)

    def _open(self, value: Any, kind: type, depth: int) -> None:
        if depth >= _DEPTH or id(value) in self._opened or isinstance(value, (torch.nn.Module, torch.Tensor, type)):
            return
        if isinstance(value, dict):
            inside: Any = value.values()
        elif isinstance(value, _CONTAINERS):
            inside = value
        else:
            inside = (attributes_of(value) or {}).values() if is_user_class(kind) else ()
        if 0 < len(inside) <= _MANY:
            self._opened.add(id(value))
            for item in list(inside):
                self._follow(item, depth + 1)

    def _read(self, function: _Function) -> None:
        """Take up what a function names: globals, variables around it, defaults, the Trainer's attributes."""
        code = function.__code__
        names = set(_names(code))
        if names & _BY_TEXT:
            names |= _texts(code)
        any_name = _computes_names(code)
        if any_name and "globals" in names:
            names |= {name for name in function.__globals__ if not name.startswith("__")}
        self._any_name |= any_name
        self._used |= names
        self._note_globals(function, names, any_name)
        self._note_own_variables(function, names)
        if self._trainer is not None:
            found = _trainer_names(code)
            if any_name and not names.isdisjoint(_TRAINER):
                found |= {name for name in vars(self._trainer) if not name.startswith("_")}
            for name in found - _FOLLOWED:
                self._trainer_attribute(name)

    def _note_globals(self, function: _Function, names: set[str], any_name: bool) -> None:
        where = function.__globals__.get("__name__", "?")
        for name in names:
            if name in function.__globals__ and name not in vars(builtins):
                self._note(Name(f"{where}.{name}", function.__globals__, name), names, any_name=any_name)
        for name in _imports(function.__code__) & sys.modules.keys():
            self._note(Name(name, sys.modules, name), names, any_name=any_name)

    def _note_own_variables(self, function: _Function, names: set[str]) -> None:
        """Variables of the functions around it, and defaults of its arguments that may change in place."""
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                self._note(Name(f"{name} (of {function.__qualname__})", Cell(cell), name), names, key=id(cell))
        for index, value in enumerate(function.__defaults__ or ()):
            if not isinstance(value, _SETTINGS):
                found = Name(f"a default of {function.__qualname__}", Defaults(function), str(index))
                self._note(found, names, key=id(function))
        for name, value in (function.__kwdefaults__ or {}).items():
            if not isinstance(value, _SETTINGS):
                self._note(Name(f"{name} (default of {function.__qualname__})", function.__kwdefaults__, name), names)

    def _note(self, name: Name, names: set[str], key: int | None = None, *, any_name: bool = False) -> None:
        place = (id(name.holder) if key is None else key, name.name)
        if place in self._known:
            return
        self._known.add(place)
        value = name.holder.get(name.name)
        if value is os and names & {"environ", "getenv"}:
            self.found.append(Name("os.environ", vars(os), "environ"))
        if isinstance(value, types.ModuleType):
            if is_user_file(getattr(value, "__file__", None) or "<frozen>"):  # a module of settings or of functions
                public = {one for one in vars(value) if any_name and not one.startswith("__")}
                for inner in (names & vars(value).keys()) | public:
                    self._note(Name(f"{value.__name__}.{inner}", vars(value), inner), names)
            else:
                self._library.add_module(value, names)
            return
        if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)) or value is self._trainer:
            return
        self._follow(value)
        self.found.append(name)

    def _class_attribute(self, kind: type, name: str) -> None:
        value = vars(kind)[name]
        for function in (value.fget, value.fset) if isinstance(value, property) else (value,):
            self._follow(function)
        if (id(kind), name) in self._known:
            return
        if isinstance(value, (property, staticmethod, classmethod, _Function)) or hasattr(type(value), "__get__"):
            self._known.add((id(kind), name))
            self.found.append(Name(f"{kind.__qualname__}.{name}", vars(kind), name, owner=kind))
            return
        if name.startswith("__"):
            return
        for one in self.classes:  # it may be set on a subclass
            if kind in one.__mro__ and (id(one), name) not in self._known:  # issubclass asks protocols, which refuse
                self._known.add((id(one), name))
                self.found.append(Name(f"{one.__qualname__}.{name}", vars(one), name, owner=one, optional=True))

    def _trainer_attribute(self, name: str) -> None:
        if (id(self._trainer), name) in self._known:
            return
        self._known.add((id(self._trainer), name))
        if name == "state":
            self.found += [Name(f"self.trainer.state.{part}", State(self._trainer), part, optional=True) for part in _STATE]
        elif isinstance(getattr(self._trainer, name, None), _SETTINGS):
            self.found.append(Name(f"self.trainer.{name}", Attributes(self._trainer), name, optional=True))


@functools.lru_cache(maxsize=1024)
def _operators(kind: type) -> frozenset[str]:
    """Methods that are called without their name: ``len(x)``, ``x[0]``, ``x + 1``. Those of modules are torch's to call."""
    if issubclass(kind, torch.nn.Module):
        return frozenset()
    methods = {name for name, value in vars(kind).items() if isinstance(value, _Function)}
    return frozenset(name for name in methods - _NOT_OPERATORS if name.startswith("__"))


@functools.lru_cache(maxsize=1024)
def _is_users_own(kind: type) -> bool:
    """Whether no library's code but ours computes with the attributes of its instances: a layer's may call a function in one."""
    libraries = [one for one in kind.__mro__ if not is_user_class(one) and one not in (torch.nn.Module, object)]
    return all(one.__module__.partition(".")[0] in ("torch_compat", "abc", "typing", "collections") for one in libraries)


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    """Names of globals and attributes in a function, and in those inside of it."""
    inner = [_names(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


@functools.lru_cache(maxsize=4096)
def _imports(code: types.CodeType) -> frozenset[str]:
    """Modules that a function, or one inside of it, imports itself."""
    inner = [_imports(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    own = [one.argval for one in dis.get_instructions(code) if one.opname == "IMPORT_NAME"]
    return frozenset(own).union(*inner)


@functools.lru_cache(maxsize=4096)
def _texts(code: types.CodeType) -> frozenset[str]:
    """Texts in a function, and in those inside of it, that may be names: ``getattr(settings, "alpha")``."""
    inner = [_texts(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return frozenset(const for const in code.co_consts if isinstance(const, str) and const.isidentifier()).union(*inner)


@functools.lru_cache(maxsize=4096)
def _computes_names(code: types.CodeType) -> bool:
    """Whether a function reads attributes or globals whose names are no constants of its code."""
    names = _names(code)
    if names & _OF_ANY_NAME:
        return True
    if "getattr" not in names:
        return False
    computed = _computed_lines(code.co_filename, len(linecache.getlines(code.co_filename)))
    return computed is None or any(code.co_firstlineno <= line <= _last_line(code) for line in computed)


def _last_line(code: types.CodeType) -> int:
    inner = [_last_line(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return max([code.co_firstlineno, *inner, *(line for *_, line in code.co_lines() if line is not None)])


@functools.lru_cache(maxsize=256)
def _looks(filename: str, length: int) -> frozenset[tuple[str, int]]:
    """``(name, line)`` of each use of an attribute or variable in a file that does more than to fill it."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)[:length]))
    except SyntaxError:
        return frozenset()
    above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load)]
    return frozenset(
        (node.attr if isinstance(node, ast.Attribute) else node.id, node.lineno) for node in used if not _fills(node, above)
    )


def _fills(node: ast.AST, above: Mapping[ast.AST, ast.AST]) -> bool:
    """Whether a statement does nothing with ``node`` but to put something into it, or into an entry of it."""
    parent = above[node]
    if isinstance(parent, ast.Subscript) and parent.value is node:
        stored = isinstance(parent.ctx, ast.Store) and not isinstance(above[parent], ast.AugAssign)
        return stored or (isinstance(parent.ctx, ast.Load) and _fills(parent, above))
    call = above.get(parent)
    if not isinstance(parent, ast.Attribute) or not isinstance(call, ast.Call) or call.func is not parent:
        return False
    if parent.attr == "setdefault":
        return _fills(call, above)
    return parent.attr in ("append", "extend", "add") and isinstance(above[call], ast.Expr)


@functools.lru_cache(maxsize=256)
def _computed_lines(filename: str, length: int) -> frozenset[int] | None:
    """Lines with a ``getattr`` whose name is no constant; None without a source. ``length``: of a file, which may grow."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)[:length]))
    except SyntaxError:
        return None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    named = [node for node in calls if ast.unparse(node.func) == "getattr"]
    computed = [node.lineno for node in named if len(node.args) < 2 or not isinstance(node.args[1], ast.Constant)]
    return frozenset(computed) if length else None


@functools.lru_cache(maxsize=4096)
def _trainer_names(code: types.CodeType) -> frozenset[str]:
    """Attributes that are read of ``self.trainer``, by a dot or with ``getattr`` and ``hasattr``."""
    return frozenset(_after_trainer(code)).union(
        *(_trainer_names(const) for const in code.co_consts if isinstance(const, types.CodeType))
    )


def _after_trainer(code: types.CodeType) -> Iterator[str]:
    after = False
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if after and isinstance(name, str) and instruction.opname.startswith("LOAD") and name.isidentifier():
            yield name
        after = instruction.opname.startswith("LOAD") and name in _TRAINER
