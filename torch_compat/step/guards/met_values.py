"""Values that user code meets, and what it reads and changes of them: attributes, entries, contents."""

from __future__ import annotations

import builtins
import contextlib
import enum
import functools
import io
import traceback
import types
from collections import deque
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from torch_compat.step.effects.recorded_object import RecordedObject
from torch_compat.step.guards.followed_functions import FollowedFunctions
from torch_compat.step.guards.known_functions import VALUES, is_plain
from torch_compat.step.guards.locations import (
    OF_NUMBERS,
    Attribute,
    Contents,
    Entry,
    Item,
    Kind,
    Large,
    Lookup,
    Member,
    Opaque,
    Result,
    Values,
    entries_of,
    is_memory,
    static_lookup,
    text_of,
)
from torch_compat.step.guards.noted_places import OF_THE_STEP, TRANSPARENT, NotedPlaces
from torch_compat.step.guards.one_shot_objects import refuse
from torch_compat.step.guards.origins import is_heap_type, is_house, is_library, is_third_party
from torch_compat.step.guards.param_groups import ParamGroups
from torch_compat.step.guards.stray_modules import places_of
from torch_compat.step.host.host_memory import note_met
from torch_compat.step.values import policy
from torch_compat.step.values.kept_in_c import keeps_in_c
from torch_compat.step.values.marks import has_contents, inside, slots
from torch_compat.step.values.names import MISSING
from torch_compat.step.values.taken_values import TAKING
from torch_compat.step.values.user_objects import attributes_of, is_user_class
from xlatrain.bridge.capture.stand_ins import stood_for
from xlatrain.bridge.errors import user_line

CONTAINERS = (dict, list, tuple, set, deque, np.ndarray)
_OPAQUE = (
    *(torch.nn.Module, torch.Tensor, torch.optim.Optimizer, torch.utils.data.Dataset, torch.utils.data.DataLoader),
    *(type, types.FunctionType, types.MethodType, types.ModuleType, types.BuiltinFunctionType, types.CodeType, io.IOBase),
)
_OF_A_CALL = torch.autograd.function.FunctionCtx
"""Made by each call of a Function. The graph holds it as long as a tensor is there that the call made, so a note of one would."""
_TENSOR_ATTRIBUTES = frozenset({"grad", "shape", "requires_grad", "size", "numel", "dim", "ndim", "dtype", "is_leaf"})
_TENSOR_VALUES = frozenset({"item", "tolist", "numpy", "__float__", "__int__", "__bool__", "all", "any", "equal"})
_FOLLOWED = frozenset({"current_epoch", "global_step", "is_last_batch", "estimated_stepping_batches", "__dict__", "__class__"})
_CONTAINS = (dict.__contains__, set.__contains__, frozenset.__contains__)
_OF_THE_MODULE = frozenset(
    {"log", "log_dict", "current_epoch", "global_step", "device", "dtype", "hparams", "hparams_initial", "forward"}
    | {"automatic_optimization", "on_gpu", "training_step", "validation_step", "test_step", "predict_step"}
)
"""Members of a LightningModule that say the same in every run; of counters there are stand-ins."""


