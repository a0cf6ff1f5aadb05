"""The reads of the host by one run of a step's Python, noted as they happen."""

from __future__ import annotations

import contextlib
import enum
import functools
import gc
import io
import operator
import os
import sys
import types
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from pathlib import PurePath
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from torch_compat.step.capture.batch_texts import TracedDict, TracedText, TracedTexts
from torch_compat.step.effects.recorded_object import RecordedObject
from torch_compat.step.guards.instrumented import Instrumented
from torch_compat.step.guards.locations import (
    Ambient,
    Attribute,
    Contents,
    Entry,
    File,
    Function,
    Item,
    Key,
    Location,
    Lookup,
    Values,
    static_lookup,
)
from torch_compat.step.guards.marks import Same, has_contents, inside, mark, slots
from torch_compat.step.guards.names import MISSING
from torch_compat.step.guards.one_shot_objects import keep_cached
from torch_compat.step.guards.user_objects import attributes_of, is_user_class
from torch_compat.step.host.host_future import HostFuture
from torch_compat.step.host.scalars import HostScalar
from xlatrain.bridge.errors import is_user_file

_DEPTH = 6
_MOST = 1000  # entries: a container with more is data, followed by View if at all
_WIDEST = 2000  # objects below one that is read as a whole
_VALUES = (bool, int, float, complex, str, bytes, type(None), range, slice, type(Ellipsis))
_OF_THE_STEP = (FakeTensor, FunctionalTensor, HostScalar, HostFuture, TracedText, TracedTexts, TracedDict)
_TRANSPARENT = frozenset({*_VALUES, *_OF_THE_STEP})
_OPAQUE = (
    *(torch.nn.Module, torch.Tensor, torch.optim.Optimizer, torch.utils.data.Dataset, torch.utils.data.DataLoader),
    *(type, types.FunctionType, types.MethodType, types.ModuleType, types.BuiltinFunctionType, types.CodeType, io.IOBase),
)
_LIBRARIES = frozenset(
    {"torch_compat", "xlatrain", "torch", "jax", "jaxlib", "numpy", "torchmetrics", "lightning_utilities", "optax", "flax"}
)
"""Packages whose objects and functions are looked after elsewhere, or hold nothing that a step may depend on."""
_TENSOR_ATTRIBUTES = frozenset({"shape", "requires_grad", "size", "numel", "dim", "ndim", "dtype", "is_leaf"})
_TENSOR_VALUES = frozenset({"item", "tolist", "numpy", "__float__", "__int__", "__bool__", "all", "any", "equal"})
_READS_FILES = frozenset(
    {"open", "exists", "isfile", "isdir", "islink", "getsize", "getmtime", "is_file", "is_dir", "read_text", "read_bytes", "stat"}
    | {"iterdir", "glob", "rglob", "listdir", "scandir", "walk"}
)
_OF_FILES = frozenset({"io", "_io", "os", "posix", "genericpath", "posixpath", "ntpath", "nt", "pathlib", "glob"})
_FOLLOWED = frozenset({"current_epoch", "global_step", "is_last_batch", "estimated_stepping_batches", "__dict__", "__class__"})
_ASKS_NOTHING = frozenset(
    map(
        id,
        (isinstance, issubclass, id, type, callable, super, print, globals, locals, operator.is_, operator.is_not, sys._getframe),
    )
)
_ASKS_ATTRIBUTE = {id(getattr): 1, id(hasattr): 1, id(object.__getattribute__): 1}
_SETS_ATTRIBUTE = {id(setattr): 1, id(delattr): 1, id(object.__setattr__): 1}
_FILLS = frozenset(
    {"append", "appendleft", "extend", "insert", "add", "update", "__setitem__", "__delitem__", "remove", "discard", "clear"}
)
_ONLY_FILLS = frozenset({"append", "appendleft", "add"})
_CHANGES = frozenset({"pop", "popitem", "popleft", "setdefault", "sort", "reverse", "rotate", "move_to_end", "write", "truncate"})
_OF_FRAMES = frozenset({"warnings", "inspect", "traceback", "logging", "contextlib", "contextvars", "unittest", "typing", "abc"})
_AMBIENT = tuple(
    function
    for function in (
        *(torch.get_default_dtype, torch.are_deterministic_algorithms_enabled, torch.get_float32_matmul_precision),
        *(torch.get_num_threads, torch.is_inference_mode_enabled, torch.get_default_device, torch.get_deterministic_debug_mode),
        *(torch.is_deterministic_algorithms_warn_only_enabled, torch.is_anomaly_enabled, torch.get_num_interop_threads),
        *(sys.getrecursionlimit, os.getcwd, os.getpid),
    )
)
_IS_AMBIENT = frozenset(map(id, _AMBIENT))


