"""Guards on what a step reads outside of modules: globals, closures, class attributes, the Trainer's attributes.

None of these can be intercepted when it is read, so they are found in the code: from the step's own function on, through
every function of the user's that its names lead to, all names that it uses are looked up where Python would. What they lead to
is compared before each step: by identity, plain values and the contents of containers and of the user's own objects by value. A
change need not matter (names of code that is not executed are looked at too): the step's Python is run again then, without
making a graph, and only if it does something else another program is made.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_compat.step.guards.locations import Contents, Entry, Item, Key, Location, Locations
from torch_compat.step.guards.module_structure import ModuleStructure
from torch_compat.step.guards.namespace_snapshot import LargeObject, NamespaceSnapshot, compares_contents, is_large
from torch_compat.step.guards.observation import Observation
from torch_compat.step.guards.one_shot_objects import emptied, unused
from torch_compat.step.guards.user_code import UserCode, looked_at, user_code
from torch_compat.step.values.names import MISSING
from torch_compat.utilities.rank_zero import rank_zero_warn
from xlatrain.bridge.errors import CaptureError

_GUARDED = 4  # how deep AttributeGuards looks into an attribute
_OFTEN = 16  # changes
_ENOUGH = 2  # changes for nothing of an object of an installed package
_ADVICE = (
    "Keep it as an attribute of the module (self.…), where a number becomes an input of the compiled step, in a tensor "
    "(self.register_buffer), or use self.global_step and self.current_epoch; or run eagerly (XLATRAIN_EXECUTOR=eager)."
)


class ChangedSurroundingsError(CaptureError):
    """The step reads something outside of the module that changes all the time, by the step or by other code.

    Attributes:
        changed: name → what it stands for, of the containers and objects whose contents the step changes.
    """

    changed: Mapping[str, Any] = types.MappingProxyType({})


class GlobalGuards:
    """The guards on everything that the steps of one module read outside of it, during a run.

    Args:
        module: on the mesh.
        roots: name → object whose methods steps may call.
        attributes: gives, by a step's name, what it has read of followed objects: what the guards on attributes do not see of
            their values counts too.
        changed: gives the ids of the objects whose changes by steps are taken back by others.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        roots: Mapping[str, Any],
        attributes: Callable[[str], Mapping[str, Any]] = lambda step: {},
        changed: Callable[[], Collection[int]] = frozenset,
    ) -> None:
        self._module = module
        self._roots = roots
        self._attributes = attributes
        self._changed = changed
        self._structure = ModuleStructure(module)
        self._steps: dict[str, _Followed] = {}
        self._functions: dict[str, tuple[Any, ...]] = {}

    def add_function(self, step: str, function: Any) -> None:
        """``step`` is no method of the module's: it runs ``function``."""
        self._functions[step] = (function,)

    def forget(self, step: str) -> None:
        """Let go of what is known of a step that is no more."""
        self._functions.pop(step, None)
        self._steps.pop(step, None)

    def looked_at(self, step: str) -> frozenset[str]:
        """See :func:`~torch_compat.step.guards.user_code.looked_at`."""
        return looked_at(step, self._module, self._roots, self._functions.get(step, ()))

    def structure_changed(self) -> bool:
        """Whether modules were replaced, or hooks registered or removed, since this was asked last."""
        return self._structure.changed()

    def key(self, step: str) -> int:
        """The number of the present state of what the step reads outside of the module."""
        self.refresh(step)
        return self._steps[step].state

    def refresh(self, step: str) -> None:
        """Look at what the step reads outside of the module; cheap where nothing has changed."""
        followed = self._steps.get(step)
        if followed is None:
            followed = self._steps[step] = _Followed()
        followed.looks += 1
        view = followed.view
        if view is None or view.structure is not self._structure.snapshot or view.changed():
            followed.refresh(self._view(step, followed, self._attributes(step)))

    def skip(self, step: str, containers: Collection[int], entries: Collection[tuple[int, Any]] = ()) -> None:
        """``step`` itself fills these containers, which are given by their ids; to be called after each capture.

        Args:
            entries: ``(id of the container, key)`` of what it assigns.
        """
        followed = self._steps.setdefault(step, _Followed())
        followed.skipped.update(containers)
        followed.assigned.update(entries)
        followed.view = None

    def comparable(self, step: str, before: int, now: int) -> bool:
        """Whether running the step's Python in two states would show all that differs: values of tensors it does not show."""
        tensors = self._steps[step].tensors
        return tensors[before] == tensors[now]

    def count_state(self, step: str, *, same: bool) -> None:
        """Count whether the step does the same in the present state as in one before.

        Raises:
            ChangedSurroundingsError: this happens too often.
        """
        self._steps[step].count_state(step, same=same)

    @staticmethod
    def refuse_changes(step: str, mutated: Mapping[str, Any]) -> None:
        """Refuse what :meth:`taken_back` gave, where there is anything.

        Raises:
            ChangedSurroundingsError: by name.
        """
        if mutated:
            error = ChangedSurroundingsError(
                f"{step} changes the contents of {min(mutated)}, which a compiled step would do only once. {_ADVICE}"
            )
            error.changed = mutated
            raise error

    @contextlib.contextmanager
    def taken_back(self, step: str) -> Iterator[dict[str, Any]]:
        """Take back, on leaving the block, what ``step`` did outside of the objects whose effects are recorded.

        Gives, filled on leaving: name → what it stands for, of the containers and objects whose contents the step has changed.

        Raises:
            ChangedSurroundingsError: it assigned names there.
            CaptureError: it drew from a random generator there, wrote to a file, or took from an iterator.
        """
        code = self._code(step)
        view = self._view(step, _Followed(), {}, code)
        mutated: dict[str, Any] = {}
        roots = (*self._module.modules(), *self._roots.values())
        observation = Observation(code.functions, roots, self._steps.setdefault(step, _Followed()).kept_changes)
        found, changed = [], []
        try:
            with unused(step, view.names), emptied(code.caches), observation.instrumented:
                yield mutated
        finally:
            rebound = [(name, before) for name, before in view.rebound() if name.owner is not None or not name.optional]
            for name, before in rebound:
                name.assign(before)
            mutated.update({text: view.value(text) for text in view.mutated()})
            found, changed = observation.settle(self._changed)
        self._steps.setdefault(step, _Followed()).add_read(found)
        if rebound:
            raise ChangedSurroundingsError(
                f"{step} assigns {rebound[0][0].text}, which a compiled step would do only once. {_ADVICE}"
            )
        if changed:
            raise ChangedSurroundingsError(f"{step} changes {changed[0]}, which a compiled step would do only once. {_ADVICE}")

    def _code(self, step: str) -> UserCode:
        return user_code(step, self._module, self._roots, self._functions.get(step, ()))

    def _view(
        self, step: str, followed: _Followed, attributes: Mapping[str, Any], code: UserCode | None = None
    ) -> NamespaceSnapshot:
        code = code or self._code(step)
        view = NamespaceSnapshot(structure=self._structure.snapshot, classes=code.classes)
        known: set[int] = set()
        for name in code.names:
            value = name.holder.get(name.name, MISSING)
            if name.optional or value is not MISSING:
                view.names.append((name, value))
                view.add(name.text, value, followed.skipped, known)
        for text, value in attributes.items():
            view.add(text, value, followed.skipped, known, guarded=_GUARDED)
        held = {(id(name.holder), name.name) for name, _ in view.names}
        view.recorded = Locations(one for one in followed.read.values() if not followed.is_known(one, held, known))
        view.hold()
        return view


