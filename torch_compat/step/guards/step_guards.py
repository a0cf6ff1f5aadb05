"""All that the steps of one module assume of the host, behind one interface.

Four detectors find changes, each what the others cannot see:

- attributes: :class:`~torch_compat.step.guards.attribute_guards.AttributeGuards`;
- contents of containers and plain objects in attributes: its :class:`~torch_compat.step.guards.fingerprints.Fingerprint`;
- modules and hooks: :class:`~torch_compat.step.guards.module_structure.ModuleStructure`;
- all else that the step's Python was seen to read: :class:`~torch_compat.step.guards.place_guards.PlaceGuards`.

What the first two find selects a program (:meth:`StepGuards.key`). What the last two find need not matter to the step: in
another :meth:`StepGuards.state` its Python runs again, and a program is made only if it does something else.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from typing import Any

import torch

from torch_compat.step.effects.effects import Effects
from torch_compat.step.guards.attribute_guards import AttributeGuards
from torch_compat.step.guards.entry_numbers import EntryNumbers
from torch_compat.step.guards.noted_places import Change
from torch_compat.step.guards.place_guards import PlaceGuards
from torch_compat.step.host.host_values import HostValues
from torch_compat.step.host.scalars import ScalarTracer
from torch_compat.utilities.parts import of
from xlatrain.bridge.jax_function import CallsJax


class StepGuards:
    """The detectors of one module's steps in one run.

    Args:
        module: on the mesh.
        roots: name → object whose attributes and methods steps may use.
        restructured: called when modules were replaced, or hooks registered or removed.
        changed: gives the ids of the objects whose changes by steps are recorded, and taken back after a capture.
        followed: name → object below which changes are recorded, as it is at any time.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        roots: Mapping[str, Any],
        restructured: Callable[[], Any],
        changed: Callable[[], Collection[int]] = frozenset,
        followed: Mapping[str, Any] | None = None,
    ) -> None:
        self._module, self._followed = module, {} if followed is None else followed
        self._entries = EntryNumbers(self._followed)
        self._attributes = AttributeGuards(module, roots)
        self._places = PlaceGuards(module, roots, self._attributes.watched, changed)
        self._restructured = restructured
        self._jax = [one for one in module.modules() if isinstance(one, CallsJax)]

    add_function = of("_places.add_function", "Take ``function`` for the step, which is no method of the module's.")

    def forget(self, step: str) -> None:
        """Let go of what is known of a step that is no more."""
        self._attributes.forget(step)
        self._places.forget(step)
        self._entries.forget(step)

    following = of("_attributes.following", "The context of a whole run: what the host assigns to modules is followed.")

    def begin_run(self, roots: Mapping[str, Any]) -> None:
        """Find all that the host has changed since the last run, in which nothing was followed.

        Args:
            roots: of this run, under the names of the last.
        """
        self._places.begin_run(roots)
        self._attributes.begin_run(roots)

    def end_run(self, leaving: Collection[str]) -> None:
        """Let go of the roots with these names: the next run has others."""
        self._places.begin_run({})
        self._attributes.end_run(leaving)

    def asks_run(self, step: str) -> bool:
        """Whether ``step`` has asked the Trainer for what no guard compares; it is the same in one run only."""
        return self._places.asks_run(step)

    def meets_run(self, step: str, leaving: Collection[str]) -> bool:
        """Whether ``step`` has asked an object of its run, or read an attribute of a root with one of these names."""
        return self._places.meets_run(step) or self._attributes.reads_of(step, leaving)

    # -- before each step ------------------------------------------------------------------------------------------

    def refresh(self, step: str) -> None:
        """Find what was changed since the last step in ways that are not followed; :meth:`state` does the rest."""
        if self._places.structure_changed():
            self._attributes.find_owners()
            self._restructured()
        self._attributes.refresh(step)

    rescan = of("_attributes.rescan", "Find what the host changed in ways that are not followed; not for every step.")

    def key(self, step: str) -> Hashable:
        """A key of the values that select a program."""
        number, kinds = self._attributes.key(step), self._entries.kinds(step)
        if kinds is not None:
            number = (number, kinds)
        return (number, *(one.version for one in self._jax)) if self._jax else number

    def fill(self, step: str, numbers: dict[str, Any]) -> None:
        """Put the attributes and entries that are inputs of ``step`` among its numbers."""
        self._attributes.fill(step, numbers)
        self._entries.fill(step, numbers)

    state = of(
        "_places.key",
        "The number of the present state of what the step reads outside of the module; another may need another program.",
    )
    kept_changes = of("_places.kept_changes", "See :meth:`PlaceGuards.kept_changes`.")
    take_back_kept = of("_places.take_back_kept", "See :meth:`PlaceGuards.take_back_kept`.")
    comparable = of("_places.comparable", "See :meth:`PlaceGuards.comparable`.")
    count_state = of(
        "_places.count_state",
        "Count whether ``step`` does the same in the present state as before; see :meth:`PlaceGuards.count_state`.",
    )
    facts = of("_attributes.facts", "The facts that ``step`` depends on, for people: a name as a user writes it → its value.")

    # -- around a capture ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def capturing(self, step: str, *, attended: bool = False) -> Iterator[list[Change]]:
        """Find what ``step`` reads in the block; what it does outside of the followed objects is taken back.

        Gives, filled on leaving, what it has changed there; for this and for ``attended`` see :meth:`PlaceGuards.taken_back`.

        Raises:
            ChangedSurroundingsError, CaptureError: see :meth:`PlaceGuards.taken_back`.
        """
        around, self._entries.step = self._entries.step, step
        try:
            with self._places.taken_back(step, attended=attended) as changed, self._attributes.capturing(step):
                yield changed
        finally:
            self._entries.step = around

    @contextlib.contextmanager
    def reading(self, tracer: ScalarTracer, host_values: HostValues) -> Iterator[None]:
        """The context of the user's method in a capture: numbers that it reads and draws may become inputs."""
        with self._attributes.reading(tracer, host_values), self._entries.standing_in(tracer, host_values):
            yield

    follow = of("_attributes.follow", "Follow the attributes of an object outside of the tree, which steps change.")

    def refuse_changes(self, step: str, changed: Collection[Change]) -> None:
        """Refuse what :meth:`capturing` gave, where there is anything.

        Raises:
            ChangedSurroundingsError: by name.
        """
        self._places.refuse_changes(step, changed)

    promote = of(
        "_attributes.promote",
        "Make inputs of ``step`` of the numbers that it reads and the host has changed, instead of guards on their values.",
    )

    def demote(self, step: str) -> bool:
        """Make guards on their values of the inputs of ``step``; False if there are none."""
        return any([self._attributes.demote(step), self._entries.demote(step)])

    # -- after a capture -------------------------------------------------------------------------------------------

    def learn_entries(self, step: str, effects: Effects) -> bool:
        """Make inputs of ``step`` of the numbers that it changes in containers and objects; False if there are none left."""
        return self._entries.learn(step, effects, self._owned())

    def learn_read_entries(self, step: str, effects: Effects) -> bool:
        """Make inputs of ``step`` of the numbers there that it reads and changes; False if there are none left.

        What it puts there may be the same for as long as they are 0.
        """
        return self._entries.learn(step, effects, self._owned(), functools.partial(self._places.reads, step))

    def _owned(self) -> set[int]:
        return {id(one) for one in (*self._module.modules(), *self._followed.values()) if hasattr(one, "__dict__")}

    def skip_own(self, step: str, effects: Effects, changed: Mapping[str, Any]) -> None:
        """Leave what ``step`` itself fills out of :meth:`state`; ``changed``: name → object that steps may change."""
        self._places.skip(step, effects.containers(changed), effects.entries(changed))

    def deciding(self, step: str, effects: Effects) -> Collection[Any]:
        """The containers on whose contents the effects of ``step`` may depend, as it looks at them."""
        return effects.depend_on(self._places.looked_at(step))

    def carried(
        self, step: str, effects: Effects, constants: Collection[torch.Tensor], caches: Collection[tuple[str, str]]
    ) -> tuple[str | None, list[str]]:
        """The attributes, as a user writes them, in which ``step`` carries state from one batch to the next.

        Args:
            caches: attributes that it sets to what any batch would set them to.

        Returns:
            One that it rewrites though it computes with the tensor in it, or None; those that it reads before it assigns them.
        """
        self._attributes.note_rewritten(step, effects.attributes().difference(caches))
        both = self._attributes.reads_before(step, effects.attributes(rebound=True).difference(caches))
        return self._attributes.holds_constant(step, constants), both

    carry = of("_attributes.carry", "The tensor in an attribute is an input of ``step``.")
    name_of = of(
        "_attributes.name_of",
        "The attribute, as a user writes it, in which ``step`` finds a tensor; None if it finds it elsewhere.",
    )
    note_replayed = of("_attributes.note_replayed", "Note that a step's side effects on these attributes were carried out.")
