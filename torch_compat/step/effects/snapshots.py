"""Snapshots of the objects that a step may change: what each held, whether it holds something else now, and the way back."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
import torch.utils._pytree as pytree

from torch_compat.step.effects.descriptions import VALUES
from torch_compat.step.effects.effects import ObjectPath, is_plain, replace_contents
from torch_compat.step.effects.made_objects import keeps_of_step
from torch_compat.step.host.arrays import HostArray
from torch_compat.step.host.batch_texts import TracedText, TracedTexts
from torch_compat.step.host.calls import is_traced
from torch_compat.step.host.host_future import HostFuture
from torch_compat.step.host.later_text import LaterText
from torch_compat.step.host.scalars import HostScalar, was_written
from torch_compat.step.values.dict_contents import put_entries, put_in_order
from torch_compat.step.values.generators import same_state, set_state, state_of, use_of
from torch_compat.step.values.marks import PLAIN, holds_the_same, same
from torch_compat.utilities.metric_types import is_metric_or_collection
from xlatrain.bridge.capture.stand_ins import is_still, stood_for
from xlatrain.bridge.tensors.live import is_live

FROM_THE_STEP = (torch.Tensor, HostArray, HostScalar, HostFuture, LaterText, TracedText, TracedTexts)
"""Classes of values that a running step alone has."""
CACHES_OF_PARAMETERS = frozenset({"_flat_weights", "_flat_weight_refs"})
"""Attributes in which torch's recurrent layers keep their parameters once more: taken back, but no effects of the step."""
HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called"),
)
"""Dicts of a module in which ``register_…_hook`` keeps hooks, and what it notes of them."""
_MODULE_INTERNALS = frozenset(
    {
        *HOOKS,
        "_parameters",
        "_buffers",
        "_modules",
        "_non_persistent_buffers_set",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
        "_is_full_backward_hook",
        "_trainer",
        "_fabric",
        "_kept_steps",
        "_current_fx_name",
        "_metric_attributes",
        "_hparams",
        "_hparams_initial",
        "_param_requires_grad_state",  # of toggle_optimizer, whose flags a captured step follows itself
        "trainer",
    }
)


@dataclass
class Found:
    """The changes that a run has made, found as they are taken back.

    Attributes:
        there_before: ids of the containers and objects that were there.
        written: attributes that were assigned without being read, by the id of their owner.
        changes: the kind of a change, its place, the key or name there, and the value.
        made: places and keys that were not there before.
        left: what has the run's changes come about again, where no record can.
        once: whether that cannot be done more than once.
        problems: what a program cannot do; by the kind of it, the first of each.
    """

    there_before: set[int] = field(default_factory=set)
    written: set[tuple[int, str]] = field(default_factory=set)
    changes: list[tuple[str, ObjectPath, Any, Any]] = field(default_factory=list)
    made: set[tuple[ObjectPath, Hashable]] = field(default_factory=set)
    left: list[Callable[[], None]] = field(default_factory=list)
    once: bool = False
    problems: dict[str, str] = field(default_factory=dict)

    def is_made(self, value: Any) -> bool:
        """Whether the step made a module that has tensors of its own, or one that holds such."""
        if not isinstance(value, torch.nn.Module) or is_metric_or_collection(value):
            return False
        made = [one for one in value.modules() if id(one) not in self.there_before]
        held = [tensor for one in made for tensor in (*one._parameters.values(), *one._buffers.values())]
        return any(is_traced(tensor) and not is_live(tensor) for tensor in held)


@dataclass
class Snapshot(ABC):
    """An object as it was before a run.

    Attributes:
        place: where it is.
        holder: the object.
        held: a copy of what was in it.
    """

    place: ObjectPath
    holder: Any
    held: Any
    ORDER: ClassVar[int] = 0
    """Which are taken back before others, and whose changes come first."""

    def is_changed(self) -> bool:
        """Whether the object holds others now; what is in these is looked at as they are."""
        return False

    def is_written(self) -> bool:
        """The same, also where its tensors have other values."""
        return self.is_changed()

    @property
    def does(self) -> str:
        """The words for a step that changes it."""
        return f"changes {self.place}"

    @abstractmethod
    def take_back(self, found: Found) -> None:
        """Add to ``found`` what has changed, and have the object hold what it held."""


class OfStream(Snapshot):
    """A random generator or a file: its state."""

    def is_changed(self) -> bool:
        return not same_state(state_of(self.holder), self.held)

    @property
    def does(self) -> str:
        return use_of(self.holder, str(self.place))

    def take_back(self, found: Found) -> None:
        after = state_of(self.holder)
        if same_state(after, self.held):
            return
        set_state(self.holder, self.held)
        found.problems.setdefault(
            "stream",
            f"the step {self.does}, which a compiled step would do only once. Draw with torch (torch.rand, …) in the step, or do "
            "it in a hook or in the dataset",
        )
        found.left.append(functools.partial(set_state, self.holder, after))
        found.once = found.once or type(after) is int  # a file on disk


