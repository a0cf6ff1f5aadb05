"""The trace of one run of a step's Python: everything that it leaves behind besides the graph."""

from __future__ import annotations

import functools
import io
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree

from torch_compat.step.capture.taken_hooks import TakenHooks
from torch_compat.step.effects.descriptions import describe
from torch_compat.step.effects.effects import Effects
from torch_compat.step.effects.logged import LogRecorder
from torch_compat.step.effects.recorder import Recording, holds_traced
from torch_compat.step.host.arrays import HostArray
from torch_compat.step.host.batch_containers import BatchChange
from torch_compat.step.host.batch_texts import path_of
from torch_compat.step.host.calls import HostCall, HostCalls, is_size, is_traced
from torch_compat.step.host.host_future import HostFuture
from torch_compat.step.host.later_text import LaterText
from torch_compat.step.host.scalar_plan import ScalarPlan
from torch_compat.step.host.scalars import HostScalar
from torch_compat.step.host.slots import ComputedSlot, Places, TensorSlot, ValueSlot, indices_of_values
from torch_compat.step.metrics.calls import MetricCalls
from torch_compat.step.optimizers.traced import OptimizerTrace
from xlatrain.bridge.capture.endowed import check_outgoing
from xlatrain.bridge.capture.generation.uncut import Uncut
from xlatrain.bridge.capture.masked_rows.masked_rows import MaskedRows
from xlatrain.bridge.errors import CaptureError

_NUMBERS = (HostArray, HostScalar, HostFuture)
_ATOMS = (bool, int, float, complex, str, bytes, type(None))


