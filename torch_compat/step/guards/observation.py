"""The reads of the host by one run of a step's Python, noted as they happen."""

from __future__ import annotations

import abc
import builtins
import contextlib
import enum
import functools
import importlib.util
import io
import operator
import os
import sys
import traceback
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from torch_compat.step.effects.recorded_object import RecordedObject
from torch_compat.step.guards.instrumented import Instrumented
from torch_compat.step.guards.known_functions import (
    ASKS_ATTRIBUTE,
    ASKS_NOTHING,
    CHANGES,
    FILLS,
    IS_AMBIENT,
    NO_STATE,
    OF_FILES,
    OF_FRAMES,
    ONLY_FILLS,
    READS_FILES,
    SETS_ATTRIBUTE,
    TAKES_DATA,
    VALUES,
    is_plain,
    is_setting,
)
from torch_compat.step.guards.locations import (
    LARGE,
    Ambient,
    Attribute,
    Contents,
    Entry,
    File,
    Function,
    Item,
    Key,
    Kind,
    Large,
    Location,
    Lookup,
    Member,
    Opaque,
    Result,
    Values,
    Variable,
    entries_of,
    static_lookup,
)
from torch_compat.step.guards.noted_places import OF_THE_STEP, Change, NotedPlaces
from torch_compat.step.guards.one_shot_objects import is_consumed, keep_cached, note_cache, refuse
from torch_compat.step.guards.origins import (
    dunders,
    globals_of,
    imports_of,
    is_generated,
    is_heap_type,
    is_house,
    is_in_python,
    is_library,
    is_made,
    is_noted,
    is_of_user,
    is_ours,
    is_pythons,
    is_third_party,
    names_of,
    texts_of,
)
from torch_compat.step.guards.parameter_hooks import called_by_autograd
from torch_compat.step.host.host_future import as_float
from torch_compat.step.host.scalars import HostScalar
from torch_compat.step.values.marks import has_contents, inside, slots
from torch_compat.step.values.names import MISSING
from torch_compat.step.values.user_objects import attributes_of, is_user_class
from xlatrain.bridge.capture.stand_ins import class_of, stood_for
from xlatrain.bridge.errors import is_user_file, user_line

_DEPTH = 6
_HELD = 100  # entries: more are data, and no functions
_WIDEST = 2000  # objects below one that is read as a whole
_TRANSPARENT = frozenset({*VALUES, *OF_THE_STEP})
_OPAQUE = (
    *(torch.nn.Module, torch.Tensor, torch.optim.Optimizer, torch.utils.data.Dataset, torch.utils.data.DataLoader),
    *(type, types.FunctionType, types.MethodType, types.ModuleType, types.BuiltinFunctionType, types.CodeType, io.IOBase),
)
_OF_A_CALL = torch.autograd.function.FunctionCtx
"""Made by each call of a Function. The graph holds it as long as a tensor is there that the call made, so a note of one would."""
_TENSOR_ATTRIBUTES = frozenset({"grad", "shape", "requires_grad", "size", "numel", "dim", "ndim", "dtype", "is_leaf"})
_TENSOR_VALUES = frozenset({"item", "tolist", "numpy", "__float__", "__int__", "__bool__", "all", "any", "equal"})
_FOLLOWED = frozenset({"current_epoch", "global_step", "is_last_batch", "estimated_stepping_batches", "__dict__", "__class__"})
_PATHS = 4096  # characters
_NESTED = 3  # functions of Python's own library, called by one
_HOOKS_OF_ALL = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")
_TAKES_FILES = {"load", "loadtxt", "genfromtxt", "fromfile"}
_CONTAINERS = (dict, list, tuple, set, deque, np.ndarray)
_CONTAINS = (dict.__contains__, set.__contains__, frozenset.__contains__)


