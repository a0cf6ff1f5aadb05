"""Values for which a step's Python asks: computed on the host, before the step, from the batch, and from buffers.

A capture notes for each of them the ops that lead there (a :class:`~xlatrain.bridge.capture.cut.Cut`) and what came out. What
came out is a guard: a batch of which another value comes uses, or captures, another program.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from torch_compat.step.host.assumptions import AssumedValues, Compared
from torch_compat.step.host.draws import TorchDraw
from torch_compat.step.host.host_values import Expression, HostValues
from torch_compat.step.host.offsets import MovingOffsets
from torch_compat.step.host.scalar_plan import Guard
from torch_compat.step.host.scalars import HostScalar, ScalarTracer
from xlatrain.bridge.capture.cut import Cut, UnknownValueError, cut_to, cut_with_draws, really
from xlatrain.bridge.errors import user_line
from xlatrain.cluster.distributed import Channel
from xlatrain.mesh.batch_layout import BatchLayout, BatchPadding

_ids = itertools.count()
_MOST_DRAWN = 32  # values of draws for which a step asks
_MOST_ENTRIES = 4  # of one of them: of more there are too many outcomes


class BatchValues:
    """The tensors of one batch as the host has them, and what was computed from them.

    Args:
        leaves: this process's rows.
        gather: ``(leaf, its index) -> `` the rows of all processes; None where these are all.
        batch: the user's.

    Attributes:
        batch: that.
        state: gives the value of a parameter or buffer before the step, None where that is not to be had; None: of none.
        takes_state: whether a step that is given this batch may ask for these.
    """

    __slots__ = ("_found", "_gather", "_leaves", "_whole", "batch", "state", "takes_state")

    def __init__(
        self,
        leaves: Sequence[torch.Tensor],
        gather: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
        batch: Any = None,
    ) -> None:
        self.batch = batch
        self._leaves = leaves
        self._gather = gather
        self._whole: dict[int, torch.Tensor] = {}
        self._found: dict[str, torch.Tensor] = {}
        self.takes_state = True
        self.state: Callable[[str], torch.Tensor | None] | None = None

    @property
    def leaves(self) -> Sequence[torch.Tensor]:
        """This process's rows."""
        return self._leaves

    def of(self, cut: Cut) -> torch.Tensor:
        """The value of a cut of a step that is given this batch.

        Raises:
            UnknownValueError: a leaf is no plain tensor on the host.
            Exception: what an op of the cut raises.
        """
        found = self._found.get(cut.text)
        if found is None:
            given: dict[int | str, torch.Tensor] = {}
            for one in cut.inputs:
                given[one] = self._tensor(one) if isinstance(one, str) else self._leaf(one)
            found = cut.value(given)
            if len(given) == len(cut.leaves):  # what a buffer has may be something else when the batch is used again
                self._found[cut.text] = found
        return found

    def _tensor(self, name: str) -> torch.Tensor:
        found = None if self.state is None else self.state(name)
        if found is None:
            raise UnknownValueError(f"{name} is not to be read before each step")
        return found

    def _leaf(self, index: int) -> torch.Tensor:
        found = self._whole.get(index)
        if found is None:
            found = self._whole[index] = self._whole_leaf(index)
        return found

    def _whole_leaf(self, index: int) -> torch.Tensor:
        leaf = self._leaves[index] if index < len(self._leaves) else None
        if type(leaf) is not torch.Tensor or leaf.device.type != "cpu" or leaf.layout != torch.strided:
            raise UnknownValueError("the batch is not on the host")
        return leaf.detach() if self._gather is None else self._gather(leaf, index)


class LeafGatherer:
    """Puts leaves together from the rows that processes brought; every process makes the same calls.

    Args:
        layout: which process holds which rows.
    """

    def __init__(self, layout: BatchLayout) -> None:
        self._layout = layout
        self._channel = Channel(f"batch values/{next(_ids)}")

    def gather(self, leaf: torch.Tensor, rows: BatchPadding, *, split: bool) -> torch.Tensor:
        """The rows of all processes in the order of the mesh.

        Raises:
            UnknownValueError: it has no rows, and is not the same on every process.
        """
        parts: list[torch.Tensor] = self._channel.all_gather(leaf.detach().clone())
        if not split:
            if not all(part.dtype == leaf.dtype and torch.equal(part, leaf) for part in parts):
                raise UnknownValueError("it differs between processes")
            return leaf.detach()
        whole = torch.empty((rows.size, *leaf.shape[1:]), dtype=leaf.dtype)
        for process, part in enumerate(parts):
            whole[torch.from_numpy(replace(self._layout, position=process).own_rows(rows))] = part
        return whole