class OfArray(Snapshot):
    """An array of NumPy's."""

    ORDER = 1

    def is_changed(self) -> bool:
        return not holds_the_same(self.holder, self.held)

    def take_back(self, found: Found) -> None:
        if not self.is_changed():
            return
        found.left.append(functools.partial(np.copyto, self.holder, self.holder.copy()))
        self.holder[...] = self.held
        found.problems.setdefault(
            "array",
            f"the step writes to the numpy array {self.place}, which a compiled step would do only once. Keep it in a buffer "
            "(self.register_buffer), or write to it in a hook such as on_train_batch_end",
        )


class OfContents(Snapshot):
    """A container, or an object by its attributes."""

    ORDER = 2


class OfSequence(OfContents):
    """A list or deque."""

    def is_changed(self) -> bool:
        return len(self.holder) != len(self.held) or any(map(_differs, self.held, self.holder))

    def take_back(self, found: Found) -> None:
        now, before = list(self.holder), self.held
        there = {id(one): one for one in before}
        own = [one if (original := stood_for(one)) is None else there.get(id(original), one) for one in now]
        if len(own) == len(before) and all(a is b for a, b in zip(before, own, strict=True)):
            if any(a is not b for a, b in zip(before, now, strict=True)):
                replace_contents(self.holder, before)
            return
        kept = _kept(before, own, getattr(self.holder, "maxlen", None))
        if kept is not None:
            found.changes += [("append", self.place, None, item) for item in own[kept:]]
        else:
            live = [one if is_live(one) else traced for one, traced in zip(own, now, strict=True)]
            found.changes.append(("contents", self.place, None, live))
        replace_contents(self.holder, before)


class OfSet(OfContents):
    """A set."""

    def is_changed(self) -> bool:
        return self.holder != self.held

    def take_back(self, found: Found) -> None:
        if self.is_changed():
            found.changes.append(("contents", self.place, None, set(map(exact_key, self.holder))))
            replace_contents(self.holder, self.held)


class OfMapping(OfContents):
    """A dict."""

    kind: ClassVar[str] = "item"

    def now(self) -> dict[Any, Any]:
        """The entries that are in it now."""
        return self.holder

    def is_changed(self) -> bool:
        now = self.now()
        return now.keys() != self.held.keys() or any(_differs(self.held[key], one) for key, one in now.items())

    def take_back(self, found: Found) -> None:
        now = {exact_key(key): item for key, item in self.now().items()}
        written = {name for owner, name in found.written if owner == id(self.holder)}
        for key, item in now.items():
            if key not in self.held or _differs(self.held[key], item) or (key in written and _is_same_each_time(item)):
                found.changes.append((f"set{self.kind}", self.place, key, item))
                if key not in self.held:
                    found.made.add((self.place, key))
        found.changes += [(f"del{self.kind}", self.place, key, None) for key in self.held if key not in now]
        reordered = self._is_reordered(now, found)
        if reordered or now.keys() != self.held.keys() or any(now[key] is not self.held[key] for key in now):
            self._put_back()

    def _is_reordered(self, now: Mapping[Any, Any], found: Found) -> bool:
        stayed = [key for key in now if key in self.held]
        if stayed == [key for key in self.held if key in now]:
            return False
        found.left.append(functools.partial(put_in_order, self.holder, stayed))
        found.once = found.once or list(now)[: len(stayed)] != stayed  # what is new comes after them
        found.problems.setdefault(
            "order",
            f"the step changes the order of the entries of {self.place}, which a compiled step would do only once. Do it in a "
            "hook such as on_train_batch_end",
        )
        return True

    def _put_back(self) -> None:
        put_entries(self.holder, self.held)


class OfAttributes(OfMapping):
    """An object."""

    kind = "attr"

    def now(self) -> dict[Any, Any]:
        return attributes_to_follow(self.holder)

    def _is_reordered(self, now: Mapping[Any, Any], found: Found) -> bool:
        return False

    def _put_back(self) -> None:
        attributes = self.holder.__dict__
        for key in [key for key in attributes_to_follow(self.holder) if key not in self.held]:
            del attributes[key]
        attributes.update(self.held)


class OfBuffers(Snapshot):
    """A module: its buffers that are no state of the program.

    Attributes:
        state: the names of those that are.
    """

    ORDER = 3

    def __init__(self, place: ObjectPath, module: torch.nn.Module) -> None:
        # Those that are traced by now are state of the program; a live one is of a module that is not in the tree.
        held = module._buffers.items()
        self.state = {key for key, one in held if one is not None and is_traced(one) and not is_live(one)}
        super().__init__(place, module, {key: one for key, one in held if key not in self.state})

    def is_written(self) -> bool:
        tensors = (*self.holder._parameters.values(), *self.holder._buffers.values())
        return any(one is not None and is_traced(one) and was_written(one) for one in tensors)

    def take_back(self, found: Found) -> None:
        """Find buffers that the step made or replaced: registered in it, or None before."""
        buffers = self.holder._buffers
        for key, now in list(buffers.items()):
            if key in self.state or (key in self.held and self.held[key] is now) or now is None:
                continue
            if key in self.held and is_still(self.held[key], now):
                buffers[key] = self.held[key]
                continue
            found.changes.append(("setbuffer", self.place, key, now))
            if key in self.held:
                buffers[key] = self.held[key]
            else:
                del buffers[key]
                found.made.add((self.place, key))