class Observation:
    """Told about reads by code with notes; see :class:`~torch_compat.step.guards.instrumented.Observer`.

    Args:
        functions: that the step calls, besides its method; those that it is seen to call are added.
        roots: objects whose attributes are followed where they are read (modules of the tree).
        method: the name of the method that is run.
        kept_changes: the places that earlier runs of the step have changed in installed packages, which is added to.
    """

    def __init__(
        self,
        functions: Iterable[Any],
        roots: Collection[Any],
        kept_changes: dict[Key, Location] | None = None,
        method: str = "",
    ) -> None:
        self._owned = set(map(id, roots))
        self._places = NotedPlaces(kept_changes)
        self._walked: dict[int, Any] = {}
        self._filled: dict[int, str] = {}  # texts alone: whether the step made a holder is seen by who else holds it
        self._types: set[type] = set()
        self._entered: set[str] = set()
        self._traced_caches: set[Any] = set()
        self.of_library = False
        self._classes_seen: set[int] = set()
        self._unseen_functions: set[types.FunctionType] = set()
        self._one_shots: dict[int, str] = {}  # iterators and mocks that names lead to
        self.instrumented = Instrumented(self)
        for function in functions:
            self._follow(function)
        for one in roots:
            self._follow_root(one)
            if method and static_lookup(kind := type(one), method) is not MISSING and is_user_class(kind):
                self._note(Lookup(kind, method, self._text(kind, method)), read=True)
        for name in _HOOKS_OF_ALL:
            for hook in vars(torch.nn.modules.module)[name].values():
                self._follow_held(hook, 0)

    def _follow_root(self, one: Any) -> None:
        """Follow what an object holds that code without notes may call: hooks, activations."""
        self._follow_class(type(one))
        for held in list(vars(one).values()):
            self._follow_held(held, 0)
        if isinstance(one, torch.nn.Module):
            for hook in called_by_autograd(one):
                self._follow_held(hook, 0)

    def _follow_held(self, value: Any, depth: int) -> None:
        if isinstance(value, dict | list | tuple | set):
            if depth < 2 and 0 < len(value) <= _HELD:
                for one in value.values() if isinstance(value, dict) else value:
                    self._follow_held(one, depth + 1)
        elif not isinstance(value, torch.Tensor):
            self._follow(value)

    @property
    def functions(self) -> list[types.FunctionType]:
        """The functions that have run."""
        return [one for key in self._entered for one in self.instrumented.entered(key)]

    # -- what code with notes tells ---------------------------------------------------------------------------------------

    def enter(self, key: str) -> None:
        if key in self._entered:
            return
        self._entered.add(key)
        for function in self.instrumented.entered(key):
            self._entered_function(function)

    def _entered_function(self, function: types.FunctionType) -> None:
        name = f"{function.__module__}.{function.__qualname__}"
        # Its own code, not the one with notes that it has for now, is what a later look will find.
        self._note(Function(function, name), read=True)
        defaults = function.__kwdefaults__ or {}
        for key in defaults:
            self._note(Entry(defaults, key, f"{key} (a default of {name})"), read=True)
        for value in self._surroundings(function):
            self._follow_found(value)

    def _surroundings(self, function: types.FunctionType) -> Iterator[Any]:
        """Note the variables that a function's code names, outside of it; gives what is in them."""
        code = self.instrumented.functions.get(function, function.__code__)
        names, held = names_of(code), function.__globals__
        for name in names & held.keys() | globals_of(code) - builtins.__dict__.keys():
            self._name(Entry(held, name, f"{held.get('__name__', '?')}.{name}"))
            yield held.get(name)
        own = builtins.__dict__
        for name in (names - held.keys()) & own.keys():
            self._note(Entry(own, name, f"the builtin {name}"), read=True)
        for name, taken in imports_of(code):
            self._imports(name, taken, held)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            if name == "__class__":
                continue
            found = Variable(cell, f"{name} (of {function.__qualname__})")
            self._name(found)
            yield found.value()
        yield from function.__defaults__ or ()

    def _imports(self, name: str, taken: Collection[str], held: Mapping[str, Any]) -> None:
        """A function with these globals imports names from a module."""
        if name.startswith("."):
            name = importlib.util.resolve_name(name, held.get("__package__") or str(held.get("__name__")).rpartition(".")[0])
        module = sys.modules.get(name)
        if module is None:
            return
        self._note(Entry(sys.modules, name, f"the module {name}"), read=True)
        for one in taken:
            if one in vars(module):
                self._name(Entry(vars(module), one, f"{name}.{one}"))

    def _name(self, found: Entry | Variable | Lookup) -> None:
        """Note a place that a name leads to."""
        self._note(found, read=True)
        value = found.value()
        if is_consumed(value):
            self._one_shots[id(value)] = found.text

    def _unseen(self, function: types.FunctionType, depth: int = 0) -> None:
        """A function that gets no notes may read all that it names, and what is in there."""
        if function in self._unseen_functions:
            return
        self._unseen_functions.add(function)
        self._note(Function(function, f"{function.__module__}.{function.__qualname__}"), read=True)
        names = names_of(function.__code__)
        for value in self._surroundings(function):
            if isinstance(value, types.ModuleType):
                if not is_library(value.__name__):
                    for name in names & vars(value).keys():
                        self._note(Entry(vars(value), name, f"{value.__name__}.{name}"), read=True)
            elif type(value) is types.FunctionType and is_pythons(value) and depth < _NESTED:
                if value.__globals__ is function.__globals__:
                    self._unseen(value, depth + 1)
            else:
                self._follow(value)
                self._walk(value, 0)

    def attribute(self, owner: Any, name: str) -> None:
        kind = type(owner)
        if kind in _TRANSPARENT or name in _FOLLOWED:
            self._attribute_of_a_parameter(owner, name)
            if isinstance(owner, torch.Tensor):
                self._note(Lookup(torch.Tensor, name, f"torch.Tensor.{name}"), read=True)
            return
        self._refuse_one_shot(owner)
        if kind is RecordedObject:
            owner = owner.stands_for()
            kind = type(owner)
        if isinstance(owner, torch.optim.Optimizer) and name in ("param_groups", "state", "step"):
            return  # stand-ins
        if isinstance(owner, types.ModuleType):
            self._variable(owner, name)
        elif isinstance(owner, type):
            self._class_attribute(owner, name)
        elif isinstance(owner, torch.Tensor):
            self._tensor_attribute(owner, name)
        elif id(owner) in self._owned:
            self._follow_class(kind)
            self._of_class(owner, name)
        elif kind is super:
            self._of_base(owner, name)
        else:
            self._object_attribute(owner, kind, name)

    def entry(self, holder: Any, key: Any) -> None:
        kind = type(holder)
        if kind in _TRANSPARENT or kind is RecordedObject or isinstance(holder, _OPAQUE):
            self._follow_class(kind)
            if isinstance(holder, type):
                self._follow_class(holder)
            return
        if isinstance(holder, dict) and type(key) in (str, int, float, bool, tuple):
            if kind.__getitem__ is dict.__getitem__ and (key in holder or not hasattr(kind, "__missing__")):
                self._note(Entry(holder, key, f"an entry {key!r} of a {kind.__name__}"), read=True)
                return
        elif isinstance(holder, list) and type(key) is int and kind.__getitem__ is list.__getitem__:
            self._note(Item(holder, key, f"entry {key} of a {kind.__name__}"), read=True)
            return
        elif type(holder) is tuple:
            return
        self.value(holder)

    def value(self, value: Any) -> None:
        self._walk(value, 0)

    def member(self, item: Any, holder: Any) -> None:
        kind = type(holder)
        if kind in _TRANSPARENT or kind is RecordedObject:
            return
        known = isinstance(holder, dict | set | frozenset) and kind.__contains__ in _CONTAINS
        if known and (type(item) in VALUES or isinstance(item, enum.Enum)):
            self._note(Member(holder, item, f"whether {item!r} is in a {kind.__name__}"), read=True)
            return
        self.value(holder)
        self.value(item)

    def stores(self, owner: Any, name: str) -> None:
        if (original := stood_for(owner)) is not None and not hasattr(torch.Tensor, name):
            self._note(Opaque(original, f"{name} of a parameter"), read=False)
        if type(owner) in _TRANSPARENT or id(owner) in self._owned or isinstance(owner, (torch.Tensor, _OF_A_CALL)):
            return
        held = attributes_of(owner) if not isinstance(owner, type) else None
        if isinstance(held, dict):
            self._places.has_attributes(owner, held)
            self._note(Entry(held, name, self._text(owner, name)), read=False)
        elif not isinstance(owner, type) and hasattr(static_lookup(type(owner), name), "__set__"):  # a slot, or memory of C's
            self._note(Attribute(owner, name, self._text(owner, name)), read=False)
        else:
            self._note(Lookup(owner, name, self._text(owner, name)), read=False)

    def fills(self, holder: Any) -> None:
        if type(holder) not in _TRANSPARENT and not isinstance(holder, _OPAQUE):
            if id(holder) not in self._filled:  # a line takes longer to find than a place
                where = user_line(traceback.extract_stack()) or "the step"
                self._filled[id(holder)] = f"the contents of a {type(holder).__name__} ({where})"
            text = self._filled[id(holder)]
            self._note(Contents(holder, text) if self._is_small(holder) else Large(holder, text, whole=False), read=False)
            if not has_contents(type(holder)) and not is_user_class(type(holder)):  # Python's own keep theirs in an attribute
                for one in inside(holder):
                    if has_contents(type(one)):
                        self.fills(one)

    def call(self, function: Any) -> Any:
        kind = type(function)
        self._refuse_one_shot(function)
        if kind is types.FunctionType:
            return self._called(function, None)
        if kind is types.MethodType:
            inner, owner = function.__func__, function.__self__
            self._follow_class(type(owner))
            in_python = type(inner) is types.FunctionType
            return self._called(inner, owner, function) if in_python else self._method_in_c(function, owner)
        if function is type:
            return _class_of
        if function is isinstance or function is issubclass:
            return self._asking_class(function)
        if function is float:
            return as_float
        if isinstance(function, torch.nn.Module):
            self._follow_class(kind)
            return function
        if id(function) in ASKS_NOTHING or kind in _TRANSPARENT:
            return function
        if isinstance(function, type):
            self._follow_class(function)
            self._follow_class(type(function))
            return function if is_user_class(function) or is_library(function.__module__) else self._wrapped(function)
        if is_user_class(kind):
            self._follow_class(kind)
            return function
        if isinstance(function, functools._lru_cache_wrapper):
            return self._cached(function)
        owner = getattr(function, "__self__", None)
        if owner is not None and not isinstance(owner, types.ModuleType):
            return self._method_in_c(function, owner)
        return self._function_in_c(function)

    def _function_in_c(self, function: Any) -> Any:
        if id(function) in IS_AMBIENT:
            self._note(Ambient(function, f"{function.__module__}.{function.__name__}()"), read=True)
            return function
        if getattr(function, "__name__", "") in READS_FILES and function.__module__ in OF_FILES:
            return self._reading(function, None)
        module = getattr(function, "__module__", None) or ""
        if is_setting(module, function):
            return self._asking_setting(function)
        if module.partition(".")[0] == "numpy" or getattr(function, "__name__", "") in TAKES_DATA:
            return self._wrapped(function)
        if module.lstrip("_") in OF_FRAMES:
            return function
        if is_library(module):
            return self._taking(function)
        self._follow(function)
        self.value(function)
        return self._wrapped(function)

    # -- attributes -------------------------------------------------------------------------------------------------------

    def _variable(self, owner: types.ModuleType, name: str) -> None:
        held = vars(owner)
        text = f"{owner.__name__}.{name}"
        if name in held:
            self._name(Entry(held, name, text))
        elif is_plain(getattr(owner, name, None)):
            self._note(Attribute(owner, name, text), read=True)

    def _class_attribute(self, owner: type, name: str) -> None:
        self._follow_class(owner)
        self._follow_class(type(owner))
        self._name(Lookup(owner, name, self._text(owner, name)))

    def _of_base(self, owner: Any, name: str) -> None:
        """``super().name``."""
        order = owner.__self_class__.__mro__
        for kind in order[order.index(owner.__thisclass__) + 1 :]:
            if name in kind.__dict__:
                self._note(Lookup(kind, name, self._text(kind, name)), read=True)
                return

    def _tensor_attribute(self, owner: torch.Tensor, name: str) -> None:
        self._note(Lookup(torch.Tensor, name, f"torch.Tensor.{name}"), read=True)
        if isinstance(owner, OF_THE_STEP) or getattr(owner, "_live", None) is not None:
            return
        if name in _TENSOR_VALUES:
            self._values(owner)
        elif name in _TENSOR_ATTRIBUTES:
            asked = name if name in ("requires_grad", "dtype", "is_leaf", "grad") else "shape"
            self._note(Attribute(owner, asked, f"the {asked} of a tensor"), read=True)
        else:
            held: Any = vars(owner)
            if name in held:
                self._note(Entry(held, name, f"{name} of a tensor"), read=True)

    def _attribute_of_a_parameter(self, owner: Any, name: str) -> None:
        """Note an attribute that user code has set on a parameter, where ``owner`` is what stands for it and has it too."""
        original = stood_for(owner)
        if original is None or hasattr(torch.Tensor, name):
            return
        held, text = vars(original), f"{name} of a parameter"
        self._note(Entry(held, name, text) if name in held else Member(held, name, text), read=True)

    def _values(self, owner: torch.Tensor) -> None:
        """A tensor of the host's is asked for its values; those of parameters, and of the step, are looked after elsewhere."""
        plain = type(owner) is torch.Tensor and getattr(owner, "_live", None) is None and not owner.is_meta
        if not plain or owner.layout != torch.strided:
            return
        with contextlib.suppress(RuntimeError):  # one of a function that is mapped or differentiated has no memory
            self._note(Values(owner, "the values of a tensor"), read=True)

    def _of_class(self, owner: Any, name: str) -> None:
        """An attribute of a module of the tree that is one of its class's, if at all."""
        held = object.__getattribute__(owner, "__dict__")
        if name in held:
            self._follow(held[name])
        if name in held or any(name in held.get(part, ()) for part in ("_parameters", "_buffers", "_modules")):
            return
        self._note(Lookup(type(owner), name, self._text(owner, name)), read=True)

    def _follow_descriptor(self, found: Any) -> None:
        if hasattr(type(found), "__get__"):
            self._follow_class(type(found))

    def _object_attribute(self, owner: Any, kind: type, name: str) -> None:
        self._follow_class(kind)
        if isinstance(owner, _OF_A_CALL):
            return
        text = self._text(owner, name)
        if id(owner) not in self._classes_seen and (is_user_class(kind) or is_third_party(kind.__module__)):
            self._classes_seen.add(id(owner))
            self._note(Kind(owner, f"the class of a {kind.__qualname__}"), read=True)
        if isinstance(owner, np.random.BitGenerator) and name == "state":
            self._note(Result(getattr, (owner, name), text), read=True)
            return
        held = attributes_of(owner)
        found = next((one.__dict__[name] for one in kind.__mro__ if name in one.__dict__), MISSING)
        if held is not None:
            self._places.has_attributes(owner, held)
        if found is not MISSING and is_heap_type(kind):
            self._note(Lookup(kind, name, text), read=True)
        if isinstance(found, property):
            if held is not None and (kept := f"_{name}") in held and is_library(kind.__module__):
                self._note(Entry(held, kept, text), read=True)
            if not self._follow(found) and is_plain(getattr(owner, name, None)):
                self._note(Attribute(owner, name, text), read=True)
        elif hasattr(type(found), "__set__"):
            if is_plain(getattr(owner, name, None)) or name in slots(kind):
                self._note(Attribute(owner, name, text), read=True)
        elif found is MISSING and isinstance(owner, dict) and name in owner:  # hparams.rate is hparams["rate"]
            self._note(Entry(owner, name, text), read=True)
        elif held is not None:
            self._note(Entry(held, name, text), read=True)

    @staticmethod
    def _text(owner: Any, name: str) -> str:
        named = isinstance(owner, type | types.FunctionType)
        return f"{owner.__qualname__ if named else type(owner).__qualname__}.{name}"

    # -- contents ---------------------------------------------------------------------------------------------------------

    def _walk(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in _TRANSPARENT or kind is RecordedObject or id(value) in self._walked:
            return
        if value is builtins.__dict__:  # in the globals of every module; a capture replaces some of them
            return
        self._refuse_one_shot(value)
        if id(value) in self._places.iterators:
            refuse(self._places.iterators[id(value)])
        if isinstance(value, types.FunctionType | types.MethodType | type | functools.partial):
            self._follow(value)
        if isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
            if not isinstance(value.__self__, types.ModuleType | type):
                self._walk(value.__self__, depth + 1)
        elif isinstance(value, torch.Tensor):
            self._values(value)
        elif isinstance(value, (*_OPAQUE, enum.Enum)) and not issubclass(kind, io.StringIO | io.BytesIO):
            self._follow_class(kind)
        else:
            self._walk_contents(value, kind, depth)

    def _walk_contents(self, value: Any, kind: type, depth: int) -> None:
        if not is_user_class(kind) and is_library(kind.__module__) and not issubclass(kind, np.ndarray):
            self._follow_class(kind)
            return
        held = attributes_of(value)
        if not has_contents(kind) and held is None and not slots(kind):
            self._follow_class(kind)
            return
        self._walked[id(value)] = value
        whole = value if isinstance(value, _CONTAINERS) else held
        if whole is not None and (not self._is_small(value) or depth > _DEPTH or len(self._walked) > _WIDEST):
            self._note(Large(whole, f"the contents of a {kind.__name__}"), read=True)
            return
        self._follow_class(kind)
        if kind is not tuple and kind is not frozenset:
            self._note(Contents(value, f"the contents of a {kind.__name__}"), read=True)
        if held is not None:
            self._places.has_attributes(value, held)
        for one in inside(value):
            self._places.leads(("contents", id(value), None), one)
            self._walk(one, depth + 1)

    @staticmethod
    def _is_small(value: Any) -> bool:
        return not isinstance(value, _CONTAINERS) or entries_of(value) <= LARGE

    def _refuse_one_shot(self, value: Any) -> None:
        if id(value) in self._one_shots:
            refuse(self._one_shots[id(value)])

    # -- calls ------------------------------------------------------------------------------------------------------------

    def _called(self, function: types.FunctionType, owner: Any, method: Any = None) -> Any:
        """A function in Python, maybe a method of ``owner``."""
        called = function if method is None else method
        if function.__name__ in READS_FILES and function.__module__ in OF_FILES:
            return self._reading(called, owner)
        if self._follow(function):
            return called
        module = str(function.__globals__.get("__name__", ""))
        if id(function) in IS_AMBIENT:
            self._note(Ambient(function, f"{module}.{function.__name__}()"), read=True)
        if owner is None and is_setting(module, function):
            return self._asking_setting(called)
        if function in self.instrumented.without_source or is_generated(function.__code__.co_filename):
            return self._called_unseen(called, function, owner)
        if is_library(module) and not is_house(module):
            self._replaceable(function)
        if is_library(module) and function.__name__ in _TAKES_FILES | TAKES_DATA:
            return self._wrapped(called)
        if module.partition(".")[0] in OF_FRAMES:
            if module == "logging":
                self.value(owner)
            return called
        if is_house(module):  # what records the calls of a function of Python looks who calls it
            return self._taking(called) if is_library(function.__module__ or "") and not is_house(function.__module__) else called
        if is_library(module):
            return self._taking(called)
        with self._as_library():
            self._unseen(function)
        if owner is not None:
            self.value(owner)
        return self._wrapped(called)

    def _replaceable(self, function: types.FunctionType) -> None:
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
                    self._note(Entry(held, name, f"{held.get('__name__', '?')}.{name}"), read=True)

    @contextlib.contextmanager
    def _as_library(self) -> Iterator[None]:
        before, self.of_library = self.of_library, True
        try:
            yield
        finally:
            self.of_library = before

    def _called_unseen(self, called: Any, function: types.FunctionType, owner: Any) -> Callable[..., Any]:
        """A function without source: it may read any attribute that it names of what it gets, and all that is in there."""
        names = names_of(function.__code__) | {one for one in texts_of(function.__code__) if one.isidentifier()}

        def note(*args: Any, **kwargs: Any) -> None:
            for one in ((owner,) if owner is not None else ()) + args + tuple(kwargs.values()):
                self._may_read(one, names)

        return self._noting(called, note)

    def _may_read(self, one: Any, names: Iterable[str]) -> None:
        """Code that nobody sees may read any attribute of these names, and all that is in an object."""
        kind = type(one)
        if kind in _TRANSPARENT:
            return
        of_class = not isinstance(one, type | types.ModuleType | torch.Tensor)
        for name in names:
            self.attribute(one, name)
            if of_class and static_lookup(kind, name) is not MISSING:
                self.attribute(kind, name)
        self._follow(one)
        self._walk(one, 0)

    def source(self, source: Any, names: dict[str, Any], variables: Mapping[str, Any]) -> None:
        """``eval`` and ``exec`` run code that nobody sees, with the variables around it."""
        if not isinstance(names, dict) or not isinstance(variables, Mapping):
            return  # as the call itself will say
        try:
            code = source if isinstance(source, types.CodeType) else compile(_statements(source), "<source>", "exec")
        except (SyntaxError, TypeError, ValueError):
            return  # as the call itself will say
        wanted = names_of(code) | {one for one in texts_of(code) if one.isidentifier()}
        for name in wanted & names.keys():
            if not isinstance(names[name], types.ModuleType):
                self._note(Entry(names, name, f"{names.get('__name__', '?')}.{name}"), read=True)
            self._may_read(names[name], wanted)
        for name in wanted & variables.keys():
            if isinstance(variables, dict):
                self._note(Entry(variables, name, f"the variable {name}"), read=True)
            self._may_read(variables[name], wanted)

    def _noting(self, function: Any, note: Callable[..., None]) -> Callable[..., Any]:
        """``function`` with ``note`` before each call, which gets what it gets."""
        of_library = self.of_library

        def called(*args: Any, **kwargs: Any) -> Any:
            with self.instrumented.silent():
                self.of_library = of_library
                note(*args, **kwargs)
            return function(*args, **kwargs)

        return called

    def _asking_class(self, function: Any) -> Callable[..., Any]:
        """``isinstance`` and ``issubclass``: of a class that answers itself, or to which others can be registered."""

        def note(one: Any, kinds: Any) -> None:
            for kind in kinds if isinstance(kinds, tuple) else (kinds,):
                if type(kind) is not type and isinstance(kind, type):
                    self._follow_class(type(kind))
                    if isinstance(kind, abc.ABCMeta) and (is_user_class(kind) or is_third_party(kind.__module__)):
                        self._note(Result(abc.get_cache_token, (), "the classes registered to abstract ones"), read=True)

        return self._noting(function, note)

    def _asking_setting(self, function: Any) -> Callable[..., Any]:
        """A function that gives a setting of the process, or of a generator."""

        def note(*args: Any, **kwargs: Any) -> None:
            if not kwargs and all(type(one) in VALUES or isinstance(one, enum.Enum) for one in args):
                text = f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', '')}()"
                self._note(Result(function, args, text), read=True)

        return self._noting(function, note)

    def _method_in_c(self, function: Any, owner: Any) -> Any:
        kind = type(owner)
        name = getattr(function, "__name__", "")
        if kind is np.ndarray:
            self.value(owner)
        if isinstance(owner, torch.Generator | np.random.RandomState) and name in ("initial_seed", "get_state"):
            return self._asking_setting(function)
        if kind in _TRANSPARENT or isinstance(owner, torch.Tensor) or is_library(kind.__module__):
            return self._taking(function) if kind is not str else self._wrapped(function)
        if isinstance(owner, type):
            self._follow_class(owner)
            return self._wrapped(function)
        if name in FILLS or name in CHANGES:
            if name not in ONLY_FILLS:
                self.value(owner)
            self.fills(owner)
            return function if name in ONLY_FILLS else self._wrapped(function)
        if isinstance(owner, dict) and name in ("get", "__getitem__", "__contains__"):
            return self._of_entry(function, owner)
        self.value(owner)
        if (
            kind.__module__.partition(".")[0] not in NO_STATE
            and not is_user_class(kind)
            and not has_contents(kind)
            and not is_in_python(kind)
        ):
            self._note(Opaque(owner, f"a {kind.__module__}.{kind.__qualname__}"), read=True)
        return self._wrapped(function)

    def _of_entry(self, function: Any, owner: dict[Any, Any]) -> Callable[..., Any]:
        def note(key: Any, *_: Any) -> None:
            if type(key) in (str, int, float, bool):
                self._note(Entry(owner, key, f"an entry {key!r} of a {type(owner).__name__}"), read=True)
            else:
                self.value(owner)

        return self._noting(function, note)

    def _wrapped(self, function: Any) -> Callable[..., Any]:
        """A function in C, or of a library: what it gets may be read."""
        if id(function) in ASKS_ATTRIBUTE:
            return self._asking(function)
        if id(function) in SETS_ATTRIBUTE:
            return self._setting(function)
        if isinstance(function, operator.attrgetter):
            return self._getting(function)

        def note(*args: Any, **kwargs: Any) -> None:
            for one in (*args, *kwargs.values()):
                self._walk(one, 0)
                if isinstance(one, PurePath) or (type(one) is str and 0 < len(one) < _PATHS and os.path.isfile(one)):
                    self._note(File(str(one), f"the file {one}"), read=True)

        return self._noting(function, note)

    def _taking(self, function: Any) -> Callable[..., Any]:
        """A function whose code is known to read nothing but what it gets: sizes, lists of tensors."""

        def note(*args: Any, **kwargs: Any) -> None:
            for one in (*args, *kwargs.values()):
                if isinstance(one, _CONTAINERS):
                    self._walk(one, 0)

        return self._noting(function, note)

    def _asking(self, function: Any) -> Callable[..., Any]:
        def note(owner: Any, name: Any, *_: Any) -> None:
            if isinstance(name, str):
                if function is object.__getattribute__ and isinstance(owner, torch.nn.Module):
                    held: Any = vars(owner)
                    self._note(Entry(held, name, self._text(owner, name)), read=True)
                self.attribute(owner, name)

        return self._noting(function, note)

    def _setting(self, function: Any) -> Callable[..., Any]:
        def note(owner: Any, name: Any, *_: Any) -> None:
            if isinstance(name, str):
                self.stores(owner, name)

        return self._noting(function, note)

    def _getting(self, function: Any) -> Callable[..., Any]:
        def note(owner: Any) -> None:
            for path in function.__reduce__()[1]:
                found = owner
                for name in path.split("."):
                    self.attribute(found, name)
                    found = getattr(found, name, None)

        return self._noting(function, note)

    def _reading(self, function: Any, owner: Any) -> Callable[..., Any]:
        """A function that looks at a file."""

        def note(*args: Any, **kwargs: Any) -> None:
            path = owner if isinstance(owner, PurePath) else args[0] if args else kwargs.get("file", kwargs.get("path", "."))
            if isinstance(path, str | PurePath):
                self._note(File(str(path), f"the file {path}"), read=True)

        return self._noting(function, note)

    def _cached(self, function: Any) -> Callable[..., Any]:
        """A function that keeps its results: those without tensors stay, as they would."""
        self._follow(function)
        self._note(Contents(function, f"what {getattr(function, '__qualname__', 'a cache')} has cached"), read=True)

        def called(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if not is_plain(result) or (type(result) is tuple and not all(map(is_plain, result))):
                self._traced_caches.add(function)
            elif function not in self._traced_caches:
                keep_cached(function)
            return result

        return called

    # -- functions that are called ------------------------------------------------------------------------------------------

    def _follow(self, value: Any) -> bool:
        """Functions of the user's get notes."""
        if isinstance(value, property):
            found = [self._follow(one) for one in (value.fget, value.fset) if one is not None]
            return any(found)
        if isinstance(value, staticmethod | classmethod | types.MethodType):
            value = value.__func__
        if isinstance(value, functools.partial):
            found = [self._follow(one) for one in (value.func, *value.args, *value.keywords.values())]
            return any(found)
        if isinstance(value, functools.cached_property):
            value = value.func
        if isinstance(value, functools._lru_cache_wrapper):
            if is_noted(value.__wrapped__):
                note_cache(value)
            value = value.__wrapped__
        if isinstance(value, type):
            self._follow_class(value)
        elif type(value) is types.FunctionType:
            return self._follow_function(value)
        elif is_user_class(type(value)):
            self._follow_class(type(value))
        return False

    def _follow_found(self, value: Any) -> None:
        """Follow what code without notes may call, if it is of the user's own. Other functions get notes when they are called."""
        if isinstance(value, types.FunctionType):
            if is_user_file(value.__code__.co_filename):
                self._follow_function(value)
        elif not isinstance(value, type) or is_user_class(value) or is_of_user(value):
            self._follow(value)

    def _follow_function(self, function: types.FunctionType) -> bool:
        """A function gets notes; whether it has some now."""
        file = function.__code__.co_filename
        if is_noted(function):
            known = function in self.instrumented.functions or function in self.instrumented.without_source
            noted = self.instrumented.add(function)
            if not known:
                if not noted:
                    self._unseen(function)
                elif self.instrumented.key_of(function) in self._entered:
                    self._entered_function(function)
                for cell in function.__closure__ or ():
                    self._follow(Variable(cell, "").value())
            return noted
        if is_generated(file) and not is_ours(function):
            self._unseen(function)
        elif (inner := getattr(function, "__wrapped__", None)) is not None:
            self._follow(inner)
        return False

    def _follow_class(self, kind: type) -> None:
        if kind in self._types:
            return
        self._types.add(kind)
        of_torch = issubclass(kind, torch.nn.Module)  # whose operators are torch's to call
        for one in kind.__mro__:
            if is_user_class(one) or (one.__module__ in sys.modules and is_of_user(one)) or is_made(one):
                for name, value in list(vars(one).items()):
                    self._follow(value)
                    if type(value) is types.FunctionType and (name == "forward" if of_torch else name.startswith("__")):
                        self._note(Lookup(kind, name, self._text(kind, name)), read=True)
            elif is_third_party(one.__module__):
                for name in ("forward", "__call__") if of_torch else dunders(one):
                    if name in vars(one):
                        self._note(Lookup(kind, name, self._text(kind, name)), read=True)
                        self._follow(vars(one)[name])
            elif of_torch and type(forward := vars(one).get("forward")) is types.FunctionType:
                self._note(Lookup(kind, "forward", self._text(kind, "forward")), read=True)
                self._replaceable(forward)

    # -- what was noted ---------------------------------------------------------------------------------------------------

    def _note(self, location: Location, *, read: bool) -> None:
        if not self._places.note(location, read=read, of_library=self.of_library):
            return
        value = location.value()
        if type(value) in _TRANSPARENT or value is MISSING or isinstance(location, Contents):
            return
        self._places.leads(location.key, value)
        if isinstance(location, Lookup):
            self._follow(value)
        else:
            self._follow_found(value)

    def settle(self, followed: Callable[[], Collection[int]]) -> tuple[list[Location], list[Change]]:
        """See :meth:`~torch_compat.step.guards.noted_places.NotedPlaces.settle`."""
        self._walked.clear()
        return self._places.settle(followed)


def _statements(source: Any) -> Any:
    """Source as ``compile`` takes it: ``eval`` allows blanks before an expression."""
    return source.lstrip(" \t") if isinstance(source, str) and "\n" not in source.strip() else source


def _class_of(*args: Any) -> Any:
    """``type``; of a counter of the loop that of the number, of what stands for a parameter that of the parameter."""
    if len(args) == 1 and stood_for(args[0]) is not None:
        return class_of(args[0])
    return args[0].__class__ if len(args) == 1 and type(args[0]) is HostScalar else type(*args)
