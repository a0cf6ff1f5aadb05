"""Guards on what a step reads outside of modules: the places that its runs were seen to read, compared before each step.

A change need not matter: the step's Python is run again then, without making a graph, and only if it does something else another
program is made.
"""

from __future__ import annotations

import contextlib
import types
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_compat.step.guards.compared_places import Locations
from torch_compat.step.guards.locations import Attribute, Contents, Entry, Item, Key, Large, Location, Lookup, is_variable
from torch_compat.step.guards.looks import looked_at
from torch_compat.step.guards.module_structure import ModuleStructure
from torch_compat.step.guards.noted_places import Change, KeptChanges
from torch_compat.step.guards.observation import Observation
from torch_compat.step.guards.one_shot_objects import emptied, taking
from torch_compat.step.guards.pulled_places import GIVEN
from torch_compat.step.values.taken_values import TAKEN
from torch_compat.step.values.user_objects import attributes_of
from torch_compat.utilities.rank_zero import rank_zero_warn
from xlatrain.bridge.errors import CaptureError
from xlatrain.host.garbage import older_left_out

_OFTEN = 16  # changes
_OF_A_FIT = frozenset({"optimizers", "lr_schedulers", "toggle_optimizer", "untoggle_optimizer", "manual_backward"})
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
    per_batch = True


class PlaceGuards:
    """The guards on everything that the steps of one module read outside of it, during a run.

    Args:
        module: on the mesh.
        roots: name → object whose methods steps may call.
        watched: gives, by a step's name, the ids of containers that other guards compare.
        changed: gives the ids of the objects whose changes by steps are taken back by others.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        roots: Mapping[str, Any],
        watched: Callable[[str], Collection[int]] = lambda step: (),
        changed: Callable[[], Collection[int]] = frozenset,
    ) -> None:
        self._module = module
        self._roots = roots
        self._watched = watched
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
        """The names with which functions that the step has run do more than to fill what they stand for."""
        return looked_at(self._of(step).functions)

    def reads(self, step: str, holder: Any, key: Any) -> bool:
        """Whether ``step`` has read an entry, or all that is there; of an attribute the holder is the dict of its object."""
        for one in self._of(step).read.values() if holder is not None else ():
            if isinstance(one, Entry | Item) and one.owner is holder and one.name == key:
                return True
            if isinstance(one, Contents | Large) and (one.owner is holder or attributes_of(one.owner) is holder):
                return True
        return False

    def asks_run(self, step: str) -> bool:
        """Whether a member of a class of ours was asked for that gives objects: which it gives is compared nowhere.

        Of the module's own only what gives optimizers and schedulers counts: its others give what is its own or the Trainer's.
        """
        read = self._of(step).read.values()
        answers = {one.name for one in read if isinstance(one, Attribute)}
        return any(isinstance(one, Lookup) and _asks_run(one, answers) for one in read)

    def meets_run(self, step: str) -> bool:
        """Whether the step's Python has asked an object of its run, or its module for one, so that it belongs to a Trainer."""
        return self._of(step).meets_run

    def begin_run(self, roots: Mapping[str, Any]) -> None:
        """Another run begins, with these objects under the names of the old."""
        self._roots = roots
        for followed in self._steps.values():
            followed.begin_run()

    def structure_changed(self) -> bool:
        """Whether modules were replaced, or hooks registered or removed, since this was asked last."""
        return self._structure.changed()

    def key(self, step: str) -> int:
        """The number of the present state of what the step reads outside of the module."""
        self.refresh(step)
        return self._steps[step].state

    def refresh(self, step: str) -> None:
        """Look at what the step reads outside of the module; cheap where nothing has changed."""
        followed = self._of(step)
        followed.looks += 1
        places = followed.places
        if places is None or places.structure is not self._structure.snapshot or places.changed():
            followed.refresh(Locations(followed.compared(self._watched(step)), self._structure.snapshot))

    def skip(self, step: str, containers: Collection[int], entries: Collection[tuple[int, Any]] = ()) -> None:
        """``step`` itself fills these containers, which are given by their ids; to be called after each capture.

        Args:
            entries: ``(id of the container, key)`` of what it assigns.
        """
        followed = self._of(step)
        followed.skipped.update(containers)
        followed.assigned.update(entries)
        followed.outgrow()

    def comparable(self, step: str, before: int, now: int) -> bool:
        """Whether running the step's Python in two states would show all that differs: values of tensors it does not show."""
        old, new = self._steps[step].tensors[before], self._steps[step].tensors[now]
        return all(old[key] == new[key] for key in old.keys() & new.keys())

    def count_state(self, step: str, *, same: bool) -> None:
        """Count whether the step does the same in the present state as in one before.

        Raises:
            ChangedSurroundingsError: this happens too often.
        """
        self._steps[step].count_state(step, same=same)

    @staticmethod
    def refuse_changes(step: str, changes: Collection[Change]) -> None:
        """Refuse what :meth:`taken_back` gave, where there is anything.

        Raises:
            ChangedSurroundingsError: by name.
        """
        mutated = {one.name: one.value for one in changes}
        if mutated:
            error = ChangedSurroundingsError(
                f"{step} changes the contents of {min(mutated)}, which a compiled step would do only once. {_ADVICE}"
            )
            error.changed = mutated
            raise error

    @contextlib.contextmanager
    def taken_back(self, step: str, *, attended: bool = False) -> Iterator[list[Change]]:
        """Take back, on leaving the block, what ``step`` did outside of the objects whose effects are recorded.

        Gives, filled on leaving: what the step has changed there, of containers and objects whose changes can be recorded; of an
        attended step all, which can be put there once more.

        Args:
            attended: whether its Python runs before each of its programs.

        Raises:
            ChangedSurroundingsError: it did there what cannot be repeated: it assigned a name, drew from a random generator,
                wrote to a file.
            CaptureError: it took from an iterator.
        """
        followed = self._of(step)
        observation = Observation(
            self._functions.get(step, ()),
            (*self._module.modules(), *self._roots.values()),
            followed.kept_changes,
            getattr(step, "method", step),
            TAKEN if attended else None,
        )
        kept: list[Change] = []
        changes = []
        with older_left_out():
            try:
                if attended:
                    TAKEN.rewind()
                with emptied(), taking() if attended else contextlib.nullcontext(), observation.instrumented:
                    yield kept
                    for one in GIVEN.values():
                        one.check()
            finally:
                GIVEN.clear()
                found, changes = observation.settle(self._taken_back_by_others, attended=attended)
                kept += [one for one in changes if attended or one.value is not None]
                followed.add_read(found)
                followed.meets_run = followed.meets_run or observation.meets_run
                followed.functions.update(dict.fromkeys(observation.functions))
        for one in changes:
            if one.redo is None if attended else one.value is None:
                advice = one.advice or _ADVICE
                error = ChangedSurroundingsError(f"{step} {one.does}, which a compiled step would do only once. {advice}")
                error.changed = {one.name: one.value for one in changes if attended and one.value is not None}
                raise error

    def kept_changes(self, step: str) -> KeptChanges:
        """Changes that runs of ``step`` have made in installed packages, which have stayed."""
        return dict(self._of(step).kept_changes)

    def take_back_kept(self, step: str, since: KeptChanges) -> None:
        """Take back what has stayed since :meth:`kept_changes` gave ``since``: the step runs again, eagerly.

        Names of modules and classes stay what they are: a package that was made ready is.
        """
        kept = self._of(step).kept_changes
        for key, (location, before) in list(kept.items()):
            if key not in since and not is_variable(location):
                location.restore(before)
                del kept[key]

    def _taken_back_by_others(self) -> set[int]:
        """The ids of what is taken back by others, as are the dicts of a module's tensors: a capture puts traced ones there."""
        return {*self._changed(), *(id(one) for m in self._module.modules() for one in (m._parameters, m._buffers))}

    def _of(self, step: str) -> _Followed:
        return self._steps.setdefault(step, _Followed())


