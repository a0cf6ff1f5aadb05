"""The names that a step's code uses, and where Python finds them: looked up without running it."""

from __future__ import annotations

import builtins
import dis
import functools
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torch_compat.functional.effects import _is_user_class as is_user_class
from xlatrain.bridge.errors import is_user_file

_Function = types.FunctionType
_TRAINER = ("trainer", "_trainer")
_STATE = ("stage", "fn")
_FOLLOWED = frozenset({"current_epoch", "global_step", "is_last_batch", "estimated_stepping_batches"})
"""Of the Trainer: counters that a captured step knows as its inputs, and what never changes."""
_SETTINGS = (bool, int, float, str, type(None))

MISSING: Any = object()
"""In place of a value that is not there."""


@dataclass(frozen=True, eq=False)
class Name:
    """A name and where it is looked up.

    Attributes:
        text: as a user knows it.
        holder: a mapping with ``get``: a module's globals, a class's attributes, a closure's cell.
        name: key in it.
        owner: whose attribute it is, if it is not one of ``holder`` itself.
        optional: whether it counts too while there is none, e.g. on a subclass.
    """

    text: str
    holder: Any
    name: str
    owner: Any = None
    optional: bool = False

    def assign(self, value: Any) -> None:
        """Give it a value; :data:`MISSING` deletes it."""
        if self.owner is None:
            self.holder[self.name] = value
        elif value is MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


class _Cell:
    """A variable of an enclosing function."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:
            return default

    def __setitem__(self, name: str, value: Any) -> None:
        self._cell.cell_contents = value


@dataclass(frozen=True)
class _Attributes:
    """Those of an object, properties too."""

    owner: Any

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self.owner, name, default)


@dataclass(frozen=True)
class _State:
    """The attributes of a Trainer's ``state``, which may be another object each time."""

    trainer: Any

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self.trainer.state, name, default)


def names_of(step: str, module: torch.nn.Module, roots: Mapping[str, Any]) -> list[Name]:
    """All names outside of modules and other roots that code of the user's may read when ``module``'s method ``step`` runs."""
    search = _Search(module, roots)
    search.run(step)
    return search.found


class _Search:
    def __init__(self, module: torch.nn.Module, roots: Mapping[str, Any]) -> None:
        self._trainer = module.__dict__.get("_trainer")
        owners = [*module.modules(), *roots.values()]
        self._classes = {kind: None for owner in owners for kind in type(owner).__mro__ if is_user_class(kind)}
        self._held = [value for owner in owners for value in list(vars(owner).values()) if not isinstance(value, torch.Tensor)]
        self.found: list[Name] = []
        self._known: set[tuple[int, str]] = set()
        self._used: set[str] = set()
        self._functions: dict[_Function, None] = {}
        self._waiting: list[_Function] = []

    def run(self, step: str) -> None:
        self._used |= {step, "forward", "__call__"}
        for value in self._held:
            self._follow(value)
        before = -1
        while before != len(self._functions) or self._waiting:
            before = len(self._functions)
            while self._waiting:
                self._read(self._waiting.pop())
            for kind in list(self._classes):
                for name in self._used & vars(kind).keys():
                    self._class_attribute(kind, name)

    def _follow(self, value: Any) -> None:
        """A value that the step may call, or whose methods it may call."""
        if isinstance(value, (types.MethodType, staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, functools.partial):
            value = value.func
        if isinstance(value, functools._lru_cache_wrapper):
            value = value.__wrapped__
        if isinstance(value, _Function):
            if value not in self._functions and is_user_file(value.__code__.co_filename):
                self._functions[value] = None
                self._waiting.append(value)
            return
        kind = value if isinstance(value, type) else type(value)
        if is_user_class(kind):
            self._classes.update((one, None) for one in kind.__mro__ if is_user_class(one))

    def _read(self, function: _Function) -> None:
        names = set(_names(function.__code__))
        self._used |= names
        where = function.__globals__.get("__name__", "?")
        for name in names:
            if name in function.__globals__ and name not in vars(builtins):
                self._note(Name(f"{where}.{name}", function.__globals__, name), names)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                self._note(Name(f"{name} (of {function.__qualname__})", _Cell(cell), name), names, key=id(cell))
        if self._trainer is not None:
            for name in _trainer_names(function.__code__) - _FOLLOWED:
                self._trainer_attribute(name)

    def _note(self, name: Name, names: set[str], key: int | None = None) -> None:
        place = (id(name.holder) if key is None else key, name.name)
        if place in self._known:
            return
        self._known.add(place)
        value = name.holder.get(name.name)
        if isinstance(value, types.ModuleType):
            if is_user_file(getattr(value, "__file__", None) or "<frozen>"):  # a module of settings or of functions
                for inner in names & vars(value).keys():
                    self._note(Name(f"{value.__name__}.{inner}", vars(value), inner), names)
            return
        if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)) or value is self._trainer:
            return
        self._follow(value)
        self.found.append(name)

    def _class_attribute(self, kind: type, name: str) -> None:
        value = vars(kind)[name]
        for function in (value.fget, value.fset) if isinstance(value, property) else (value,):
            self._follow(function)
        callable_one = isinstance(value, (property, staticmethod, classmethod, _Function)) or hasattr(type(value), "__get__")
        if callable_one or name.startswith("__") or (id(kind), name) in self._known:
            return
        for one in self._classes:  # it may be set on a subclass
            if issubclass(one, kind) and (id(one), name) not in self._known:
                self._known.add((id(one), name))
                self.found.append(Name(f"{one.__qualname__}.{name}", vars(one), name, owner=one, optional=True))

    def _trainer_attribute(self, name: str) -> None:
        if (id(self._trainer), name) in self._known:
            return
        self._known.add((id(self._trainer), name))
        if name == "state":
            self.found += [Name(f"self.trainer.state.{part}", _State(self._trainer), part, optional=True) for part in _STATE]
        elif isinstance(getattr(self._trainer, name, None), _SETTINGS):
            self.found.append(Name(f"self.trainer.{name}", _Attributes(self._trainer), name, optional=True))


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    """Names of globals and attributes in a function, and in those inside of it."""
    inner = [_names(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


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
