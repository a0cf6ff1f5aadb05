"""Calls by user code: what a function reads of what it gets, where it has no notes itself."""

from __future__ import annotations

import abc
import contextlib
import enum
import functools
import operator
import os
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree

from torch_compat.step.effects.recorder import changing_nothing
from torch_compat.step.guards.followed_functions import FollowedFunctions
from torch_compat.step.guards.instrumented import Instrumented
from torch_compat.step.guards.known_functions import (
    ASKS_ATTRIBUTE,
    ASKS_NOTHING,
    CHANGES,
    FILLS,
    IS_AMBIENT,
    OF_FILES,
    OF_FRAMES,
    ONLY_FILLS,
    READS_FILES,
    SETS_ATTRIBUTE,
    TAKES_DATA,
    VALUES,
    is_setting,
)
from torch_compat.step.guards.locations import Ambient, Contents, Entry, File, Result, static_lookup, text_of
from torch_compat.step.guards.met_values import CONTAINERS, MetValues
from torch_compat.step.guards.noted_places import TRANSPARENT, NotedPlaces, is_of_the_host
from torch_compat.step.guards.one_shot_objects import keep_cached, refuse
from torch_compat.step.guards.origins import (
    is_constant,
    is_generated,
    is_house,
    is_library,
    is_third_party,
    names_of,
    texts_of,
)
from torch_compat.step.guards.taking import is_taking, iterator_of, take
from torch_compat.step.host.arrays import HostArray
from torch_compat.step.host.assignment import assigning, is_assignment
from torch_compat.step.host.draws import recorded
from torch_compat.step.host.host_future import HostFuture
from torch_compat.step.host.input_functions import as_input
from torch_compat.step.host.later_text import LaterText, check_kept, has_marks, looked_at, result_of
from torch_compat.step.host.number_functions import as_float, as_int, constructor, extreme_of, length_of, of_lists
from torch_compat.step.host.scalars import HostScalar
from torch_compat.step.values.generators import host_random_state, same_state
from torch_compat.step.values.marks import PLAIN
from torch_compat.step.values.names import MISSING
from torch_compat.step.values.taken_values import TakenValues
from torch_compat.step.values.user_objects import is_user_class
from xlatrain.bridge.capture.stand_ins import class_of
from xlatrain.bridge.errors import CaptureError, user_line

_PATHS = 4096  # characters
_DEPTH = 2
_HELD = 100  # entries: more are data, and no functions
_CALLABLE = (types.FunctionType, types.MethodType, functools.partial, torch.nn.Module)
_TAKES_FILES = frozenset({"load", "loadtxt", "genfromtxt", "fromfile"})


def _is_of_an_object(function: Any) -> bool:
    """Whether it is a method in C of an object, as ``[].append`` is."""
    if not isinstance(function, types.BuiltinMethodType | types.MethodWrapperType):
        return False
    return not isinstance(function.__self__, types.ModuleType | type | None)