class Observation:
    """Told about reads by code with notes; see :class:`~torch_compat.step.guards.instrumented.Observer`.

    Args:
        functions: of the user's that the step may call; those that it is seen to call are added.
        owned: ids of objects whose attributes are followed where they are read (modules of the tree).
    """

    def __init__(self, functions: Iterable[types.FunctionType], owned: Collection[int]) -> None:
        self._owned = owned
        self._first: dict[Key, tuple[Location, Hashable, Any]] = {}
        self._guards: set[Key] = set()
        self._walked: dict[int, Any] = {}
        self._types: set[type] = set()
        self._entered: set[str] = set()
        self._ambient = {id(function): mark(function()) for function in _AMBIENT}
        self._traced_caches: set[Any] = set()
        self.instrumented = Instrumented(self)
        for function in functions:
            self.instrumented.add(function)

    # -- what code with notes tells ---------------------------------------------------------------------------------------

    def enter(self, key: str) -> None:
        if key in self._entered:
            return
        self._entered.add(key)
        function = self.instrumented.entered(key)
        if function is not None:
            name = f"{function.__module__}.{function.__qualname__}"
            # Its own code, not the one with notes that it has for now, is what a later look will find.
            self._note(Function(function, name), read=True)
            defaults = function.__kwdefaults__ or {}
            for key, value in defaults.items():
                self._note(Entry(defaults, key, f"{key} (a default of {name})"), read=True)
                self._follow(value)

    def attribute(self, owner: Any, name: str) -> None:
        kind = type(owner)
        if kind in _TRANSPARENT or name in _FOLLOWED:
            return
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
        elif kind is not super:
            self._object_attribute(owner, kind, name)

    def entry(self, holder: Any, key: Any) -> None:
        kind = type(holder)
        if kind in _TRANSPARENT or kind is RecordedObject or isinstance(holder, _OPAQUE):
            self._follow_class(kind)
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

    def stores(self, owner: Any, name: str) -> None:
        if type(owner) in _TRANSPARENT or id(owner) in self._owned or isinstance(owner, torch.Tensor):
            return
        held = attributes_of(owner) if not isinstance(owner, type) else None
        if isinstance(held, dict):
            self._note(Entry(held, name, self._text(owner, name)), read=False)
        else:
            self._note(Lookup(owner, name, self._text(owner, name)), read=False)

    def fills(self, holder: Any) -> None:
        if type(holder) not in _TRANSPARENT and not isinstance(holder, _OPAQUE) and self._is_small(holder):
            self._note(Contents(holder, f"the contents of a {type(holder).__name__}"), read=False)

    def call(self, function: Any) -> Any:
        kind = type(function)
        if kind is types.FunctionType:
            return self._called(function, None)
        if kind is types.MethodType:
            inner, owner = function.__func__, function.__self__
            self._follow_class(type(owner))
            return self._called(inner, owner, function) if type(inner) is types.FunctionType else function
        if function is type:
            return _class_of
        if id(function) in _ASKS_NOTHING or isinstance(function, torch.nn.Module) or kind in _TRANSPARENT:
            return function
        if isinstance(function, type):
            self._follow_class(function)
            return function if is_user_class(function) or _is_library(function.__module__) else self._wrapped(function)
        if is_user_class(kind):
            self._follow_class(kind)
            return function
        if isinstance(function, functools._lru_cache_wrapper):
            return self._cached(function)
        owner = getattr(function, "__self__", None)
        if owner is not None and not isinstance(owner, types.ModuleType):
            return self._method_in_c(function, owner)
        if id(function) in _IS_AMBIENT:
            self._note(Ambient(function, f"{function.__module__}.{function.__name__}()"), read=True)
            return function
        if getattr(function, "__name__", "") in _READS_FILES and function.__module__ in _OF_FILES:
            return self._reading(function, None)
        module = getattr(function, "__module__", None) or ""
        if _is_library(module) or module.lstrip("_") in _OF_FRAMES:
            return function
        self._follow(function)
        self.value(function)
        return self._wrapped(function)

    # -- attributes -------------------------------------------------------------------------------------------------------

    def _variable(self, owner: types.ModuleType, name: str) -> None:
        held = vars(owner)
        text = f"{owner.__name__}.{name}"
        if name in held:
            self._note(Entry(held, name, text), read=True)
        elif _is_plain(getattr(owner, name, None)):
            self._note(Attribute(owner, name, text), read=True)

    def _class_attribute(self, owner: type, name: str) -> None:
        self._follow_class(owner)
        self._follow_class(type(owner))
        found = static_lookup(owner, name)
        if isinstance(found, types.FunctionType | staticmethod | classmethod | types.BuiltinFunctionType):
            self._follow(found)
            return
        self._note(Lookup(owner, name, f"{owner.__module__}.{owner.__qualname__}.{name}"), read=True)

    def _tensor_attribute(self, owner: torch.Tensor, name: str) -> None:
        if isinstance(owner, _OF_THE_STEP) or getattr(owner, "_live", None) is not None:
            return
        if name in _TENSOR_VALUES:
            self._values(owner)
        elif name in _TENSOR_ATTRIBUTES:
            asked = name if name in ("requires_grad", "dtype", "is_leaf") else "shape"
            self._note(Attribute(owner, asked, f"the {asked} of a tensor"), read=True)
        else:
            held: Any = vars(owner)
            if name in held:
                self._note(Entry(held, name, f"{name} of a tensor"), read=True)

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
        if name in held or any(name in held.get(part, ()) for part in ("_parameters", "_buffers", "_modules")):
            return
        found = static_lookup(owner, name)
        if isinstance(found, types.FunctionType | property | staticmethod | classmethod | functools.cached_property):
            self._follow(found)
        else:
            self._note(Lookup(owner, name, self._text(owner, name)), read=True)

    def _object_attribute(self, owner: Any, kind: type, name: str) -> None:
        self._follow_class(kind)
        text = self._text(owner, name)
        held = attributes_of(owner)
        found = next((one.__dict__[name] for one in kind.__mro__ if name in one.__dict__), MISSING)
        if isinstance(found, property):
            self._follow(found)
            if _is_library(kind.__module__) and _is_plain(getattr(owner, name, None)):
                self._note(Attribute(owner, name, text), read=True)
        elif hasattr(type(found), "__set__"):
            if _is_plain(getattr(owner, name, None)) or name in slots(kind):
                self._note(Attribute(owner, name, text), read=True)
        elif held is not None and name in held:
            self._note(Entry(held, name, text), read=True)
        elif isinstance(found, types.FunctionType | staticmethod | classmethod):
            self._follow(found)
        elif not isinstance(found, types.MethodDescriptorType | types.BuiltinFunctionType | types.WrapperDescriptorType):
            self._note(Lookup(owner, name, text), read=True)

    @staticmethod
    def _text(owner: Any, name: str) -> str:
        named = isinstance(owner, type | types.FunctionType)
        return f"{owner.__qualname__ if named else type(owner).__qualname__}.{name}"

    # -- contents ---------------------------------------------------------------------------------------------------------

    def _walk(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in _TRANSPARENT or kind is RecordedObject or depth > _DEPTH or id(value) in self._walked:
            return
        if isinstance(value, types.FunctionType | types.MethodType | type | functools.partial):
            self._follow(value)
        if isinstance(value, torch.Tensor):
            self._values(value)
            return
        if isinstance(value, (*_OPAQUE, enum.Enum)) and not issubclass(kind, io.StringIO | io.BytesIO):
            self._follow_class(kind)
            return
        if len(self._walked) > _WIDEST or not self._is_small(value):
            return
        self._follow_class(kind)
        if not is_user_class(kind) and _is_library(kind.__module__):
            return
        if not has_contents(kind) and attributes_of(value) is None and not slots(kind):
            return
        self._walked[id(value)] = value
        if kind is not tuple and kind is not frozenset:
            self._note(Contents(value, f"the contents of a {kind.__name__}"), read=True)
        for one in inside(value):
            self._walk(one, depth + 1)

    @staticmethod
    def _is_small(value: Any) -> bool:
        sized = isinstance(value, dict | list | tuple | set | frozenset)
        return not sized or len(value) <= _MOST

    # -- calls ------------------------------------------------------------------------------------------------------------

    def _called(self, function: types.FunctionType, owner: Any, method: Any = None) -> Any:
        """A function in Python, maybe a method of ``owner``."""
        called = function if method is None else method
        if function.__name__ in _READS_FILES and function.__module__ in _OF_FILES:
            return self._reading(called, owner)
        file = function.__code__.co_filename
        if self._follow(function) or is_user_file(file):
            return called
        module = function.__module__ or ""
        if id(function) in _IS_AMBIENT:
            self._note(Ambient(function, f"{module}.{function.__name__}()"), read=True)
        if _is_library(module) or module.partition(".")[0] in _OF_FRAMES or hasattr(function, "__wrapped__"):
            if module == "logging":
                self.value(owner)
            return called
        if owner is not None:
            self.value(owner)
        return self._wrapped(called)

    def _method_in_c(self, function: Any, owner: Any) -> Any:
        kind = type(owner)
        if kind in _TRANSPARENT or isinstance(owner, torch.Tensor) or _is_library(kind.__module__):
            return function if kind is not str else self._wrapped(function)
        name = getattr(function, "__name__", "")
        if isinstance(owner, type):
            self._follow_class(owner)
            return self._wrapped(function)
        if name in _FILLS or name in _CHANGES:
            if name not in _ONLY_FILLS:
                self.value(owner)
            self.fills(owner)
            return function if name in _ONLY_FILLS else self._wrapped(function)
        if isinstance(owner, dict) and name in ("get", "__getitem__", "__contains__"):
            return self._of_entry(function, owner)
        self.value(owner)
        return self._wrapped(function)

    def _of_entry(self, function: Any, owner: dict[Any, Any]) -> Callable[..., Any]:
        def asked(key: Any, *default: Any) -> Any:
            if type(key) in (str, int, float, bool):
                self._note(Entry(owner, key, f"an entry {key!r} of a {type(owner).__name__}"), read=True)
            else:
                self.value(owner)
            return function(key, *default)

        return asked

    def _wrapped(self, function: Any) -> Callable[..., Any]:
        """A function in C, or of a library: what it gets may be read."""
        if id(function) in _ASKS_ATTRIBUTE:
            return self._asking(function)
        if id(function) in _SETS_ATTRIBUTE:
            return self._setting(function)
        if isinstance(function, operator.attrgetter):
            return self._getting(function)

        def checked(*args: Any, **kwargs: Any) -> Any:
            for one in args:
                self._walk(one, 0)
            for one in kwargs.values():
                self._walk(one, 0)
            return function(*args, **kwargs)

        return checked

    def _asking(self, function: Any) -> Callable[..., Any]:
        def asked(owner: Any, name: Any, *default: Any) -> Any:
            if isinstance(name, str):
                if function is object.__getattribute__ and isinstance(owner, torch.nn.Module):
                    held: Any = vars(owner)
                    self._note(Entry(held, name, self._text(owner, name)), read=True)
                self.attribute(owner, name)
            return function(owner, name, *default)

        return asked

    def _setting(self, function: Any) -> Callable[..., Any]:
        def changed(owner: Any, name: Any, *value: Any) -> Any:
            if isinstance(name, str):
                self.stores(owner, name)
            return function(owner, name, *value)

        return changed

    def _getting(self, function: Any) -> Callable[..., Any]:
        def asked(owner: Any) -> Any:
            for path in function.__reduce__()[1]:
                found = owner
                for name in path.split("."):
                    self.attribute(found, name)
                    found = getattr(found, name, None)
            return function(owner)

        return asked

    def _reading(self, function: Any, owner: Any) -> Callable[..., Any]:
        """A function that looks at a file."""

        def reading(*args: Any, **kwargs: Any) -> Any:
            path = owner if isinstance(owner, PurePath) else args[0] if args else kwargs.get("file", kwargs.get("path", "."))
            if isinstance(path, str | PurePath):
                self._note(File(str(path), f"the file {path}"), read=True)
            return function(*args, **kwargs)

        return reading

    def _cached(self, function: Any) -> Callable[..., Any]:
        """A function that keeps its results: those without tensors stay, as they would."""
        self._follow(function.__wrapped__)
        self._note(Contents(function, f"what {getattr(function, '__qualname__', 'a cache')} has cached"), read=True)

        def called(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if not _is_plain(result) or (type(result) is tuple and not all(map(_is_plain, result))):
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
            value = value.__wrapped__
        if isinstance(value, type):
            self._follow_class(value)
        elif type(value) is types.FunctionType and is_user_file(value.__code__.co_filename):
            self.instrumented.add(value)
            return True
        elif type(value) is types.FunctionType and (inner := getattr(value, "__wrapped__", None)) is not None:
            self._follow(inner)
        return False

    def _follow_class(self, kind: type) -> None:
        if kind in self._types:
            return
        self._types.add(kind)
        for one in kind.__mro__:
            if is_user_class(one) or (one.__module__ in sys.modules and _is_of_user(one)):
                for value in list(vars(one).values()):
                    self._follow(value)

    # -- what was noted ---------------------------------------------------------------------------------------------------

    def _note(self, location: Location, *, read: bool) -> None:
        key = location.key
        if key not in self._first:
            if isinstance(location, Entry) and _stands_in(location.value()):
                return
            self._first[key] = (location, self._before(location), location.keep())
            if read:
                self._guards.add(key)

    def _before(self, location: Location) -> Hashable:
        """The mark of a place before the step, as far as it is compared with what it is afterwards."""
        if isinstance(location, Ambient):
            return self._ambient[id(location.owner)]  # in the step a precision may have set another
        return None if isinstance(location, Function) else location.now()

    def settle(self, followed: Callable[[], Collection[int]]) -> tuple[list[Location], list[str]]:
        """To be called once the step's Python is over, and what it did has been taken back.

        Args:
            followed: gives the ids of what is taken back by others.

        Returns:
            places that the step has read, and names of what it has changed that nobody follows, which is as it was again.
        """
        self._walked.clear()
        self._drop_own()
        changed = [one for one in self._first.values() if one[1] is not None and one[0].now() != one[1]]
        if changed:
            gc.collect()
            del changed
            self._drop_own()
            changed = [one for one in self._first.values() if one[1] is not None and one[0].now() != one[1]]
            known = followed() if changed else ()
            changed = [one for one in changed if id(one[0].owner) not in known]
        texts = []
        for location, _, kept in changed:
            if isinstance(location.owner, functools._lru_cache_wrapper):
                continue
            location.restore(kept)
            texts.append(location.text)
        found = [location for key, (location, _, _) in self._first.items() if key in self._guards]
        self._first.clear()
        return found, texts

    def _drop_own(self) -> None:
        """Forget objects that nobody else holds: the step has made them, and no other step can meet them."""
        while True:
            own: Counter[int] = Counter()
            for location, before, kept in self._first.values():
                own[id(location.owner)] += 1
                own.update(map(id, _held_by(before)))
                own.update(map(id, _held_by_copy(kept, location)))
            gone = [key for key, (location, _, _) in self._first.items() if _references(location) <= own[id(location.owner)]]
            if not gone:
                return
            for key in gone:
                del self._first[key]
                self._guards.discard(key)


def _references(location: Location) -> int:
    return sys.getrefcount(location.owner) - 1


def _held_by(before: Any) -> Iterator[Any]:
    """The objects that a mark holds."""
    if type(before) is Same:
        yield before.value
    elif type(before) is tuple or type(before) is frozenset:
        for one in before:
            yield from _held_by(one)


def _held_by_copy(kept: Any, location: Location) -> Iterator[Any]:
    if isinstance(location, Entry):
        yield kept
    elif isinstance(kept, dict):
        yield from kept.values()
    elif isinstance(kept, list | set) or type(kept).__name__ == "deque":
        yield from kept


def _class_of(*args: Any) -> Any:
    """``type``; of a counter of the loop that of the number."""
    return args[0].__class__ if len(args) == 1 and type(args[0]) is HostScalar else type(*args)


def _stands_in(value: Any) -> bool:
    """Whether it is there only while a step is captured: a traced value, or a function that records its calls."""
    ours = type(value) is types.FunctionType and _is_library(value.__globals__.get("__name__", ""))
    return type(value) in _OF_THE_STEP or (ours and value.__globals__["__name__"].startswith(("torch_compat.", "xlatrain.")))


def _is_plain(value: Any) -> bool:
    """Whether it is a number, a text or the like: by its own class, for a counter of the loop passes for a number."""
    return type(value) in _VALUES or isinstance(value, enum.Enum | torch.dtype) or type(value) is tuple


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


@functools.cache
def _is_of_user(kind: type) -> bool:
    """Whether the methods of a class are the user's: of data sets, too, whose attributes are data."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" if file is None else is_user_file(file)
