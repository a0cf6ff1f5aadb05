"""What a step reads outside of the objects that the guards follow: globals, closures, class attributes, the Trainer's attributes.

None of these can be intercepted when it is read, so they are found in the code: from the step's own function on, through
every function of the user's that its names lead to, all names that it uses are looked up where Python would. What they lead to
is compared before each step: by identity, plain values and the contents of containers and of the user's own objects by value. A
change need not matter (names of code that is not executed are looked at too): the step's Python is run again then, without
making a graph, and only if it does something else another program is made.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from torch_compat.functional.effects import is_user_object
from torch_compat.functional.module_structure import ModuleStructure
from torch_compat.functional.user_code import MISSING, Name, is_user_class, names_of
from xlatrain.bridge.errors import CaptureError

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_DEPTH = 8
_LARGE = 1000  # entries: a container of data, not of settings
_LARGE_ARRAY = 1 << 16  # bytes
_GUARDED = 4  # how deep HostGuards looks into an attribute
_OFTEN = 16  # changes
_ADVICE = (
    "Keep it as an attribute of the module (self.…), where a number becomes an input of the compiled step, in a tensor "
    "(self.register_buffer), or use self.global_step and self.current_epoch; or run eagerly (XLATRAIN_EXECUTOR=eager)."
)


class ChangedSurroundingsError(CaptureError):
    """The step reads something outside of the module that it, or somebody else, changes all the time."""


@dataclass
class _View:
    """How the surroundings looked: names with their values, containers and arrays with copies of their contents."""

    names: list[tuple[Name, Any]] = field(default_factory=list)
    contents: list[tuple[str, Any, Any]] = field(default_factory=list)
    arrays: list[tuple[str, np.ndarray, np.ndarray]] = field(default_factory=list)
    structure: Hashable = ()

    def add(self, text: str, value: Any, skipped: Collection[int], known: set[int], *, depth: int = 0, guarded: int = 0) -> None:
        """Take in what a value holds.

        Args:
            guarded: to what depth others follow the contents of containers and of objects with ``__dict__``.
        """
        if isinstance(value, _PLAIN) or id(value) in known or depth > _DEPTH:
            return
        known.add(id(value))
        if isinstance(value, np.ndarray):
            if value.nbytes <= _LARGE_ARRAY:
                self.arrays.append((text, value, value.copy()))
            return
        holder = _holder(value)
        if holder is None or len(holder) > _LARGE or id(holder) in skipped:
            return
        if isinstance(holder, _Slots | _Tuple):
            guarded = 0
        if depth >= guarded and not isinstance(holder, _Tuple):
            self.contents.append((text, holder, holder.copy()))
        for item in holder.values() if isinstance(holder, Mapping) else holder:
            self.add(text, item, skipped, known, depth=depth + 1, guarded=guarded)

    def changed(self) -> bool:
        """Cheap: called before every step."""
        for get, name, before in self._gets:
            now = get(name, MISSING)
            if now is not before and not _equal(now, before):
                return True
        for _, holder, copy in self.contents:
            if _unlike(holder, copy):
                return True
        return any(not np.array_equal(array, copy) for _, array, copy in self.arrays)

    @functools.cached_property
    def _gets(self) -> list[tuple[Callable[..., Any], str, Any]]:
        return [(name.holder.get, name.name, value) for name, value in self.names]

    def rebound(self) -> list[tuple[Name, Any]]:
        """The names that have another value now, with their values of before."""
        return [
            (name, before)
            for name, before in self.names
            if (now := name.holder.get(name.name, MISSING)) is not before and not _equal(now, before)
        ]

    def parts(self) -> dict[str, Hashable]:
        """What is compared, by the text of its name."""
        found: dict[str, list[Hashable]] = {}
        for name, value in self.names:
            found.setdefault(name.text, []).append(_shallow(value))
        for text, _, copy in self.contents:
            items = copy.items() if isinstance(copy, dict) else enumerate(copy)
            found.setdefault(text, []).append(tuple((repr(key), _shallow(item)) for key, item in items))
        for text, _, copy in self.arrays:
            found.setdefault(text, []).append((str(copy.dtype), copy.shape, copy.tobytes()))
        return {"the module's structure": self.structure, **{text: tuple(parts) for text, parts in found.items()}}

    def tensors(self) -> Hashable:
        """What is not seen where two runs of a step are compared, which see shapes only."""
        opaque = [(name.text, id(value)) for name, value in self.names if isinstance(value, (torch.Tensor, torch.nn.Module))]
        return self.structure, tuple(opaque), tuple((text, copy.tobytes()) for text, _, copy in self.arrays)


class Surroundings:
    """Follows what the steps of one module read outside of it, during a run.

    Args:
        module: on the mesh.
        roots: name → object whose methods steps may call.
    """

    def __init__(self, module: torch.nn.Module, roots: Mapping[str, Any]) -> None:
        self._module = module
        self._roots = roots
        self._structure = ModuleStructure(module)
        self._steps: dict[str, _Followed] = {}

    def structure_changed(self) -> bool:
        """Whether modules were replaced, or hooks registered or removed, since this was asked last."""
        return self._structure.changed()

    def state(self, step: str, attributes: Callable[[], Mapping[str, Any]]) -> int:
        """The number of the present state of the surroundings; cheap where nothing has changed.

        Args:
            attributes: gives what the step has read of followed objects: what the guards do not see of their values counts too.
        """
        followed = self._steps.setdefault(step, _Followed())
        followed.looks += 1
        view = followed.view
        if view is None or view.structure is not self._structure.snapshot or view.changed():
            followed.look(self._view(step, followed, attributes()))
        return followed.state

    def skip(self, step: str, containers: Collection[int]) -> None:
        """``step`` itself fills these containers, which are given by their ids; to be called after each capture."""
        followed = self._steps.setdefault(step, _Followed())
        followed.skipped.update(containers)
        followed.view = None

    def comparable(self, step: str, before: int, now: int) -> bool:
        """Whether running the step's Python in two states would show all that differs: values of tensors it does not show."""
        tensors = self._steps[step].tensors
        return tensors[before] == tensors[now]

    def note(self, step: str, *, same: bool) -> None:
        """Whether the step does the same in the present state as in one before.

        Raises:
            ChangedSurroundingsError: this happens too often.
        """
        self._steps[step].note(step, same=same)

    @contextlib.contextmanager
    def assigned_by_nobody(self, step: str) -> Iterator[None]:
        """While ``step`` is captured: names outside of the module that it assigns get their values back.

        Raises:
            ChangedSurroundingsError: there were some.
        """
        view = self._view(step, _Followed(), {})
        try:
            yield
        finally:
            rebound = [(name, before) for name, before in view.rebound() if name.owner is not None or not name.optional]
            for name, before in rebound:
                name.assign(before)
        if rebound:
            raise ChangedSurroundingsError(
                f"{step} assigns {rebound[0][0].text}, which a compiled step would do only once. {_ADVICE}"
            )

    def _view(self, step: str, followed: _Followed, attributes: Mapping[str, Any]) -> _View:
        view = _View(structure=self._structure.snapshot)
        known: set[int] = set()
        for name in names_of(step, self._module, self._roots):
            value = name.holder.get(name.name, MISSING)
            if name.optional or value is not MISSING:
                view.names.append((name, value))
                view.add(name.text, value, followed.skipped, known)
        for text, value in attributes.items():
            view.add(text, value, followed.skipped, known, guarded=_GUARDED)
        return view


