"""The outcome of an executed step: logged values and results that are read from the device when somebody asks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
import torch.utils._pytree as pytree

from torch_compat.run.batches import LoggedSize
from torch_compat.step.capture.captured_step import CapturedStep
from torch_compat.step.effects.logged import LogEntry
from torch_compat.step.host.batch_containers import container_at
from torch_compat.step.host.calls import is_size
from torch_compat.step.host.host_values import HostValues
from torch_compat.step.host.slots import SLOTS, BatchSlot, ComputedSlot, ObjectSlot, TensorSlot, ValueSlot, View, mapped_once
from torch_compat.step.metrics.sync import OWN_ROWS
from torch_compat.step.placed_batch import PlacedBatch
from torch_compat.utilities.host_arrays import host_value
from xlatrain.bridge.tensors.host import from_numpy
from xlatrain.bridge.tensors.lazy import fetch_from, lazy_tensor, read_lazy, unread_lazy
from xlatrain.bridge.tensors.strides import Geometry, strides_of, view_of
from xlatrain.mesh.data import BatchLayout


@dataclass
class StepOutcome:
    """The outcome of an executed step; values stay on the device until they are read.

    Attributes:
        logs: the entries of the logged values.
        packed: the logged values, float32[n] or float64[n].
        make_result: makes :attr:`result`.
        logged_size: the weight of the batch in an epoch's mean of logged values.
        result_of: gives the results of the step's host calls.
        batch: the batch that the step got, if that may be more than this process's rows.
        logged: whether the training loop has the logged values.
    """

    logs: Sequence[LogEntry]
    packed: Any
    make_result: Callable[[], Any]
    logged_size: LoggedSize
    result_of: Callable[[ValueSlot], Any] | None = None
    batch: Any = None
    logged: bool = False

    @functools.cached_property
    def result(self) -> Any:
        """The return value of the user's method, with lazily read tensors; built when somebody asks."""
        return self.make_result()

    def refuse_nan(self, where: str) -> None:
        """Raises:
        RuntimeError: the loss or a logged value of the step is NaN; ``where`` is its batch.
        """
        if np.isnan(np.asarray(self.packed)).any():
            raise RuntimeError(
                f"detect_anomaly: the loss or a logged value of {where} is NaN. "
                "To see which operation made it, run without XLATRAIN_EXECUTOR=compiled"
            )


_ARRAY = "array"


def array_of_unread(tensor: torch.Tensor) -> Any:
    """The array behind a value of a step that nobody has read yet; None for any other tensor."""
    return getattr(unread_lazy(tensor), _ARRAY, None)


@dataclass(frozen=True)
class _Viewed:
    """The function that gives a lazy tensor the memory of another, as a view of that has it.

    Attributes:
        of: the other.
        geometry: the view's; None: that of the other.
        alone: the array of the view.
    """

    of: torch.Tensor
    geometry: Geometry | None
    alone: Any = None

    @property
    def array(self) -> Any:
        """The array of the view, as long as neither it nor the other has been read."""
        return None if array_of_unread(self.of) is None else self.alone

    def __call__(self) -> torch.Tensor:
        with torch.no_grad():
            return self.of.data if self.geometry is None else view_of(self.of.data, self.geometry)