class OfHooks(Snapshot):
    """A module: the hooks that are registered on it."""

    ORDER = 4

    def __init__(self, place: ObjectPath, module: torch.nn.Module) -> None:
        super().__init__(place, module, {name: dict(module.__dict__[name]) for name in HOOKS if module.__dict__.get(name)})

    def take_back(self, found: Found) -> None:
        """Find hooks that the step has registered, or removed, and left so."""
        for name in HOOKS:
            now, before = self.holder.__dict__.get(name) or {}, self.held.get(name, {})
            if now.keys() != before.keys():
                now.clear()
                now.update(before)
                found.problems.setdefault(
                    "hook",
                    f"the step registers a hook on {self.place}, or removes one, and leaves it so, which a compiled step would "
                    "do only once. Remove it again in the same step, or do it in a hook such as on_train_batch_start",
                )


class OfTensors(Snapshot):
    """A module: the parameters and modules in it."""

    ORDER = 5

    def __init__(self, place: ObjectPath, module: torch.nn.Module) -> None:
        super().__init__(place, module, (dict(module._parameters), dict(module._modules)))

    def take_back(self, found: Found) -> None:
        """Find parameters and modules that the step put there, which would stay without values."""
        parameters, children = self.held
        self._put_back(self.holder._parameters, parameters, _is_parameter, found)
        self._put_back(self.holder._modules, children, found.is_made, found)

    def _put_back(self, now: dict[str, Any], before: dict[str, Any], ends: Callable[[Any], bool], found: Found) -> None:
        changed = [key for key in {**before, **now} if now.get(key) is not before.get(key)]
        if made := [key for key in changed if ends(now.get(key))]:
            found.problems.setdefault(
                "tensor",
                f"the step makes {self.place.then('attr', made[0])}, or replaces it, which a compiled step would do only once, "
                "without its values. Make modules and parameters in __init__ or configure_model, where they get an optimizer too",
            )
            now.clear()
            now.update(before)


def attributes_to_follow(value: Any) -> dict[str, Any]:
    """The attributes of an object, but for those in which a module keeps what is looked at by itself."""
    return {key: item for key, item in value.__dict__.items() if key not in _MODULE_INTERNALS}


def snapshot_of(place: ObjectPath, container: list[Any] | deque[Any] | dict[Any, Any] | set[Any]) -> OfContents:
    """The snapshot of a container."""
    if isinstance(container, list | deque):
        return OfSequence(place, container, list(container))
    kind, copied = (OfMapping, dict) if isinstance(container, dict) else (OfSet, set)
    return kind(place, container, copied(container))


def exact_key(key: Any) -> Any:
    """A key or an entry of a set: of a counter, whose hash was asked for, the number that is guarded since then."""
    if type(key) is HostScalar:
        return key._exact()
    return tuple(map(exact_key, key)) if type(key) is tuple else key


def _is_parameter(value: Any) -> bool:
    """Whether it is a parameter: fastai's WeightDrop puts a plain tensor in the place of one for the time of a step."""
    return isinstance(value, torch.nn.Parameter)


def _kept(before: list[Any], now: list[Any], most: int | None) -> int | None:
    """The number of entries of ``now`` that were there before, if all others were appended; None if it came about otherwise.

    Args:
        most: of a deque that drops its first entries.
    """
    for dropped in range(1 + (len(before) if most == len(now) else 0)):
        rest = before[dropped:]
        if len(rest) <= len(now) and all(a is b for a, b in zip(rest, now, strict=False)):
            return len(rest)
    return None


def _is_same_each_time(item: Any) -> bool:
    """Whether an assignment of ``item`` counts though it changes nothing: numbers, texts, shapes, devices, dtypes, parameters."""
    if isinstance(item, tuple | frozenset):
        return all(map(_is_same_each_time, item))
    return is_plain(item) or isinstance(item, VALUES) or stood_for(item) is not None


def _differs(before: Any, now: Any) -> bool:
    """Whether an attribute's value changed; containers that stayed the same object are compared on their own."""
    if same(now, before) or is_still(before, now):
        return False
    if isinstance(now, list | dict | deque | set):
        return True  # another one, whatever is in it: it may be at other places, too
    leaves = pytree.tree_leaves(now)
    if isinstance(before, PLAIN) or any(issubclass(type(leaf), FROM_THE_STEP) for leaf in (before, *leaves)):
        return True
    if any(map(keeps_of_step, leaves)):  # whose class may compare tensors
        return True
    try:
        return bool(before != now)
    except Exception:  # values of a user's own may compare in any way, and arrays have no truth value
        return True