@dataclass
class _Followed:
    """The surroundings of one step.

    Attributes:
        view: how they look; None before the first look.
        state: their number.
        tensors: of every state what tensors, arrays and modules there are.
        skipped: ids of containers that the step fills.
        looks: how often they were asked for.
    """

    view: _View | None = None
    state: int = 0
    tensors: list[Hashable] = field(default_factory=list)
    skipped: set[int] = field(default_factory=set)
    looks: int = 0
    _numbers: dict[Hashable, int] = field(default_factory=dict)
    _kept: list[_View] = field(default_factory=list)  # an id must not be used twice
    _changed: list[str] = field(default_factory=list)
    _same: int = 0
    _different: int = 0

    def look(self, view: _View) -> None:
        parts = view.parts()
        before = {} if self.view is None else self.view.parts()
        self._changed = [text for text in {**before, **parts} if before.get(text) != parts.get(text)] if before else []
        self.view = view
        fingerprint = tuple(sorted(parts.items(), key=lambda part: part[0]))
        self.state = self._numbers.setdefault(fingerprint, len(self._numbers))
        if self.state == len(self.tensors):
            self.tensors.append(view.tensors())
            self._kept.append(view)

    def note(self, step: str, *, same: bool) -> None:
        self._same += same
        self._different += not same
        often = self._same >= _OFTEN and self._same * 8 > self.looks  # that costs more than it is worth
        if often or self._different > _OFTEN:
            name = self._changed[0] if self._changed else "something outside of the module"
            raise ChangedSurroundingsError(f"{step} reads {name}, which changes all the time. {_ADVICE}")


def _holder(value: Any) -> Any:
    """The container in which the contents of ``value`` are; None where there are none to look at."""
    if isinstance(value, dict | list | set | deque):
        return value
    if isinstance(value, tuple):
        return _Tuple(value)
    if is_user_object(value) and not isinstance(value, torch.nn.Module):
        return value.__dict__
    slots = tuple(name for kind in type(value).__mro__ for name in _slots(kind))
    return _Slots(value, slots) if slots else None


def _slots(kind: type) -> tuple[str, ...]:
    """Those of a class of the user's."""
    names = kind.__dict__.get("__slots__", ()) if is_user_class(kind) else ()
    return (names,) if isinstance(names, str) else tuple(name for name in names if not name.startswith("__"))


class _Tuple(tuple[Any, ...]):
    """Does not change, but what is in it may."""

    __slots__ = ()


class _Slots(Mapping[str, Any]):
    """The attributes of an object without ``__dict__``."""

    def __init__(self, owner: Any, slots: tuple[str, ...]) -> None:
        self._owner = owner
        self._names = slots

    def __getitem__(self, name: str) -> Any:
        return getattr(self._owner, name, MISSING)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def copy(self) -> dict[str, Any]:
        return dict(self)


def _equal(now: Any, before: Any) -> bool:
    return type(now) is type(before) and isinstance(now, _PLAIN) and (now == before or now != now)


def _unlike(holder: Any, copy: Any) -> bool:
    try:
        return bool(holder != copy)
    except Exception:  # tensors and arrays that are not the same object have no truth value
        return True


def _shallow(value: Any) -> Hashable:
    if isinstance(value, _PLAIN):
        return (type(value).__name__, repr(value))
    if isinstance(value, dict | list | set | deque):
        return (type(value).__name__, id(value))
    return ("function", value.__code__) if isinstance(value, types.FunctionType) else ("object", id(value))