@dataclass
class StepTrace:
    """The trace of a run of the user's Python, filled while it runs."""

    calls: HostCalls = field(default_factory=HostCalls)
    effects: Effects = field(default_factory=Effects)
    made: tuple[HostCall, ...] = ()
    values: list[torch.Tensor] = field(default_factory=list)
    graphs: list[bool] = field(default_factory=list)  # for each value whether it could be differentiated
    stores_graph: bool = False
    differentiable: tuple[int, ...] = ()
    there_before: Collection[int] = frozenset()  # ids of objects, see describe
    places: Places = field(default_factory=Places)
    assigned: Sequence[tuple[torch.Tensor, str]] = ()  # tensors that became buffers, and their names
    written: dict[int, int] = field(default_factory=dict)  # index of a tensor of the batch that was written to → of its value
    changes: Sequence[BatchChange] = ()
    writes: bool = True  # whether the user sees in the batch what the step has written to it
    keeps_own: bool = True  # whether tensors of the module and the batch are the user's own in the result and effects
    result: Any = None
    scalars: ScalarPlan = field(default_factory=ScalarPlan)
    optimizers: OptimizerTrace = field(default_factory=OptimizerTrace)
    hooks: TakenHooks = field(default_factory=lambda: TakenHooks({}, {}))

    def __post_init__(self) -> None:
        self.metrics = MetricCalls(self.calls)
        self.logs = LogRecorder(self.calls, self.metrics)

    def template(self, tree: Any, batch: Sequence[Any] = (), *, keep: bool = True) -> Any:
        """``tree`` with slots for what differs from step to step.

        That is its traced tensors (outputs of the step from now on), counters, and leaves of the ``batch`` that are no tensors.

        Args:
            keep: whether the user has it after the step, so that one tensor is the same in all that is kept. What a host call
                gets, which may be made later, must not be changed meanwhile.
        """
        positions = {id(leaf): index for index, leaf in enumerate(batch) if not isinstance(leaf, _ATOMS)}

        def slot_of(leaf: Any) -> Any:
            if type(leaf) is MaskedRows:
                leaf = self.calls.taking_rows(leaf)
            if id(leaf) in positions:
                return ValueSlot("batch", positions[id(leaf)])
            if (path := path_of(leaf)) is not None:
                return ValueSlot("batch", path[0], tuple(("item", key) for key in path[1:]))
            if type(leaf) in (HostArray, HostScalar):
                return ComputedSlot("counters", *leaf.deferred())
            if type(leaf) is HostFuture:
                slot = leaf.slot()
                if keep and leaf.may_be_array():
                    self.calls.memory.keeps_array(slot.index)
                return slot
            if type(leaf) in (str, LaterText):
                return self.calls.text_slot(leaf)
            if isinstance(leaf, Uncut):
                self.values += [leaf.whole.detach(), leaf.length.detach()]
                self.graphs += [False, False]
                return ValueSlot("values", len(self.values) - 2, columns=len(self.values) - 1)
            if is_traced(leaf):
                return self._slot_of(leaf, keep)
            if keep and type(leaf) is np.ndarray:
                self.calls.memory.keeps_array(leaf)
            if holds_traced(leaf, _NUMBERS):
                raise CaptureError(
                    f"the step returns, stores or gives to a call a {type(leaf).__qualname__} with a number in it that "
                    "differs for each batch (a counter, a value of a tensor), which a compiled step would make only once. "
                    "Take a list, tuple or dict instead"
                )
            return leaf

        return pytree.tree_map(slot_of, tree, is_leaf=lambda node: is_size(node) or id(node) in positions)

    def _slot_of(self, leaf: torch.Tensor, keep: bool) -> ValueSlot | TensorSlot:
        """The slot of a traced tensor."""
        if not keep or id(leaf) not in self.places.slots:  # else it is the very tensor that the user has
            check_outgoing(leaf)
        root = self.places.root_of(leaf) if keep else leaf
        if root is not leaf and self.places.find(root) is None:
            self.places.add(root, ValueSlot("values", self._value(root)))
        if keep and (known := self.places.find(leaf)) is not None:
            return self._known(leaf, known)
        index = self._value(leaf)
        slot = ValueSlot("values", index, grad=self._gradient(leaf) if keep else None)
        if keep:
            self.calls.memory.keeps(leaf)
            self.places.add(leaf, slot)
            self.places.stored.append(index)
        return slot

    def _gradient(self, leaf: torch.Tensor) -> int | None:
        """The index of the gradient that a backward pass of the step has left in a tensor, a value too."""
        gradient = leaf.grad if leaf.is_leaf or leaf.retains_grad else None
        return None if gradient is None else self._value(gradient.detach())

    def _value(self, tensor: torch.Tensor) -> int:
        """Make a tensor a value of the step; its index."""
        self.values.append(tensor.detach())
        self.graphs.append(tensor.requires_grad)
        return len(self.values) - 1

    def _known(self, leaf: torch.Tensor, slot: ValueSlot | TensorSlot) -> ValueSlot | TensorSlot:
        """The slot of a tensor for which there is one; of a view that comes first, with what it takes on its own."""
        if id(leaf) in self.places.slots:
            return slot
        if isinstance(slot, ValueSlot):
            self.graphs[slot.index] = self.graphs[slot.index] or leaf.requires_grad
            alone = self._value(leaf.detach()) if slot.alone is None else slot.alone
            slot = replace(slot, grad=self._gradient(leaf), alone=alone)
            self.places.stored.append(slot.index)
        self.places.add(leaf, slot)
        return slot

    def write(self, index: int, leaf: torch.Tensor) -> None:
        """Give the batch's ``index``-th tensor, which the step has written to in place, its values after the step."""
        self.written[index] = self._value(leaf.detach())

    def look(self, *trees: Any) -> None:
        """Find the views among the tensors that are kept, which are in these ``trees`` and the result.

        Raises:
            CaptureError: see :meth:`~torch_compat.step.host.slots.Places.look`.
        """
        self.places.look(leaf for leaf in pytree.tree_leaves([self.result, *trees]) if is_traced(leaf))

    def finish(self, recording: Recording, batch: Sequence[Any]) -> None:
        """Put slots into everything that outlives the capture.

        Raises:
            CaptureError: something in it cannot be repeated after every step.
        """
        template = functools.partial(self.template, batch=batch)
        self.calls.check_refused()
        recording.refuse_made(self.result, "its result")
        self.result = self.places.tied(self.result, template(recording.made_anew(recording.with_objects(self.result))))
        returned = len(self.places.stored)
        self.differentiable = tuple(index for index in indices_of_values(self.result) if self.graphs[index])
        self.effects = recording.effects(template, self.places)
        for buffer, name in self.assigned:
            known = self.places.slots.get(id(buffer), (None, None))[1]
            if isinstance(known, ValueSlot) and known.index in self.places.stored[returned:]:
                raise CaptureError(
                    f"the step assigns a tensor to the buffer self.{name} and to another place, and hooks may change it in "
                    "both; a compiled step would make two. Store a copy of it (.clone())"
                )
        self.there_before = recording.there_before
        self.stores_graph = any(self.graphs[index] for index in self.places.stored[returned:])
        self.made = self.calls.finish(functools.partial(template, keep=False))
        self.places.forget()
        self.metrics.finish(self.calls.used)
        self.calls.check_texts()
        self.calls.closed = True

    def text(self) -> str:
        """The trace as text, which must be the same in every run of the step."""
        there = self.there_before
        calls = "\n".join(f"{call.text} {describe((call.args, call.kwargs), {*there, *_streams(call)})}" for call in self.made)
        scalars = [*self.scalars.texts, *map(str, self.scalars.assumed)]
        parts = (self.logs.fingerprint(), self.effects.fingerprint(there), calls, scalars, self.optimizers.fingerprint())
        kept = (self.result, *[(one.names, one.gone, one.put, one.added) for one in self.changes])
        return "\n".join([*map(str, parts), *[describe(one, there, kept=True) for one in kept], *self.places.texts])


def _streams(call: HostCall) -> Iterator[int]:
    """The ids of files and buffers that a call is given: what was printed to one before is no part of the call."""
    return (id(one) for one in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(one, io.IOBase))
