"""The functions that a step calls: they get notes, and what is around them is noted as they begin."""

from __future__ import annotations

import builtins
import functools
import importlib.util
import inspect
import linecache
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from torch_compat.step.guards.instrumented import Instrumented
from torch_compat.step.guards.locations import Entry, Function, Lookup, Variable, text_of
from torch_compat.step.guards.noted_places import NotedPlaces
from torch_compat.step.guards.one_shot_objects import note_cache
from torch_compat.step.guards.origins import (
    dunders,
    globals_of,
    imports_of,
    is_generated,
    is_library,
    is_made,
    is_noted,
    is_of_user,
    is_ours,
    is_pythons,
    is_third_party,
    names_of,
)
from torch_compat.step.guards.parameter_hooks import called_by_autograd
from torch_compat.step.guards.unseen_changes import change_of
from torch_compat.step.values.user_objects import is_user_class
from xlatrain.bridge.errors import is_user_file

_HELD = 100  # entries: more are data, and no functions
_NESTED = 3  # functions of Python's own library, called by one


_CALLED = ("forward", "__call__", "training_step", "validation_step", "test_step", "predict_step")
"""The methods of a module that code without notes calls: torch, and our loops."""


class FollowedFunctions:
    """The functions and classes that a step may call, as far as it is known.

    Args:
        places: that are noted of what is around a function.
        instrumented: the functions with notes.
        walk: notes all that is in a value.
    """

    def __init__(self, places: NotedPlaces, instrumented: Instrumented, walk: Callable[[Any], None]) -> None:
        self._places = places
        self._instrumented = instrumented
        self._walk = walk
        self._types: set[type] = set()
        self._entered: set[str] = set()
        self._closures: set[int] = set()  # that are being followed
        self._unseen_functions: set[types.FunctionType] = set()

    def follow_root(self, one: Any) -> None:
        """Follow what an object holds that code without notes may call: hooks, activations."""
        self.follow_class(type(one))
        for held in list(vars(one).values()):
            self.follow_held(held, 0)
        if isinstance(one, torch.nn.Module):
            for hook in called_by_autograd(one):
                self.follow_held(hook, 0)

    def follow_held(self, value: Any, depth: int) -> None:
        if isinstance(value, dict | list | tuple | set):
            if depth < 2 and 0 < len(value) <= _HELD:
                for one in value.values() if isinstance(value, dict) else value:
                    self.follow_held(one, depth + 1)
        elif not isinstance(value, torch.Tensor):
            self.follow(value)

    @property
    def ran(self) -> list[types.FunctionType]:
        """The functions that have run."""
        return [one for key in self._entered for one in self._instrumented.entered(key)]

    def enter(self, key: str) -> None:
        if key in self._entered:
            return
        self._entered.add(key)
        for function in self._instrumented.entered(key):
            self._entered_function(function)

    def _entered_function(self, function: types.FunctionType) -> None:
        name = f"{function.__module__}.{function.__qualname__}"
        # Its own code, not the one with notes that it has for now, is what a later look will find.
        self._places.note(Function(function, name), read=True)
        defaults = function.__kwdefaults__ or {}
        for key in defaults:
            self._places.note(Entry(defaults, key, f"{key} (a default of {name})"), read=True)
        for value in self._surroundings(function):
            self.follow_found(value)

    def _surroundings(self, function: types.FunctionType) -> Iterator[Any]:
        """Note the variables that a function's code names, outside of it; gives what is in them."""
        code = self._instrumented.functions.get(function, function.__code__)
        names, held = names_of(code), function.__globals__
        for name in names & held.keys() | globals_of(code) - builtins.__dict__.keys():
            self._places.name(Entry(held, name, f"{held.get('__name__', '?')}.{name}"))
            yield held.get(name)
        own = builtins.__dict__
        for name in (names - held.keys()) & own.keys():
            self._places.note(Entry(own, name, f"the builtin {name}"), read=True)
        for name, taken in imports_of(code):
            self._imports(name, taken, held)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            if name == "__class__":
                continue
            found = Variable(cell, f"{name} (of {function.__qualname__})")
            self._places.name(found)
            yield found.value()
        yield from function.__defaults__ or ()

    def _imports(self, name: str, taken: Collection[str], held: Mapping[str, Any]) -> None:
        """A function with these globals imports names from a module."""
        if name.startswith("."):
            name = importlib.util.resolve_name(name, held.get("__package__") or str(held.get("__name__")).rpartition(".")[0])
        module = sys.modules.get(name)
        if module is None:
            return
        self._places.note(Entry(sys.modules, name, f"the module {name}"), read=True)
        for one in taken:
            if one in vars(module):
                self._places.name(Entry(vars(module), one, f"{name}.{one}"))

    def unseen(self, function: types.FunctionType, depth: int = 0) -> None:
        """A function that gets no notes may read all that it names, and what is in there."""
        if function in self._unseen_functions:
            return
        self._unseen_functions.add(function)
        name = f"{function.__module__}.{function.__qualname__}"
        seen = function not in self._instrumented.without_source and linecache.getlines(function.__code__.co_filename)
        module = str(function.__module__)
        users = module == "__main__" or not (is_library(module) or is_third_party(module) or is_pythons(function))
        if not seen and users and (change := change_of(function.__code__)):
            self._instrumented.refuse(function, f"{name} has no source that could be read, and changes something ({change})")
        self._places.note(Function(function, name), read=True)
        names = names_of(function.__code__)
        for value in self._surroundings(function):
            if isinstance(value, types.ModuleType):
                if not is_library(value.__name__):
                    self._unseen_attributes(vars(value), value.__name__, names)
            elif type(value) is types.FunctionType and is_pythons(value) and depth < _NESTED:
                if value.__globals__ is function.__globals__:
                    self.unseen(value, depth + 1)
            else:
                self.follow(value)
                self._walk(value)
                if isinstance(value, types.FunctionType):
                    self._unseen_attributes(vars(value), value.__qualname__, names)
                elif isinstance(value, type):
                    self._unseen_of_class(value, names)

    def _unseen_attributes(self, held: dict[str, Any], holder: str, names: Collection[str]) -> None:
        for name in held.keys() & names:
            self._places.note(Entry(held, name, f"{holder}.{name}"), read=True)
            self._walk(held[name])

    def _unseen_of_class(self, kind: type, names: Collection[str]) -> None:
        for one in (*kind.__mro__, *inspect.getmro(type(kind))):
            held: dict[str, Any] = dict(one.__dict__) if is_user_class(one) else {}
            for name in held.keys() & names:
                self._places.note(Lookup(one, name, text_of(one, name)), read=True)
                self._walk(held[name])

    def replaceable(self, function: types.FunctionType) -> None:
        """A function of a library, which has no notes: the functions that it calls may be replaced, not what these call."""
        if function in self._unseen_functions:
            return
        self._unseen_functions.add(function)
        names, waiting = names_of(function.__code__), [function.__globals__]
        for held in waiting:
            for name in names & held.keys():
                value = held[name]
                if isinstance(value, types.ModuleType) and not any(vars(value) is one for one in waiting):
                    waiting.append(vars(value))
                elif callable(value):
                    self._places.note(Entry(held, name, f"{held.get('__name__', '?')}.{name}"), read=True)

    def follow(self, value: Any) -> bool:
        """Functions of the user's get notes."""
        if isinstance(value, property):
            found = [self.follow(one) for one in (value.fget, value.fset) if one is not None]
            return any(found)
        if isinstance(value, staticmethod | classmethod | types.MethodType):
            value = value.__func__
        if isinstance(value, functools.partial):
            found = [self.follow(one) for one in (value.func, *value.args, *value.keywords.values())]
            return any(found)
        if isinstance(value, functools.cached_property):
            value = value.func
        if isinstance(value, functools._lru_cache_wrapper):
            if is_noted(value.__wrapped__):
                note_cache(value)
            value = value.__wrapped__
        if isinstance(value, type):
            self.follow_class(value)
        elif type(value) is types.FunctionType:
            return self._follow_function(value)
        elif is_user_class(type(value)):
            self.follow_class(type(value))
        return False

    def follow_found(self, value: Any) -> None:
        """Follow what code without notes may call, if it is of the user's own. Other functions get notes when they are called."""
        if isinstance(value, types.FunctionType):
            if is_user_file(value.__code__.co_filename):
                self._follow_function(value)
        elif not isinstance(value, type) or is_user_class(value) or is_of_user(value):
            self.follow(value)

    def _follow_closure(self, function: types.FunctionType) -> None:
        if id(function) in self._closures:  # which may call itself by a name of its own closure
            return
        self._closures.add(id(function))
        for cell in function.__closure__ or ():
            self.follow(Variable(cell, "").value())
        self._closures.discard(id(function))

    def _follow_function(self, function: types.FunctionType) -> bool:
        """A function gets notes; whether it has some now."""
        file = function.__code__.co_filename
        if is_noted(function):
            known = function in self._instrumented.functions or function in self._instrumented.without_source
            noted = self._instrumented.add(function)
            if not known:
                if not noted:
                    self.unseen(function)
                elif self._instrumented.key_of(function) in self._entered:
                    self._entered_function(function)
                self._follow_closure(function)
            return noted
        if is_generated(file) and not is_ours(function):
            self.unseen(function)
        elif (inner := getattr(function, "__wrapped__", None)) is not None:
            self.follow(inner)
        return False

    def follow_class(self, kind: type) -> None:
        if kind in self._types:
            return
        self._types.add(kind)
        of_torch = issubclass(kind, torch.nn.Module)  # whose operators are torch's to call
        for one in kind.__mro__:
            if is_user_class(one) or (one.__module__ in sys.modules and is_of_user(one)) or is_made(one):
                for name, value in list(vars(one).items()):
                    self.follow(value)
                    if type(value) is types.FunctionType and (name == "forward" if of_torch else name.startswith("__")):
                        self._places.note(Lookup(kind, name, text_of(kind, name)), read=True)
            elif is_third_party(one.__module__):
                for name in _CALLED if of_torch else dunders(one):
                    if name in vars(one):
                        self._places.note(Lookup(kind, name, text_of(kind, name)), read=True)
                        self.follow(vars(one)[name])
            elif of_torch and type(forward := vars(one).get("forward")) is types.FunctionType:
                self._places.note(Lookup(kind, "forward", text_of(kind, "forward")), read=True)
                self.replaceable(forward)
