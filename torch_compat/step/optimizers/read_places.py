"""The places of the host's state that a captured optimizer's ``step`` has read, compared before each update."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any

import torch

from torch_compat.step.guards.compared_places import Locations
from torch_compat.step.guards.locations import Entry, Key, Location
from torch_compat.step.guards.noted_places import KeptChanges
from torch_compat.step.guards.observation import Observation
from torch_compat.step.guards.origins import is_generated
from torch_compat.step.guards.param_groups import ParamGroups
from torch_compat.step.optimizers.param_group import UnsupportedOptimizerError
from xlatrain.bridge.tensors.constants import BakedTensor
from xlatrain.host.garbage import older_left_out

_MAX_STATES = 8
"""How often what the step reads as a constant may change before steps are no longer compiled: each time is a compilation."""
_NUMBERS = (int, float)


class ReadPlaces:
    """Guards on what the step of an optimizer reads beside its groups and its state: attributes, globals, tensors.

    A number in an attribute of the optimizer or of a parameter (``p.lr_scale``) is an input of the update once it has changed to
    a float: whole numbers are branched on. Any other change is another state, which needs another program.

    Args:
        step: the name of the method, for errors.
        attributes: gives the ``__dict__`` of each object whose numbers may be inputs.

    Attributes:
        inputs: the places of the numbers that are inputs.
    """

    def __init__(self, step: str, attributes: Callable[[], Collection[dict[str, Any]]]) -> None:
        self.inputs: list[Entry] = []
        self._step = step
        self._attributes = attributes
        self._read: dict[Key, Location] = {}
        self._exact = False
        self._kept_changes: KeptChanges = {}
        self._places = Locations(())
        self._state = 0
        self._states = 1
        self._numbers: dict[Hashable, int] = {self._fingerprint(): 0}
        self._changed = ""

    # -- before each update ------------------------------------------------------------------------------------------

    def state(self) -> Hashable:
        """A key of how the places look now, and of which are inputs; cheap where nothing has changed."""
        if any(type(one.value()) not in _NUMBERS for one in self.inputs):
            self.compare_inputs()
        if self._places.changed():
            before = {one.key: mark for one, mark in self._places.marks}
            self._places = Locations(self._read.values())
            differing = [(one, before[one.key]) for one, mark in self._places.marks if mark != before[one.key]]
            self._changed = differing[0][0].text if differing else ""
            if not self._exact:
                self._lift(differing)
            self._state = self._numbers.setdefault(self._fingerprint(), self._states)
            self._states = max(self._states, self._state + 1)
        return self._state, tuple(one.key for one in self.inputs)

    def _lift(self, differing: Collection[tuple[Location, Hashable]]) -> None:
        """Make inputs of those numbers among the changed places that may be."""
        holders = set(map(id, self._attributes()))
        for one, before in differing:
            was_number = isinstance(before, tuple) and before[0] in ("int", "float")
            if isinstance(one, Entry) and id(one.owner) in holders and was_number and type(one.value()) is float:
                self.inputs.append(one)
                del self._read[one.key]
        self._places = Locations(self._read.values())

    def compare_inputs(self) -> bool:
        """Compare the places that were inputs, now and always; False if there are none."""
        self._exact = True
        found = {one.key: one for one in self.inputs}
        self.inputs = []
        self._add(found.values())
        return bool(found)

    def check(self) -> None:
        """
        Raises:
            UnsupportedOptimizerError: the step reads something that changes all the time.
        """
        if self._states > _MAX_STATES:
            raise UnsupportedOptimizerError(
                f"{self._step} reads {self._changed}, which changes from step to step ({self._states} values seen): each would "
                "be another compilation. Keep numbers in self.param_groups, where they become inputs of the compiled step, or "
                "run with XLATRAIN_EXECUTOR=eager"
            )

    # -- around a capture --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def observed(self) -> Iterator[Callable[[Any], Any]]:
        """Find what a function reads that is called in the block; gives what makes it one that is observed.

        Raises:
            UnsupportedOptimizerError: it has no source; or it changed something, which would happen only once: that is as it
                was again.
        """
        observation = Observation((), (), self._kept_changes)

        def noted(function: Any) -> Any:
            found = observation.call(function)
            inner = inspect.unwrap(function)
            code = getattr(getattr(inner, "__func__", inner), "__code__", None)
            if code is None or is_generated(code.co_filename) or inner in observation.instrumented.without_source:
                raise UnsupportedOptimizerError(
                    f"{self._step} has no source, so its reads cannot be found: put the class into a file, or run "
                    "with XLATRAIN_EXECUTOR=eager"
                )
            return found

        with older_left_out():
            try:
                with observation.instrumented:
                    yield noted
            finally:
                found, changed = observation.settle(frozenset)
                self._add([one for one in found if not isinstance(one, ParamGroups)])  # in the key is what they stand for
        if changed:
            raise UnsupportedOptimizerError(
                f"{self._step} {changed[0].does}, which a compiled step would do only once; keep such values in "
                "self.state[p], or run with the eager executor (XLATRAIN_EXECUTOR=eager)"
            )

    def add_constants(self, tensors: Collection[torch.Tensor]) -> None:
        """Compare the values of tensors with which the graph computes, which are not in the optimizer's state."""
        self._add([_Constant(one) for one in tensors])

    def _add(self, found: Collection[Location]) -> None:
        """Compare these places too; where nothing has changed but what is compared, it is the state of before."""
        known = self._read.keys() | {one.key for one in self.inputs}
        if new := {one.key: one for one in found if one.key not in known}:
            self._read.update(new)
            self._places = Locations(self._read.values())
            self._numbers[self._fingerprint()] = self._state

    def _fingerprint(self) -> Hashable:
        return frozenset((one.key, mark) for one, mark in self._places.marks)


class _Constant(Location):
    """The values of a tensor that is a constant of the graph."""

    kind = "constant"

    def __init__(self, owner: torch.Tensor) -> None:
        super().__init__(owner, f"the values of a tensor {tuple(owner.shape)}")
        self._baked = BakedTensor(owner)
        self._generation = 0

    def now(self) -> Hashable:
        if not self._baked.is_unchanged():
            self._baked.refresh()
            self._generation += 1
        return self._generation