class AskedValues:
    """Answers the Python of one capture (:class:`xlatrain.bridge.capture.cut.Answers`).

    Args:
        tracer: of the capture.
        host_values: its host values.
        leaves: the batch's tensors, as the capture has them.
        parameters, buffers: by name, as the capture has them.
        offsets: how the capture takes places that are known before the step.

    Attributes:
        offsets: that.
        known: see :class:`~xlatrain.bridge.capture.cut.Answers`.
        assumed: outcomes of what is not known.
    """

    def __init__(
        self,
        tracer: ScalarTracer,
        host_values: HostValues,
        leaves: Sequence[torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        offsets: MovingOffsets,
    ) -> None:
        self._tracer = tracer
        self._plan = tracer.plan
        self._host_values = host_values
        self._parameters = frozenset(parameters)
        self.offsets = offsets
        self._texts: dict[str, int] = {}
        self._drawn: dict[tuple[str, str], str] = {}
        self.assumed = AssumedValues(tracer.plan.assumed, host_values)
        self.known: dict[int, int | str] = {}
        if host_values.batch is not None:
            self.known.update({id(tensor): name for name, tensor in (*parameters.items(), *buffers.items())})
            self.known.update({id(leaf): index for index, leaf in enumerate(leaves)})

    def exact(self, cut: Cut, read: Callable[[torch.Tensor], Any], what: str) -> Any:
        """See :class:`~xlatrain.bridge.capture.cut.Answers`."""
        of, text = self._expression(cut, read, what)
        return self.assume(of, text)

    def outcome(
        self,
        tensor: torch.Tensor,
        found: torch.Tensor | None = None,
        compared: Compared | None = None,
        *,
        likely: int | None = None,
    ) -> bool | int:
        """The assumed value of a tensor of one element whose value only the running step knows.

        Args:
            tensor: a bool or whole number.
            found: it as an int32 scalar, where it is not to be made here.
            compared: how it came about, where the host may have to tell.
            likely: the first guess, of a whole number.

        Raises:
            UnknownValueError: see :meth:`~torch_compat.step.host.assumptions.AssumedValues.outcome`.
        """
        where = user_line(traceback.extract_stack()) or "the step"
        return self.assumed.outcome(tensor, f"the value asked for in {where}", found, compared, likely)

    def value_of(self, tensor: torch.Tensor, read: Callable[[torch.Tensor], Any], what: str) -> tuple[Any, ...] | None:
        """The parts of what is known of ``read`` of a tensor (:class:`~torch_compat.step.host.host_future.Known`), or None."""
        try:
            cut = cut_to(tensor)
            expression, text = self._expression(cut, read, what)
        except UnknownValueError:
            return None
        of_state = bool(cut.inputs) and not cut.leaves
        return expression, text, of_state, (f"{what} of tensor {self._texts[cut.text]}", 0)

    def drawn(self, tensor: torch.Tensor, read: Callable[[torch.Tensor], Any], what: str) -> str | None:
        """The name of ``read`` of a tensor among the numbers that are drawn before the step; None where it is none of few."""
        recorder = self._tracer.recorder
        if recorder is None or recorder.is_off or tensor.numel() > _MOST_ENTRIES:
            return None
        try:
            cut = cut_with_draws(tensor)
        except UnknownValueError:
            return None
        key = (cut.text, what)
        if key not in self._drawn:
            if len(self._drawn) == _MOST_DRAWN:
                return None
            self._add_constants(cut)
            self._drawn[key] = recorder.note(TorchDraw(cut, read, recorder.new_name(f"torch's {what}")))
        return self._drawn[key]

    def number(self, of: Expression, text: str) -> HostScalar:
        """A number that is drawn, or computed of such, as an expression."""
        return HostScalar(self._tracer, of, text, of(self._host_values))

    def _add_constants(self, cut: Cut) -> None:
        self._plan.constants += [one for one in cut.constants if not any(one is other for other in self._plan.constants)]

    def _expression(self, cut: Cut, read: Callable[[torch.Tensor], Any], what: str) -> tuple[Expression, str]:
        if cut.leaves and not self._parameters.isdisjoint(cut.inputs):
            raise UnknownValueError("it is computed from the batch and parameters: on the host that would repeat the step")
        number = self._texts.setdefault(cut.text, len(self._texts))
        self._add_constants(cut)
        text = f"{what} of tensor {number} in {cut.where or 'the step'}"
        if not cut.inputs:
            with really():
                found = cut.value({})
            return lambda host_values: read(found), text
        if self._host_values.batch is None:
            raise UnknownValueError("there is no batch yet")
        return lambda host_values: read(_batch(host_values).of(cut)), text

    def assume(self, of: Expression, text: str, *, drawn: bool = False) -> Any:
        """The value of an expression, assumed from now on.

        Args:
            drawn: it is drawn at random.

        Raises:
            UnknownValueError: see :meth:`BatchValues.of`; or it is a fraction that is drawn.
        """
        with really():
            value = of(self._host_values)
        if drawn and _has_fractions(value):
            raise UnknownValueError("a fraction that is drawn at random does not come again")
        outcome = comparable(value)
        if not any(guard.text == text for guard in self._plan.asked):
            self._plan.asked.append(Guard(lambda host_values: comparable(of(host_values)), outcome, text))
        return value


def _has_fractions(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_fractions, value))
    return isinstance(value, float | complex) or (isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "fc")


def _batch(host_values: HostValues) -> BatchValues:
    if host_values.batch is None:
        raise UnknownValueError("there is no batch")
    return host_values.batch


def comparable(value: Any) -> Hashable:
    """A stand-in for ``value`` that is equal for equal values."""
    if isinstance(value, np.ndarray | np.generic):
        return (value.shape, value.dtype.str, value.tobytes())
    if isinstance(value, torch.Tensor):
        return comparable(value.numpy())
    if isinstance(value, list | tuple):
        return (type(value).__name__, *map(comparable, value))
    return value.hex() if isinstance(value, float) else value  # 0.0 is equal to -0.0, and NaN to nothing