class Filler:
    """Puts lazily read tensors of one executed step into recorded values.

    Before one is read, ``look()`` is called: it raises where a step until then went wrong inside its program.

    Args:
        own: gives a parameter or buffer by its name.

    Attributes:
        gave_rows: whether a tensor had only this process's rows of the batch, where there are several processes.
    """

    def __init__(
        self,
        step: CapturedStep,
        outputs: tuple[Any, Sequence[Any]],
        batch: PlacedBatch,
        layout: BatchLayout,
        host_values: HostValues,
        look: Callable[[], None] | None = None,
        own: Callable[[str], torch.Tensor] | None = None,
    ) -> None:
        self._own = own
        self._look = look or _no_look
        self._host_values = host_values
        self._specs, self._shared = step.value_specs, step.shared
        self._containers: dict[int, Any] = {}  # by id of a shared template
        self._packed, self._values = outputs
        self._batch = batch
        self._layout = layout
        self._made: dict[int, torch.Tensor] = {}
        self._views: dict[ValueSlot | TensorSlot, torch.Tensor] = {}
        self.gave_rows = False
        self.results: Sequence[Any] = ()  # of host calls

    def __call__(self, tree: Any) -> Any:
        if isinstance(tree, SLOTS):
            return self._value(tree)
        if self._shared:
            return mapped_once(self._filled, tree, self._shared, self._containers, is_size)
        return pytree.tree_map_only(SLOTS, self._value, tree, is_leaf=is_size)

    def _filled(self, leaf: Any) -> Any:
        return self._value(leaf) if isinstance(leaf, SLOTS) else leaf

    def _value(self, slot: ValueSlot | ComputedSlot | ObjectSlot | BatchSlot | TensorSlot) -> Any:
        if isinstance(slot, ObjectSlot):
            return slot.held
        if isinstance(slot, BatchSlot):
            self.gave_rows = self.gave_rows or self._layout.processes > 1
            assert self._batch.values is not None
            return container_at(self._batch.values.batch, slot.names)
        if isinstance(slot, TensorSlot):
            own = self._own_tensor(slot.key)
            return own if slot.view is None else self._view(slot, slot.view, own)
        if slot.source == "results":
            return slot.find(self.results)
        if isinstance(slot, ComputedSlot):
            return slot.find(self._host_values)
        if slot.source == "batch":
            self.gave_rows = self.gave_rows or self._layout.processes > 1
            return slot.find(self._batch.spec.others)
        if slot.source == "values" and slot.columns is not None:
            return self._of_columns(slot.index, slot.columns)
        if slot.source == "values":
            base = self._tensor(slot.index)
            found = base if slot.view is None else self._view(slot, slot.view, base)
            if slot.grad is not None and found.grad is None:  # which the step retained: what hooks after backward find
                found.grad = self._tensor(slot.grad)
            return found
        packed, index = self._packed, slot.index

        def read() -> torch.Tensor:
            self._look()
            return torch.tensor(float(host_value(packed)[index]), dtype=torch.float32)

        return lazy_tensor((), torch.float32, read)

    def read(self, index: int) -> None:
        """Bring the ``index``-th value to the host now."""
        read_lazy(self._tensor(index))

    def write(self, leaf: int, index: int) -> None:
        """Write the ``index``-th value to the batch's ``leaf``-th tensor; to one that nobody has read, when that is read."""
        own, value = self._own_tensor(leaf), self._tensor(index)
        if array_of_unread(own) is not None and not isinstance(unread_lazy(own), _Viewed):
            fetch_from(own, value)
            return
        with torch.no_grad():
            own.copy_(value)

    def _tensor(self, index: int) -> torch.Tensor:
        """The ``index``-th value as a CPU tensor, read when it is used; on several processes this process's rows of it."""
        if index not in self._made:
            spec, array = self._specs[index], self._values[index]
            rows = self._local_rows(spec.shape)
            shape = spec.shape if rows is None else (len(rows), *spec.shape[1:])

            def read() -> torch.Tensor:
                self._look()
                return _fetch(array, spec.dtype, rows)

            self._made[index] = made = lazy_tensor(shape, spec.dtype, read, spec.strides if rows is None else None)
            if rows is None:
                setattr(read, _ARRAY, array)  # which is let go of when it is read
            if rows is not None:
                setattr(made, OWN_ROWS, True)
        self.gave_rows = self.gave_rows or hasattr(self._made[index], OWN_ROWS)
        return self._made[index]

    def _view(self, slot: ValueSlot | TensorSlot, view: View, of: torch.Tensor) -> torch.Tensor:
        """The view of a tensor that a slot stands for, wherever that is."""
        if slot not in self._views:
            alone = self._values[slot.alone] if isinstance(slot, ValueSlot) and slot.alone is not None else None
            if hasattr(of, OWN_ROWS):
                made = lazy_tensor(tuple(of.shape), of.dtype, _Viewed(of, None, alone), strides_of(of))
                setattr(made, OWN_ROWS, True)
            else:
                shape, strides, _ = view.geometry
                made = lazy_tensor(shape, of.dtype, _Viewed(of, view.geometry, alone), strides)
            self._views[slot] = made
        return self._views[slot]

    def _own_tensor(self, key: str | int) -> torch.Tensor:
        """The module's tensor of a name, or the batch's of an index."""
        if isinstance(key, str):
            assert self._own is not None
            return self._own(key)
        assert self._batch.values is not None
        own = self._batch.values.leaves
        return own[key] if key < len(own) else self._batch.carried[key - len(own)]

    def _of_columns(self, index: int, columns: int) -> torch.Tensor:
        """The ``index``-th value, as wide as the step has found it to be, which is read here."""
        whole = self._tensor(index)
        found = whole[:, : int(host_value(self._values[columns]))]
        if hasattr(whole, OWN_ROWS):
            setattr(found, OWN_ROWS, True)
        return found

    def _local_rows(self, shape: tuple[int, ...]) -> np.ndarray | None:
        """The indices of this process's rows in a value with one row per sample, on several processes; else None."""
        if self._layout.processes == 1 or not shape or shape[0] != self._batch.size:
            return None
        return self._layout.own_rows(self._batch.form.rows)


def _no_look() -> None:
    """Values of a step whose findings somebody else looks at."""


def _fetch(array: jax.Array, dtype: torch.dtype, rows: np.ndarray | None) -> torch.Tensor:
    """The array's values (of ``rows`` along dim 0, if given) as a CPU tensor of ``dtype``."""
    host = host_value(array)
    tensor = from_numpy(np.array(host if rows is None else host[rows]))
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
