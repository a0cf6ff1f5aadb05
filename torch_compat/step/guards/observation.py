"""The reads of the host by one run of a step's Python, noted as they happen."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from types import FunctionType
from typing import Any

import torch

from torch_compat.step.guards.called_functions import CalledFunctions
from torch_compat.step.guards.followed_functions import FollowedFunctions
from torch_compat.step.guards.instrumented import Instrumented
from torch_compat.step.guards.locations import Location, Lookup, static_lookup, text_of
from torch_compat.step.guards.met_values import MetValues
from torch_compat.step.guards.noted_places import Change, KeptChanges, NotedPlaces
from torch_compat.step.values.names import MISSING
from torch_compat.step.values.taken_values import TakenValues
from torch_compat.step.values.user_objects import is_user_class

_HOOKS_OF_ALL = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")


class Observation:
    """Told about reads by code with notes; see :class:`~torch_compat.step.guards.notes.Observer`.

    Args:
        functions: that the step calls, besides its method; those that it is seen to call are added.
        roots: objects whose attributes are followed where they are read (modules of the tree).
        method: the name of the method that is run.
        kept_changes: the places that earlier runs of the step have changed in installed packages, which is added to.
        taken: what the step has taken from iterators; None where it may not.
    """

    def __init__(
        self,
        functions: Iterable[Any],
        roots: Collection[Any],
        kept_changes: KeptChanges | None = None,
        method: str = "",
        taken: TakenValues | None = None,
    ) -> None:
        self._places = NotedPlaces(self._follow_found, kept_changes)
        self._places.taken = taken
        self.instrumented = Instrumented(self)
        self._functions = FollowedFunctions(self._places, self.instrumented, lambda value: self._values.walk(value))
        self._values = MetValues(self._places, self._functions, set(map(id, roots)))
        self._calls = CalledFunctions(self._places, self._functions, self._values, self.instrumented)
        self.enter = self._functions.enter
        self.attribute = self._values.attribute
        self.entry = self._values.entry
        self.value = self._values.walk
        self.member = self._values.member
        self.stores = self._values.stores
        self.updates = self._values.updates
        self.fills = self._values.fills
        self.call = self._calls.call
        self.source = self._calls.source
        for function in functions:
            self._functions.follow(function)
        for one in roots:
            self._functions.follow_root(one)
            if method and static_lookup(kind := type(one), method) is not MISSING and is_user_class(kind):
                self._places.note(Lookup(kind, method, text_of(kind, method)), read=True)
        for name in _HOOKS_OF_ALL:
            for hook in vars(torch.nn.modules.module)[name].values():
                self._functions.follow_held(hook, 0)

    @property
    def functions(self) -> list[FunctionType]:
        """The functions that have run."""
        return self._functions.ran

    @property
    def meets_run(self) -> bool:
        """See :class:`~torch_compat.step.guards.met_values.MetValues`."""
        return self._values.meets_run

    @property
    def of_library(self) -> bool:
        """Whether code of an installed package meets what is noted now."""
        return self._places.of_library

    @of_library.setter
    def of_library(self, of_library: bool) -> None:
        self._places.of_library = of_library

    def _follow_found(self, location: Location, value: Any) -> None:
        if isinstance(location, Lookup):
            self._functions.follow(value)
        else:
            self._functions.follow_found(value)

    def settle(self, followed: Callable[[], Collection[int]], *, attended: bool = False) -> tuple[list[Location], list[Change]]:
        """See :meth:`~torch_compat.step.guards.noted_places.NotedPlaces.settle`."""
        self._values.forget()
        return self._places.settle(followed, attended=attended)