class MetValues:
    """The values that user code meets, and the places in them that it reads and changes.

    Args:
        places: that are noted.
        functions: that may be called with what is found.
        owned: ids of the objects whose attributes are followed where they are read.

    Attributes:
        meets_run: whether the code has asked an object of the run (a Trainer, a logger), or asked its module for one.
    """

    def __init__(self, places: NotedPlaces, functions: FollowedFunctions, owned: Collection[int]) -> None:
        self.meets_run = False
        self._places = places
        self._functions = functions
        self._owned = owned
        self._walked: dict[int, Any] = {}
        self._filled: dict[int, str] = {}  # texts alone: whether the step made a holder is seen by who else holds it
        self._classes_seen: set[int] = set()

    def attribute(self, owner: Any, name: str) -> None:
        kind = type(owner)
        self.meets_run = self.meets_run or _is_of_run(kind, name)
        if kind in TRANSPARENT or name in _FOLLOWED:
            self._attribute_of_a_parameter(owner, name)
            if isinstance(owner, torch.Tensor):
                self._places.note(Lookup(torch.Tensor, name, f"torch.Tensor.{name}"), read=True)
            return
        if name in TAKING and self._places.takes(owner):
            return
        self._places.check_usable(owner)
        if kind is RecordedObject:
            owner = owner.stands_for()
            kind = type(owner)
        if isinstance(owner, torch.nn.Module):
            self.module(owner)
        if isinstance(owner, torch.optim.Optimizer) and name in ("param_groups", "state", "step"):  # stand-ins
            if name == "param_groups":
                self._places.note(ParamGroups(owner), read=True)
            return
        if isinstance(owner, types.ModuleType):
            self._variable(owner, name)
        elif isinstance(owner, type):
            self._class_attribute(owner, name)
        elif isinstance(owner, torch.Tensor):
            self._tensor_attribute(owner, name)
        elif id(owner) in self._owned:
            self._functions.follow_class(kind)
            self._of_class(owner, name)
        elif kind is super:
            self._of_base(owner, name)
        else:
            self._object_attribute(owner, kind, name)

    def module(self, owner: torch.nn.Module) -> None:
        """A module is met; one of the tree is looked after elsewhere."""
        if id(owner) not in self._owned and id(owner) not in self._walked:
            self._walked[id(owner)] = owner
            for one in places_of(owner):
                self._places.note(one, read=True)

    def entry(self, holder: Any, key: Any) -> None:
        kind = type(holder)
        if kind in TRANSPARENT or kind is RecordedObject or isinstance(holder, _OPAQUE):
            self._functions.follow_class(kind)
            if isinstance(holder, type):
                self._functions.follow_class(holder)
            return
        if isinstance(holder, dict) and type(key) in (str, int, float, bool, tuple):
            if kind.__getitem__ is dict.__getitem__ and (key in holder or not hasattr(kind, "__missing__")):
                self._places.note(Entry(holder, key, f"an entry {key!r} of a {kind.__name__}"), read=True)
                return
        elif isinstance(holder, list) and type(key) is int and kind.__getitem__ is list.__getitem__:
            self._places.note(Item(holder, key, f"entry {key} of a {kind.__name__}"), read=True)
            return
        elif type(holder) is tuple:
            return
        self.walk(holder)

    def member(self, item: Any, holder: Any) -> None:
        kind = type(holder)
        if kind in TRANSPARENT or kind is RecordedObject:
            return
        known = isinstance(holder, dict | set | frozenset) and kind.__contains__ in _CONTAINS
        if known and (type(item) in VALUES or isinstance(item, enum.Enum)):
            self._places.note(Member(holder, item, f"whether {item!r} is in a {kind.__name__}"), read=True)
            return
        self.walk(holder)
        self.walk(item)

    def stores(self, owner: Any, name: str) -> None:
        if (original := stood_for(owner)) is not None and not hasattr(torch.Tensor, name):
            self._places.note(Opaque(original, f"{name} of a parameter"), read=False)
        if type(owner) in TRANSPARENT or id(owner) in self._owned or isinstance(owner, (torch.Tensor, _OF_A_CALL)):
            return
        if type(owner) is types.FunctionType and name == "__code__":  # which notes have replaced
            self._places.note(Opaque(owner, text_of(owner, name)), read=False)
            return
        of_class = isinstance(owner, type)
        held, descriptor = None if of_class else attributes_of(owner), None if of_class else static_lookup(type(owner), name)
        if isinstance(held, dict) and not is_memory(descriptor):
            self._places.has_attributes(owner, held)
            self._places.note(Entry(held, name, text_of(owner, name)), read=False)
        elif hasattr(descriptor, "__set__"):  # a slot, or memory of C's as a function's defaults
            self._places.note(Attribute(owner, name, text_of(owner, name)), read=False)
        else:
            self._places.note(Lookup(owner, name, text_of(owner, name)), read=False)

    def updates(self, owner: Any, name: str) -> None:
        """``owner.name += …`` may change what is there, as that of a list or an array does."""
        if type(owner) in TRANSPARENT:
            return
        held = None if isinstance(owner, type) else attributes_of(owner)
        if held is not None and name in held:
            if id(owner) in self._owned:
                note_met(held[name])
                return
            own = held[name]
        elif is_memory(own := static_lookup(owner, name)):  # else of a class
            own = getattr(owner, name, MISSING)
        if has_contents(type(own)) or keeps_in_c(type(own)):
            self.walk(own)
            self.fills(own)

    def fills(self, holder: Any) -> None:
        self._places.check_changed(holder)
        if type(holder) not in TRANSPARENT and not isinstance(holder, _OPAQUE):
            if id(holder) not in self._filled:  # a line takes longer to find than a place
                where = user_line(traceback.extract_stack()) or "the step"
                self._filled[id(holder)] = f"the contents of a {type(holder).__name__} ({where})"
            text = self._filled[id(holder)]
            self._places.note(Contents(holder, text) if self._is_small(holder) else Large(holder, text, whole=False), read=False)
            if not has_contents(type(holder)) and not is_user_class(type(holder)):  # Python's own keep theirs in an attribute
                self._fills_inside(holder)

    def _fills_inside(self, holder: Any, depth: int = 0) -> None:
        """Note changes of what a holder has its entries in: the dict of a UserDict, those in the list of a ChainMap."""
        for one in inside(holder):
            if has_contents(type(one)) and depth <= policy.DEPTH_OF_STATE:
                self.fills(one)
                if self._is_small(one):
                    self._fills_inside(one, depth + 1)

    def _variable(self, owner: types.ModuleType, name: str) -> None:
        held = vars(owner)
        text = f"{owner.__name__}.{name}"
        if name in held:
            self._places.name(Entry(held, name, text))
        elif is_plain(getattr(owner, name, None)):
            self._places.note(Attribute(owner, name, text), read=True)

    def _class_attribute(self, owner: type, name: str) -> None:
        self._functions.follow_class(owner)
        self._functions.follow_class(type(owner))
        self._places.name(Lookup(owner, name, text_of(owner, name)))

    def _of_base(self, owner: Any, name: str) -> None:
        """``super().name``."""
        order = owner.__self_class__.__mro__
        for kind in order[order.index(owner.__thisclass__) + 1 :]:
            if name in kind.__dict__:
                self._places.note(Lookup(kind, name, text_of(kind, name)), read=True)
                return

    def _tensor_attribute(self, owner: torch.Tensor, name: str) -> None:
        self._places.note(Lookup(torch.Tensor, name, f"torch.Tensor.{name}"), read=True)
        if isinstance(owner, OF_THE_STEP) or getattr(owner, "_live", None) is not None:
            return
        if name in _TENSOR_VALUES:
            self._values(owner)
        elif name in _TENSOR_ATTRIBUTES:
            asked = name if name in ("requires_grad", "dtype", "is_leaf", "grad") else "shape"
            self._places.note(Attribute(owner, asked, f"the {asked} of a tensor"), read=True)
        else:
            held: Any = vars(owner)
            if name in held:
                self._places.note(Entry(held, name, f"{name} of a tensor"), read=True)

    def _attribute_of_a_parameter(self, owner: Any, name: str) -> None:
        """Note an attribute that user code has set on a parameter, where ``owner`` is what stands for it and has it too."""
        original = stood_for(owner)
        if original is None or hasattr(torch.Tensor, name):
            return
        held, text = vars(original), f"{name} of a parameter"
        self._places.note(Entry(held, name, text) if name in held else Member(held, name, text), read=True)

    def _values(self, owner: torch.Tensor) -> None:
        """A tensor of the host's is asked for its values; those of parameters, and of the step, are looked after elsewhere."""
        plain = type(owner) is torch.Tensor and getattr(owner, "_live", None) is None and not owner.is_meta
        if not plain or owner.layout != torch.strided:
            return
        with contextlib.suppress(RuntimeError):  # one of a function that is mapped or differentiated has no memory
            self._places.note(Values(owner, "the values of a tensor"), read=True)

    def _of_class(self, owner: Any, name: str) -> None:
        """An attribute of a module of the tree that is one of its class's, if at all."""
        held = object.__getattribute__(owner, "__dict__")
        if name in held:
            self._functions.follow(held[name])
        if name in held or any(name in held.get(part, ()) for part in ("_parameters", "_buffers", "_modules")):
            return
        self._places.note(Lookup(type(owner), name, text_of(owner, name)), read=True)

    def _object_attribute(self, owner: Any, kind: type, name: str) -> None:
        self._functions.follow_class(kind)
        if isinstance(owner, _OF_A_CALL):
            return
        text = text_of(owner, name)
        if id(owner) not in self._classes_seen and (is_user_class(kind) or is_third_party(kind.__module__)):
            self._classes_seen.add(id(owner))
            self._places.note(Kind(owner, f"the class of a {kind.__qualname__}"), read=True)
        if isinstance(owner, np.random.BitGenerator) and name == "state":
            self._places.note(Result(getattr, (owner, name), text), read=True)
            return
        held = attributes_of(owner)
        found = next((one.__dict__[name] for one in kind.__mro__ if name in one.__dict__), MISSING)
        if held is not None:
            self._places.has_attributes(owner, held)
        if found is not MISSING and is_heap_type(kind):
            self._places.note(Lookup(kind, name, text), read=True)
        if keeps_in_c(kind) and (found is MISSING or is_memory(found)) and not is_plain(getattr(owner, name, None)):
            self._places.check_changed(owner)  # by what the attribute gives: it may be a view
        if isinstance(found, property):
            if held is not None and (kept := f"_{name}") in held and is_library(kind.__module__):
                self._places.note(Entry(held, kept, text), read=True)
            if not self._functions.follow(found) and is_plain(getattr(owner, name, None)):
                self._places.note(Attribute(owner, name, text), read=True)
        elif hasattr(type(found), "__set__"):
            if is_plain(getattr(owner, name, None)) or name in slots(kind):
                self._places.note(Attribute(owner, name, text), read=True)
        elif found is MISSING and isinstance(owner, dict) and name in owner:  # hparams.rate is hparams["rate"]
            self._places.note(Entry(owner, name, text), read=True)
        elif held is not None:
            self._places.note(Entry(held, name, text), read=True)

    def walk(self, value: Any, depth: int = 0) -> None:
        kind = type(value)
        if kind in TRANSPARENT or kind is RecordedObject or id(value) in self._walked:
            return
        if value is builtins.__dict__:  # in the globals of every module; a capture replaces some of them
            return
        self._places.check_usable(value)
        self._places.check_changed(value)
        if self._places.takes(value):
            refuse(f"a {kind.__name__}")
        if id(value) in self._places.iterators:
            refuse(self._places.iterators[id(value)])
        if isinstance(value, types.FunctionType | types.MethodType | type | functools.partial):
            self._functions.follow(value)
        if isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
            if not isinstance(value.__self__, types.ModuleType | type):
                self.walk(value.__self__, depth + 1)
        elif isinstance(value, torch.Tensor):
            self._values(value)
        elif isinstance(value, (*_OPAQUE, enum.Enum)) and not issubclass(kind, io.StringIO | io.BytesIO):
            self._functions.follow_class(kind)
        else:
            self._walk_contents(value, kind, depth)

    def _walk_contents(self, value: Any, kind: type, depth: int) -> None:
        if not is_user_class(kind) and is_library(kind.__module__) and not issubclass(kind, OF_NUMBERS):
            self._functions.follow_class(kind)
            return
        held = attributes_of(value)
        if not has_contents(kind) and held is None and not slots(kind):
            self._functions.follow_class(kind)
            return
        self._walked[id(value)] = value
        whole = value if isinstance(value, CONTAINERS) else held
        if whole is not None and (
            not self._is_small(value) or depth > policy.DEPTH_OF_STATE or len(self._walked) > policy.OBJECTS
        ):
            self._places.note(Large(whole, f"the contents of a {kind.__name__}"), read=True)
            return
        self._functions.follow_class(kind)
        if kind is not tuple and kind is not frozenset:
            self._places.note(Contents(value, f"the contents of a {kind.__name__}"), read=True)
        if held is not None:
            self._places.has_attributes(value, held)
        for one in inside(value):
            self._places.leads(("contents", id(value), None), one)
            self.walk(one, depth + 1)

    @staticmethod
    def _is_small(value: Any) -> bool:
        return not isinstance(value, CONTAINERS) or entries_of(value) <= policy.ENTRIES

    def forget(self) -> None:
        """Let go of what was walked: who holds an object shows whether the step has made it."""
        self._walked.clear()


@functools.cache
def _is_of_run(kind: type, name: str) -> bool:
    """Whether an attribute is one of an object of the run's, or what a module has of its run."""
    if kind in TRANSPARENT or issubclass(kind, torch.Tensor | dict):
        return False
    if not issubclass(kind, torch.nn.Module):
        return is_house(kind.__module__)
    definer = next((one.__module__ for one in kind.__mro__ if name in one.__dict__), "")
    return name in ("_trainer", "_fabric") or (definer.startswith("torch_compat.core.") and name not in _OF_THE_MODULE)