@dataclass
class _Followed:
    """The places outside of the module that one step reads.

    Attributes:
        places: as they were last; None before the first refresh.
        state: the number of the present state; states with equal values have equal numbers.
        tensors: by state, the tensors, arrays and modules among the values.
        skipped: ids of containers that the step fills.
        left_alone: keys of places whose changes have never mattered.
        looks: the number of refreshes.
        read: the places that runs of the step's Python have read.
        functions: that they have run.
        assigned: ``(id of the container, key)`` of the entries that the step itself assigns.
        kept_changes: the places in installed packages that runs of the step's Python have changed, once: a second time matters.
        meets_run: whether it has asked an object of its run.
    """

    places: Locations | None = None
    state: int = 0
    tensors: list[dict[Hashable, Hashable]] = field(default_factory=list)
    skipped: set[int] = field(default_factory=set)
    left_alone: set[Key] = field(default_factory=set)
    looks: int = 0
    read: dict[Key, Location] = field(default_factory=dict)
    functions: dict[types.FunctionType, None] = field(default_factory=dict)
    assigned: set[tuple[int, Any]] = field(default_factory=set)
    kept_changes: KeptChanges = field(default_factory=dict)
    meets_run: bool = False
    _numbers: dict[Hashable, int] = field(default_factory=dict)
    _kept: list[Locations] = field(default_factory=list)  # an id must not be used twice
    _changed: list[Key] = field(default_factory=list)
    _same: int = 0
    _different: set[int] = field(default_factory=set)
    _for_nothing: Counter[Key] = field(default_factory=Counter)
    _late: Large | None = None
    _outgrown: Locations | None = None

    def begin_run(self) -> None:
        """Count anew: how often something changes is a matter of one run."""
        self.looks = self._same = 0
        self._different.clear()

    def add_read(self, found: Collection[Location]) -> None:
        """A run of the step's Python has read these places."""
        if new := {one.key: one for one in found if one.key not in self.read}:
            self.read.update(new)
            self.outgrow()

    def compared(self, watched: Collection[int]) -> list[Location]:
        """The places that are compared here.

        Args:
            watched: ids of containers that are compared otherwise.
        """
        return [one for one in self.read.values() if not self._is_left_out(one, watched)]

    def _is_left_out(self, one: Location, watched: Collection[int]) -> bool:
        if one.key in self.left_alone:
            return True
        if isinstance(one, Entry | Item) and (id(one.owner), one.name) in self.assigned:
            return True
        return isinstance(one, Contents | Item) and (id(one.owner) in self.skipped or id(one.owner) in watched)

    def outgrow(self) -> None:
        """Note that other places are compared from now on."""
        if self.places is not None:
            self._outgrown, self.places = self.places, None

    def refresh(self, places: Locations) -> None:
        outgrown, self._outgrown = self._outgrown, None
        self._late = None if self.places is None else self.places.late
        before = {} if self.places is None else self.places.parts()
        parts = places.parts()
        self._changed = [key for key in {**before, **parts} if before.get(key) != parts.get(key)] if before else []
        self.places = places
        fingerprint = (places.structure, frozenset(parts.items()))
        # Where nothing has changed but what is compared, it is the state of before.
        as_before = outgrown is not None and outgrown.structure is places.structure and _are_as_before(outgrown, parts)
        self.state = self._numbers.setdefault(fingerprint, self.state if as_before else len(self.tensors))
        self._kept.append(places)
        if self.state == len(self.tensors):
            self.tensors.append({})
        self.tensors[self.state].update(places.tensors())

    def count_state(self, step: str, *, same: bool) -> None:
        if not same and self._late is not None:
            error = ChangedSurroundingsError(
                f"{step} reads {self._late.text}. Some of its {self._late.size:,} entries were changed in place during the last "
                f"{self._late.every:,} steps. So many entries are not compared before each step: some of these steps may have "
                "run with the old ones. Change a small list or dict, or assign a new one, which is seen at once. "
                f"{_ADVICE}"
            )
            error.recoverable = False
            raise error
        changed = [self.read[key] for key in self._changed]
        if same and changed and all(one.foreign is not None for one in changed):
            self._leave_alone(step, changed)
            return
        self._same += same
        if not same:
            self._different.add(self.state)
        often = self._same >= _OFTEN and self._same * 8 > self.looks  # refreshing costs more than it is worth then
        if often or len(self._different) > _OFTEN:
            name = self.read[self._changed[0]].text if self._changed else "something outside of the module"
            error = ChangedSurroundingsError(f"{step} reads {name}, which changes all the time. {_ADVICE}")
            error.per_batch = often  # else there would be another program for each batch
            raise error

    def _leave_alone(self, step: str, foreign: Collection[Location]) -> None:
        """Objects of installed packages have changed for nothing: a progress bar, a cache."""
        self._for_nothing.update(one.key for one in foreign)
        if enough := [one for one in foreign if self._for_nothing[one.key] == _ENOUGH]:
            self.left_alone.update(one.key for one in enough)
            self.outgrow()
            rank_zero_warn(
                f"{step} reads {enough[0].text} of an installed package, which has changed {_ENOUGH} times without an effect on "
                "the step. It is no longer compared. If the step depends on it, keep the value as an attribute of "
                "the module (self.…), or run eagerly (XLATRAIN_EXECUTOR=eager)"
            )


def _asks_run(asked: Lookup, answers: Collection[str]) -> bool:
    kind = asked.owner if isinstance(asked.owner, type) else type(asked.owner)
    definer = next((one for one in kind.__mro__ if asked.name in vars(one)), kind)
    if not definer.__module__.startswith("torch_compat."):
        return False
    if issubclass(kind, torch.nn.Module):
        return asked.name in _OF_A_FIT
    found = vars(definer).get(asked.name)
    return callable(getattr(found, "__get__", None)) and not (isinstance(found, property) and asked.name in answers)


def _are_as_before(outgrown: Locations, parts: Mapping[Key, Hashable]) -> bool:
    """Whether places look as they did when they were compared last, by their marks: those of large places are shared."""
    return all((parts[one.key] if one.key in parts else one.now()) == mark for one, mark in outgrown.marks)
