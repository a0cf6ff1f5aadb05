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
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from typing import Any

import torch

from torch_compat.step.effects.effects import Effects
from torch_compat.step.guards.attribute_guards import AttributeGuards
from torch_compat.step.guards.noted_places import Change
from torch_compat.step.guards.place_guards import PlaceGuards
from torch_compat.utilities.parts import of
from xlatrain.bridge.jax_function import CallsJax


class StepGuards:
    """The detectors of one module's steps in one run.

    Args:
        module: on the mesh.
        roots: name → object whose attributes and methods steps may use.
        restructured: called when modules were replaced, or hooks registered or removed.
        changed: gives the ids of the objects whose changes by steps are recorded, and taken back after a capture.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        roots: Mapping[str, Any],
        restructured: Callable[[], Any],
        changed: Callable[[], Collection[int]] = frozenset,
    ) -> None:
        self._attributes = AttributeGuards(module, roots)
        self._places = PlaceGuards(module, roots, self._attributes.watched, changed)
        self._restructured = restructured
        self._jax = [one for one in module.modules() if isinstance(one, CallsJax)]

    add_function = of("_places.add_function", "Take ``function`` for the step, which is no method of the module's.")

    def forget(self, step: str) -> None:
        """Let go of what is known of a step that is no more."""
        self._attributes.forget(step)
        self._places.forget(step)

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
        number = self._attributes.key(step)
        return (number, *(one.version for one in self._jax)) if self._jax else number

    fill = of("_attributes.fill", "Put the attributes that are inputs of ``step`` among its numbers.")
    state = of(
        "_places.key",
        "The number of the present state of what the step reads outside of the module; another may need another program.",
    )
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
        with self._places.taken_back(step, attended=attended) as changed, self._attributes.capturing(step):
            yield changed

    reading = of(
        "_attributes.reading", "The context of the user's method in a capture: numbers that it reads and draws may become inputs."
    )
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
    demote = of("_attributes.demote", "Make guards on their values of the inputs of ``step``; False if there are none.")

    # -- after a capture -------------------------------------------------------------------------------------------

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