@dataclass
class _Followed:
    """The names outside of the module that one step reads.

    Attributes:
        view: the snapshot of their values; None before the first refresh.
        state: the number of the present state; states with equal values have equal numbers.
        tensors: by state, the tensors, arrays and modules among the values.
        skipped: ids of containers that the step fills, and names of objects whose changes have never mattered.
        looks: the number of refreshes.
        read: the places that runs of the step's Python have read.
        assigned: ``(id of the container, key)`` of the entries that the step itself assigns.
        kept_changes: the places in installed packages that runs of the step's Python have changed, once: a second time matters.
    """

    view: NamespaceSnapshot | None = None
    state: int = 0
    tensors: list[Hashable] = field(default_factory=list)
    skipped: set[int | str] = field(default_factory=set)
    looks: int = 0
    read: dict[Key, Location] = field(default_factory=dict)
    assigned: set[tuple[int, Any]] = field(default_factory=set)
    kept_changes: dict[Key, Location] = field(default_factory=dict)
    _numbers: dict[Hashable, int] = field(default_factory=dict)
    _kept: list[NamespaceSnapshot] = field(default_factory=list)  # an id must not be used twice
    _changed: list[str] = field(default_factory=list)
    _same: int = 0
    _different: int = 0
    _wholes: dict[Hashable, LargeObject] = field(default_factory=dict)
    _for_nothing: dict[str, int] = field(default_factory=dict)
    _late: LargeObject | None = None

    def add_read(self, found: Collection[Location]) -> None:
        """A run of the step's Python has read these places."""
        if new := {one.key: one for one in found if one.key not in self.read}:
            self.read.update(new)
            self.view = None

    def is_known(self, one: Location, held: Collection[tuple[int, Any]], known: Collection[int]) -> bool:
        """Whether a place is compared otherwise, or is the step's own: ``held`` by name, ``known`` with its contents."""
        place = (id(one.owner), one.name)
        if isinstance(one, Entry | Item) and (place in held or place in self.assigned):
            return True
        if not isinstance(one, Contents | Item) or is_large(one.owner):
            return False
        return id(one.owner) in self.skipped or (id(one.owner) in known and compares_contents(one.owner))

    def refresh(self, view: NamespaceSnapshot) -> None:
        for whole in view.wholes:
            before = self._wholes.get(whole.key)
            if before is not None:
                whole.generation = before.generation + (not whole.equals(before))
            self._wholes[whole.key] = whole
        self._late = None if self.view is None else self.view.late
        parts = view.parts()
        before = {} if self.view is None else self.view.parts()
        self._changed = [text for text in {**before, **parts} if before.get(text) != parts.get(text)] if before else []
        self.view = view
        fingerprint = tuple(sorted(parts.items(), key=lambda part: part[0]))
        self.state = self._numbers.setdefault(fingerprint, len(self._numbers))
        if self.state == len(self.tensors):
            self.tensors.append(view.tensors())
            self._kept.append(view)

    def count_state(self, step: str, *, same: bool) -> None:
        if not same and self._late is not None:
            error = ChangedSurroundingsError(
                f"{step} reads {self._late.text}, with {self._late.size:,} entries, of which some were changed in place during "
                f"the last {self._late.every:,} steps: so many entries are not compared before each step, and some of these "
                "steps may have run with the old ones. Change a small list or dict, or assign a new one, which is seen at once. "
                f"{_ADVICE}"
            )
            error.recoverable = False
            raise error
        if same and self._changed and (foreign := self._foreign(self._changed)):
            self._leave_alone(step, foreign)
            return
        self._same += same
        self._different += not same
        often = self._same >= _OFTEN and self._same * 8 > self.looks  # refreshing costs more than it is worth then
        if often or self._different > _OFTEN:
            name = self._changed[0] if self._changed else "something outside of the module"
            raise ChangedSurroundingsError(f"{step} reads {name}, which changes all the time. {_ADVICE}")

    def _foreign(self, texts: Collection[str]) -> list[LargeObject]:
        """The objects of installed packages of these names; none if a name is another thing's."""
        if self.view is None:  # the run that compared has read more
            return []
        found = {whole.text: whole for whole in self.view.wholes if whole.kind is not None}
        return [found[text] for text in texts] if found.keys() >= set(texts) else []

    def _leave_alone(self, step: str, foreign: Collection[LargeObject]) -> None:
        """They have changed for nothing: a progress bar, a cache."""
        for whole in foreign:
            self._for_nothing[whole.text] = self._for_nothing.get(whole.text, 0) + 1
            if self._for_nothing[whole.text] == _ENOUGH and whole.kind is not None:
                self.skipped.add(whole.text)
                self.view = None
                rank_zero_warn(
                    f"{step} names {whole.text}, a {whole.kind.__module__}.{whole.kind.__qualname__}, whose contents have "
                    f"changed {_ENOUGH} times without an effect on the step. They are not looked at any longer: should the step "
                    "depend on them, keep what it reads as an attribute of the module (self.…), or run eagerly "
                    "(XLATRAIN_EXECUTOR=eager)"
                )
