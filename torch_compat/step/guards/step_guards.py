"""All that the steps of one module assume of the host, behind one interface.

Five detectors find changes, each what the others cannot see:

- attributes that are assigned: :class:`~torch_compat.step.guards.attribute_guards.AttributeGuards`;
- contents of containers and plain objects in attributes: its :class:`~torch_compat.step.guards.fingerprints.Fingerprint`;
- attributes changed past ``setattr``: its :class:`~torch_compat.step.guards.identity_check.IdentityCheck`;
- modules and hooks: :class:`~torch_compat.step.guards.module_structure.ModuleStructure`;
- all else that the step's Python was seen to read: :class:`~torch_compat.step.guards.place_guards.PlaceGuards`.

What the first three find selects a program (:meth:`StepGuards.key`). What the last two find need not matter to the step: in
another :meth:`StepGuards.state` its Python runs again, and a program is made only if it does something else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from typing import Any

import torch

from torch_compat.step.effects.effects import Effects
from torch_compat.step.guards.attribute_guards import AttributeGuards
from torch_compat.step.guards.place_guards import PlaceGuards
from torch_compat.step.host.scalars import ScalarTracer
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

    def add_function(self, step: str, function: Callable[..., Any]) -> None:
        """Take ``function`` for the step, which is no method of the module's."""
        self._places.add_function(step, function)

    def forget(self, step: str) -> None:
        """Let go of what is known of a step that is no more."""
        self._attributes.forget(step)
        self._places.forget(step)

    def following(self) -> contextlib.AbstractContextManager[None]:
        """The context of a whole run: what the host assigns to modules is followed."""
        return self._attributes.following()

    # -- before each step ------------------------------------------------------------------------------------------

    def refresh(self, step: str) -> None:
        """Find what was changed since the last step in ways that are not followed; :meth:`state` does the rest."""
        if self._places.structure_changed():
            self._attributes.find_owners()
            self._restructured()
        self._attributes.refresh(step)

    def rescan(self) -> None:
        """Find what the host changed in ways that are not followed; not for every step."""
        self._attributes.rescan()

    def key(self, step: str) -> Hashable:
        """A key of the values that select a program."""
        number = self._attributes.key(step)
        return (number, *(one.version for one in self._jax)) if self._jax else number

    def fill(self, step: str, numbers: dict[str, Any]) -> None:
        """Put the attributes that are inputs of ``step`` among its numbers."""
        self._attributes.fill(step, numbers)

    def state(self, step: str) -> int:
        """The number of the present state of what the step reads outside of the module; another may need another program."""
        return self._places.key(step)

    def comparable(self, step: str, before: int, now: int) -> bool:
        """See :meth:`PlaceGuards.comparable`."""
        return self._places.comparable(step, before, now)

    def count_state(self, step: str, *, same: bool) -> None:
        """Count whether ``step`` does the same in the present state as before; see :meth:`PlaceGuards.count_state`."""
        self._places.count_state(step, same=same)

    def facts(self, step: str) -> dict[str, str]:
        """The facts that ``step`` depends on, for people: a name as a user writes it → its value."""
        return self._attributes.facts(step)

    # -- around a capture ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def capturing(self, step: str) -> Iterator[dict[str, Any]]:
        """Find what ``step`` reads in the block; what it does outside of the followed objects is taken back.

        Gives, filled on leaving: name → what it stands for, of the containers and objects whose contents the step has changed.

        Raises:
            ChangedSurroundingsError, CaptureError: see :meth:`PlaceGuards.taken_back`.
        """
        with self._places.taken_back(step) as changed, self._attributes.capturing(step):
            yield changed

    def reading(self, tracer: ScalarTracer, numbers: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
        """The context of the user's method in a capture: numbers that it reads and draws may become inputs."""
        return self._attributes.reading(tracer, numbers)

    def follow(self, name: str, owner: Any) -> None:
        """Follow the attributes of an object outside of the tree, which steps change."""
        self._attributes.follow(name, owner)

    def refuse_changes(self, step: str, changed: Mapping[str, Any]) -> None:
        """Refuse what :meth:`capturing` gave, where there is anything.

        Raises:
            ChangedSurroundingsError: by name.
        """
        self._places.refuse_changes(step, changed)

    def promote(self, step: str) -> None:
        """Make inputs of ``step`` of the numbers that it reads and the host has changed, instead of guards on their values."""
        self._attributes.promote(step)

    def demote(self, step: str) -> bool:
        """Make guards on their values of the inputs of ``step``; False if there are none."""
        return self._attributes.demote(step)

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

    def carry(self, step: str, where: tuple[str, str]) -> None:
        """The tensor in an attribute is an input of ``step``."""
        self._attributes.carry(step, where)

    def name_of(self, step: str, tensor: torch.Tensor) -> str | None:
        """The attribute, as a user writes it, in which ``step`` finds a tensor; None if it finds it elsewhere."""
        return self._attributes.name_of(step, tensor)

    def note_replayed(self, where: Collection[tuple[str, str]]) -> None:
        """Note that a step's side effects on these attributes were carried out."""
        self._attributes.note_replayed(where)