class CalledFunctions:
    """The functions that user code calls.

    Args:
        places: that are noted.
        functions: that get notes.
        values: that they get.
        instrumented: whose code a call stops for as long as it is looked at.
    """

    def __init__(self, places: NotedPlaces, functions: FollowedFunctions, values: MetValues, instrumented: Instrumented) -> None:
        self._places = places
        self._functions = functions
        self._values = values
        self._instrumented = instrumented
        self._traced_caches: set[Any] = set()

    def call(self, function: Any) -> Any:
        kind = type(function)
        if (found := self._taking_or_drawing(function)) is not None:
            return found
        self._places.check_usable(function)
        if kind is types.FunctionType:
            return self._called(function, None)
        if kind is types.MethodType:
            inner, owner = function.__func__, function.__self__
            if is_constant(type(owner)):
                return self._of_constant(function)
            self._functions.follow_class(type(owner))
            if isinstance(inner, functools._lru_cache_wrapper):
                return functools.partial(self._cached(inner), owner)
            in_python = type(inner) is types.FunctionType
            return self._called(inner, owner, function) if in_python else self._method_in_c(function, owner)
        if function is isinstance or function is issubclass:
            return self._asking_class(function)
        if (made := self._of_values(function)) is not None:
            return made
        if isinstance(function, torch.nn.Module):
            self._values.module(function)
            self._functions.follow_class(kind)
            return function
        if id(function) in ASKS_NOTHING or kind in TRANSPARENT:
            return function
        if isinstance(function, type):
            return self._class(function)
        if is_user_class(kind):
            self._functions.follow_class(kind)
            return function
        if isinstance(function, functools._lru_cache_wrapper):
            return self._cached(function)
        owner = getattr(function, "__self__", None)
        if owner is not None and not isinstance(owner, types.ModuleType):
            return self._method_in_c(function, owner)
        return self._function_in_c(function)

    def _taking_or_drawing(self, function: Any) -> Any:
        """A function that records what another takes from an iterator, or draws; None for one that does neither."""
        if self._places.taken is not None and is_taking(function):
            return functools.partial(self._takes, self._places.taken, function)
        if (made := as_input(function)) is not None:
            return self._wrapped(self._silently(made))
        return None if (draw := recorded(function)) is None else self._wrapped(draw)

    def _of_constant(self, method: types.MethodType) -> Callable[..., Any]:
        """A method of an object that never changes, whose own work is none of the step's; but a function that it is given is."""
        plain, noted = self._silently(method), self._called(method.__func__, method.__self__, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            return (noted if any(map(callable, (*args, *kwargs.values()))) else plain)(*args, **kwargs)

        return call

    def _silently(self, function: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._instrumented.silent():
                return function(*args, **kwargs)

        return call

    def _class(self, kind: type) -> Any:
        self._functions.follow_class(kind)
        self._functions.follow_class(type(kind))
        if is_user_class(kind) or issubclass(kind, BaseException):
            return kind
        return self._noting(kind, _nothing) if is_library(kind.__module__) else self._wrapped(kind)

    def _of_values(self, function: Any) -> Any:
        """The function that takes values of the step in place of one of Python's; None for any other function."""
        if function is type:
            return _class_of
        if function is warnings.warn:
            return _warning
        if function is float:
            return as_float
        if function is int:
            return as_int
        if function is len:
            return self._wrapped(length_of)
        if function is min or function is max:
            return self._wrapped(extreme_of(function))
        if function is map:
            return functools.partial(_mapped, self._class(map))
        made = assigning(function) if is_assignment(function) else constructor(function)
        return None if made is None else self._wrapped(made)

    def _function_in_c(self, function: Any) -> Any:
        if id(function) in IS_AMBIENT:
            self._places.note(Ambient(function, f"{function.__module__}.{function.__name__}()"), read=True)
            return function
        if getattr(function, "__name__", "") in READS_FILES and function.__module__ in OF_FILES:
            return self._reading(function, None)
        module = getattr(function, "__module__", None) or ""
        if is_setting(module, function):
            return self._asking_setting(function)
        if module.partition(".")[0] == "numpy":
            return self._wrapped(of_lists(function))
        if getattr(function, "__name__", "") in TAKES_DATA:
            return self._wrapped(function)
        if module.lstrip("_") in OF_FRAMES:
            return function
        if is_library(module):
            return self._taking(function)
        self._functions.follow(function)
        self._values.walk(function)
        return self._wrapped(function)

    def _called(self, function: types.FunctionType, owner: Any, method: Any = None) -> Any:
        """A function in Python, maybe a method of ``owner``."""
        called = function if method is None else method
        if function.__name__ in READS_FILES and function.__module__ in OF_FILES:
            return self._reading(called, owner)
        if self._functions.follow(function):
            return called
        module = str(function.__globals__.get("__name__", ""))
        if id(function) in IS_AMBIENT:
            self._places.note(Ambient(function, f"{module}.{function.__name__}()"), read=True)
        if owner is None and is_setting(module, function):
            return self._asking_setting(called)
        if function in self._instrumented.without_source or is_generated(function.__code__.co_filename):
            return self._called_unseen(called, function, owner)
        if is_library(module) and not is_house(module):
            self._functions.replaceable(function)
        if is_library(module) and function.__name__ in _TAKES_FILES | TAKES_DATA:
            return self._wrapped(called)
        if module.partition(".")[0] in OF_FRAMES:
            if module.partition(".")[0] == "logging":
                self._values.walk(owner)
            elif isinstance(owner, contextlib.AbstractContextManager | contextlib.AbstractAsyncContextManager):
                self._values.fills(owner)  # an ExitStack
                return self._taking(called)
            return called
        if is_house(module):  # what records the calls of a function of Python looks who calls it
            return self._taking(called) if is_library(function.__module__ or "") and not is_house(function.__module__) else called
        if is_library(module):
            return self._taking(called)
        with self._as_library():
            self._functions.unseen(function)
        if owner is not None:
            self._values.walk(owner)
        return self._wrapped(called)

    @contextlib.contextmanager
    def _as_library(self) -> Iterator[None]:
        before, self._places.of_library = self._places.of_library, True
        try:
            yield
        finally:
            self._places.of_library = before

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
        if kind in TRANSPARENT:
            return
        of_class = not isinstance(one, type | types.ModuleType | torch.Tensor)
        for name in names:
            self._values.attribute(one, name)
            if of_class and static_lookup(kind, name) is not MISSING:
                self._values.attribute(kind, name)
        self._functions.follow(one)
        self._values.walk(one)

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
                self._places.note(Entry(names, name, f"{names.get('__name__', '?')}.{name}"), read=True)
            self._may_read(names[name], wanted)
        for name in wanted & variables.keys():
            if isinstance(variables, dict):
                self._places.note(Entry(variables, name, f"the variable {name}"), read=True)
            self._may_read(variables[name], wanted)

    def _takes(self, taken: TakenValues, function: Any, *args: Any) -> Any:
        """``function(*args)``, which takes from an iterator."""
        iterator = iterator_of(function, args)
        if not self._places.takes(iterator):
            return self._wrapped(function)(*args)
        if not all(issubclass(type(one), PLAIN) for one in args if one is not iterator):  # what stands in would stay in there
            refuse(f"a {type(iterator).__name__}")
        taken.takers.update(dict.fromkeys(self._instrumented.functions))
        with self._instrumented.silent():
            value = take(taken, function, args)
        if any(isinstance(one, torch.Tensor) for one in pytree.tree_leaves(value)):
            refuse(f"a {type(iterator).__name__}")  # they are others for each batch
        return value

    def _noting(self, function: Any, note: Callable[..., None]) -> Callable[..., Any]:
        """``function`` with ``note`` before each call, which gets what it gets."""
        of_library = self._places.of_library

        def called(*args: Any, **kwargs: Any) -> Any:
            with self._instrumented.silent():
                self._places.of_library = of_library
                note(*args, **kwargs)
            check_kept(function, args, kwargs)
            result = function(*args, **kwargs)
            self._places.makes(result)
            return result_of(function, result)

        return called

    def _asking_class(self, function: Any) -> Callable[..., Any]:
        """``isinstance`` and ``issubclass``: of a class that answers itself, or to which others can be registered."""

        def note(one: Any, kinds: Any) -> None:
            for kind in kinds if isinstance(kinds, tuple) else (kinds,):
                if type(kind) is not type and isinstance(kind, type):
                    self._functions.follow_class(type(kind))
                    if isinstance(kind, abc.ABCMeta) and (is_user_class(kind) or is_third_party(kind.__module__)):
                        self._places.note(Result(abc.get_cache_token, (), "the classes registered to abstract ones"), read=True)

        return self._noting(function, note)

    def _asking_setting(self, function: Any) -> Callable[..., Any]:
        """A function that gives a setting of the process, or of a generator."""

        def note(*args: Any, **kwargs: Any) -> None:
            if not kwargs and all(type(one) in VALUES or isinstance(one, enum.Enum) for one in args):
                text = f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', '')}()"
                self._places.note(Result(function, args, text), read=True)

        return self._noting(function, note)

    def _method_in_c(self, function: Any, owner: Any) -> Any:
        kind = type(owner)
        name = getattr(function, "__name__", "")
        if kind is np.ndarray:
            self._values.walk(owner)
        if isinstance(owner, torch.Generator | np.random.RandomState) and name in ("initial_seed", "get_state"):
            return self._asking_setting(function)
        self._places.check_changed(owner)
        if kind in TRANSPARENT or isinstance(owner, torch.Tensor) or is_library(kind.__module__):
            return self._taking(function) if kind is not str else self._wrapped(function)
        if isinstance(owner, type):
            self._functions.follow_class(owner)
            return self._wrapped(function)
        if name in FILLS or name in CHANGES:
            if name not in ONLY_FILLS:
                self._values.walk(owner)
            self._values.fills(owner)
            return function if name in ONLY_FILLS else self._wrapped(function)
        if isinstance(owner, dict) and name in ("get", "__getitem__", "__contains__"):
            return self._of_entry(function, owner)
        self._values.walk(owner)
        return self._wrapped(function)

    def _of_entry(self, function: Any, owner: dict[Any, Any]) -> Callable[..., Any]:
        def note(key: Any, *_: Any) -> None:
            if type(key) in (str, int, float, bool):
                self._places.note(Entry(owner, key, f"an entry {key!r} of a {type(owner).__name__}"), read=True)
            else:
                self._values.walk(owner)

        def asked(key: Any, *default: Any) -> Any:
            if type(key) is not HostScalar or type(owner) is not dict:
                return function(key, *default)
            of_a_number = {"get": key.get_of, "__getitem__": key.entry_of, "__contains__": key.is_in}
            return of_a_number[function.__name__](owner, *default)

        return self._noting(asked, note)

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
                self._values.walk(one)
                self._may_call(one)
                if isinstance(one, PurePath) or (type(one) is str and 0 < len(one) < _PATHS and os.path.isfile(one)):
                    self._places.note(File(str(one), f"the file {one}"), read=True)

        return self._noting(function, note)

    def _taking(self, function: Any) -> Callable[..., Any]:
        """A function whose code is known to read nothing but what it gets, sizes, lists of tensors, and to call what it gets."""

        def note(*args: Any, **kwargs: Any) -> None:
            for one in (*args, *kwargs.values()):
                if isinstance(one, CONTAINERS):
                    self._values.walk(one)
                self._may_call(one)

        return self._noting(function, note)

    def _may_call(self, one: Any, depth: int = 0) -> None:
        """A function without notes gets ``one``, and may call it or what is in it, as ``checkpoint`` and ``map`` do."""
        if isinstance(one, list | tuple | dict):
            if depth < _DEPTH and len(one) <= _HELD:
                for inner in one.values() if isinstance(one, dict) else one:
                    self._may_call(inner, depth + 1)
        elif isinstance(one, _CALLABLE) or _is_of_an_object(one) or (is_user_class(type(one)) and callable(one)):
            self.call(one)

    def _asking(self, function: Any) -> Callable[..., Any]:
        def note(owner: Any, name: Any, *_: Any) -> None:
            if isinstance(name, str):
                if function is object.__getattribute__ and isinstance(owner, torch.nn.Module):
                    held: Any = vars(owner)
                    self._places.note(Entry(held, name, text_of(owner, name)), read=True)
                self._values.attribute(owner, name)

        return self._noting(function, note)

    def _setting(self, function: Any) -> Callable[..., Any]:
        def note(owner: Any, name: Any, *_: Any) -> None:
            if isinstance(name, str):
                self._values.stores(owner, name)

        return self._noting(function, note)

    def _getting(self, function: Any) -> Callable[..., Any]:
        def note(owner: Any) -> None:
            for path in function.__reduce__()[1]:
                found = owner
                for name in path.split("."):
                    self._values.attribute(found, name)
                    found = getattr(found, name, None)

        return self._noting(function, note)

    def _reading(self, function: Any, owner: Any) -> Callable[..., Any]:
        """A function that looks at a file."""

        def note(*args: Any, **kwargs: Any) -> None:
            path = owner if isinstance(owner, PurePath) else args[0] if args else kwargs.get("file", kwargs.get("path", "."))
            if isinstance(path, str | PurePath):
                self._places.note(File(str(path), f"the file {path}"), read=True)

        return self._noting(function, note)

    def _cached(self, function: Any) -> Callable[..., Any]:
        """A function that keeps its results: those without tensors stay, as they would."""
        self._functions.follow(function)
        name = getattr(function, "__qualname__", "a function")
        self._places.note(Contents(function, f"what {name} has cached"), read=True)

        def refusal(what: str) -> CaptureError:
            return CaptureError(
                f"{user_line(traceback.extract_stack()) or 'the step'}\n  cannot be captured: {name} keeps its results "
                f"(functools.cache), and {what} where it is called for the first time with a number, which a compiled step would "
                "do each time.\n  Fix: do it outside of the function, or in a hook such as on_train_batch_start."
            )

        def called(*args: Any, **kwargs: Any) -> Any:
            numbers = any(type(one) is HostScalar for one in pytree.tree_leaves((args, kwargs)))
            with self._changing_nothing(refusal) if numbers else contextlib.nullcontext():
                result = function(*args, **kwargs)
            if not is_of_the_host(result):
                self._traced_caches.add(function)
            elif function not in self._traced_caches:
                keep_cached(function)
            return result

        return called

    @contextlib.contextmanager
    def _changing_nothing(self, refusal: Callable[[str], CaptureError]) -> Iterator[None]:
        """A call of a function that keeps its results, with a number that differs from step to step: in a capture its body runs
        whether the cache has the number or not, and its program stands for steps of either kind.

        Raises:
            CaptureError: ``refusal`` of what it does besides.
        """
        before, drawn = self._places.now(), host_random_state()
        with changing_nothing(refusal):
            yield
        if not same_state(host_random_state(), drawn):
            raise refusal("draws from a random generator")
        if (changed := self._places.changed(before)) is not None:
            raise refusal(changed.does)


def _mapped(mapped: Any, *args: Any) -> Any:
    """``map``, also of functions that take values of the step in place of one in C."""
    return mapped(*map(_of_values_mapped, args[:1]), *args[1:])


def _of_values_mapped(function: Any) -> Any:
    return _class_of if function is type else assigning(function) if is_assignment(function) else function


def _warning(message: Any, category: Any = None, stacklevel: int = 1, *args: Any, **kwargs: Any) -> None:
    """``warnings.warn``, which looks whether a text is one that it has told before."""
    if has_marks(message.args if isinstance(message, Warning) else message):
        raise looked_at()
    warnings.warn(message, category, stacklevel + 1, *args, **kwargs)


def _nothing(*_: Any, **__: Any) -> None:
    """The note of a call that reads nothing."""


def _statements(source: Any) -> Any:
    """Source as ``compile`` takes it: ``eval`` allows blanks before an expression."""
    return source.lstrip(" \t") if isinstance(source, str) and "\n" not in source.strip() else source


def _class_of(*args: Any) -> Any:
    """``type``; of a number of the step that of the number, of its tensors the class that the user's code knows."""
    if len(args) == 1 and issubclass(type(args[0]), torch.Tensor):
        return class_of(args[0])
    if len(args) == 1 and type(args[0]) is HostFuture and args[0].example() is None:
        raise args[0].refusal("it asks what class a value has that is computed on the host after the step")
    stands = len(args) == 1 and type(args[0]) in (HostArray, HostFuture, HostScalar, LaterText)
    return args[0].__class__ if stands else type(*args)
