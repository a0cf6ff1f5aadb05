"""A batch on the mesh, and what of it a program depends on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from torch_compat.run.batches import BatchSpec, LoggedSize, flatten_batch
from torch_compat.step.host.batch_values import BatchValues, LeafGatherer
from xlatrain.bridge.tensors.host import as_numpy
from xlatrain.bridge.tensors.lazy import memory_of
from xlatrain.bridge.tensors.strides import Geometry, Strides, dense_strides, empty, strides_of
from xlatrain.mesh.batch_layout import BatchPadding
from xlatrain.mesh.data import BatchPlacer
from xlatrain.mesh.placement import Placement


class SharedMemory(NamedTuple):
    """A tensor whose memory one before it has, too.

    Attributes:
        index: among the batch's tensors.
        of: the index of the other, or its name in the module.
        is_it: whether it is the other.
        geometry: in their memory, relative to where the other begins.
        of_geometry: the other's.
    """

    index: int
    of: int | str
    is_it: bool
    geometry: Geometry
    of_geometry: Geometry

    @classmethod
    def between(cls, index: int, tensor: torch.Tensor, of: int | str, other: torch.Tensor) -> SharedMemory:
        """The relation of two tensors of one memory."""
        geometry, start = memory_of(tensor)[1], memory_of(other)[1]
        return cls(index, of, tensor is other, (*geometry[:2], geometry[2] - start[2]), (*start[:2], 0))


def shared_memory(tensors: Sequence[torch.Tensor]) -> tuple[SharedMemory, ...]:
    """Which tensors have the memory of one before them."""
    # for each batch: an ordinary tensor is asked for its memory alone
    keys = {one.untyped_storage()._cdata if type(one) is torch.Tensor else memory_of(one)[0] for one in tensors}
    if len(keys) == len(tensors):
        return ()
    first: dict[Hashable, int] = {}
    of = [first.setdefault(memory_of(one)[0], index) for index, one in enumerate(tensors)]
    return tuple(
        SharedMemory.between(index, one, of[index], tensors[of[index]]) for index, one in enumerate(tensors) if of[index] != index
    )


@dataclass(frozen=True, eq=False)
class BatchForm:
    """The part of a batch that a program depends on, numbers among its other leaves aside. Compares by identity: made once.

    Attributes:
        spec: key of the :class:`BatchSpec`.
        rows: the real rows.
        split: for each array whether dim 0 is split over the mesh.
        shapes: global shape (real rows only) and torch dtype of each tensor.
        strides: of each tensor that is not contiguous, in its global shape.
        logged: the weight of the batch in the epoch's mean of a logged value.
        shared: which tensors have the memory of others.
    """

    spec: Hashable
    rows: BatchPadding
    split: tuple[bool, ...]
    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    logged: LoggedSize
    strides: tuple[Strides | None, ...]
    shared: tuple[SharedMemory, ...] = ()

    def leaves(self) -> list[torch.Tensor]:
        """Tensors like those of the batch, without values."""
        return [empty(shape, dtype, strides, "meta") for (shape, dtype), strides in zip(self.shapes, self.strides, strict=True)]


class PlacedBatch(NamedTuple):
    """A batch on the mesh.

    Attributes:
        arrays: one per tensor of the batch; global, dim 0 padded to divide the mesh.
        spec: puts tensors back into the user's batch.
        form: what a program depends on.
        values: what is known of it on the host; None where it has no values.
        carried: tensors of the user's that are the last of its own (:mod:`torch_compat.step.carried`).
    """

    arrays: list[Any]
    spec: BatchSpec
    form: BatchForm
    values: BatchValues | None = None
    carried: Sequence[torch.Tensor] = ()

    @property
    def size(self) -> int:
        """Rows of the global batch."""
        return self.form.rows.size

    @property
    def logged(self) -> LoggedSize:
        """The weight of the batch in the epoch's mean of a logged value."""
        return self.form.logged

    def key(self) -> Hashable:
        """A key of everything in the batch that a program depends on."""
        return (self.form, *map(_number, self.spec.others)) if self.spec.others else self.form

    def facts(self) -> dict[str, str]:
        """The facts that a program depends on: how a user reaches a leaf (``batch["x"]``) → its dtype and shape, or its value."""
        shapes = [f"{str(dtype).removeprefix('torch.')}[{','.join(map(str, shape))}]" for shape, dtype in self.form.shapes]
        found = dict(zip(self.spec.names(), shapes, strict=True))
        numbers = {
            f"number {index} of the batch": leaf for index, leaf in enumerate(self.spec.others) if _number(leaf) is not None
        }
        return {**found, **{name: repr(leaf)[:60] for name, leaf in numbers.items()}}


class BatchForms:
    """Puts batches on the mesh; batches that the same program serves get the same form.

    Args:
        placer: of the mesh.
    """

    def __init__(self, placer: BatchPlacer) -> None:
        self.layout = placer.layout
        self._place = placer.place_leaves
        self._forms: dict[Hashable, BatchForm] = {}
        self._gatherer = LeafGatherer(placer.layout) if placer.layout.processes > 1 else None

    def place(self, batch: Any, copy: bool) -> PlacedBatch:
        """Put this process's rows of a batch on the mesh.

        Args:
            copy: share no memory with ``batch``, which somebody may overwrite.

        Raises:
            OverflowError: an int64 value that does not fit int32, named by the leaf.
        """
        leaves, spec = flatten_batch(batch)
        arrays, placement = self._place([as_numpy(leaf) for leaf in leaves], names=spec.names, copy=copy)
        shared = () if self._gatherer is not None or len(leaves) == 1 else shared_memory(leaves)
        key = (spec.key, placement, shared, *[(leaf.dtype, strides_of(leaf)) for leaf in leaves])
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = _form(leaves, spec, placement, shared)
        return PlacedBatch(arrays, spec, form, BatchValues(leaves, self._gather(form), batch))

    def holds(self, batch: PlacedBatch) -> bool:
        """Whether all tensors of a batch came from the host."""
        return batch.values is not None and len(batch.values.leaves) == len(batch.form.shapes)

    def padded(self, batch: PlacedBatch, shapes: Sequence[tuple[int, ...]]) -> PlacedBatch:
        """A batch on the mesh whose tensors are padded at their ends with zeros; on one process.

        From what was placed: the memory that it came from may be another batch's by now.
        """
        true = [shape for shape, _ in batch.form.shapes]
        hosts = [_padded(np.asarray(array), *sizes) for array, *sizes in zip(batch.arrays, true, shapes, strict=True)]
        arrays, placement = self._place(hosts, names=batch.spec.names, copy=False)
        dtypes = [dtype for _, dtype in batch.form.shapes]
        strides = [
            None if one is None else dense_strides(shape, one) for shape, one in zip(shapes, batch.form.strides, strict=True)
        ]
        key = (batch.spec.key, placement, *zip(dtypes, strides, strict=True))
        form = self._forms.get(key)
        if form is None:
            leaves = [empty(*of_leaf, "meta") for of_leaf in zip(shapes, dtypes, strides, strict=True)]
            form = self._forms[key] = _form(leaves, batch.spec, placement)
        return PlacedBatch(arrays, batch.spec, form, batch.values)

    def _gather(self, form: BatchForm) -> Callable[[torch.Tensor, int], torch.Tensor] | None:
        gatherer = self._gatherer
        if gatherer is None:
            return None
        return lambda leaf, index: gatherer.gather(leaf, form.rows, split=form.split[index])


def _form(
    leaves: Sequence[torch.Tensor], spec: BatchSpec, placement: Placement, shared: tuple[SharedMemory, ...] = ()
) -> BatchForm:
    """The form of a batch with these leaves: shapes of the real rows, global ``(rows, …)`` where dim 0 is split."""
    size = placement.rows.size
    shapes = [
        ((size, *leaf.shape[1:]) if split else tuple(leaf.shape), leaf.dtype)
        for leaf, split in zip(leaves, placement.split, strict=True)
    ]
    logged = LoggedSize.of([shape for shape, _ in shapes], spec)
    return BatchForm(spec.key, placement.rows, placement.split, tuple(shapes), logged, global_strides(leaves, shapes), shared)


def global_strides(leaves: Sequence[torch.Tensor], shapes: Sequence[tuple[Any, torch.dtype]]) -> tuple[Strides | None, ...]:
    """The strides of tensors that are not contiguous, in their global shapes."""
    own = zip(leaves, map(strides_of, leaves), shapes, strict=True)
    return tuple(
        strides if strides is None or shape == leaf.shape else dense_strides(shape, strides) for leaf, strides, (shape, _) in own
    )


def _padded(host: np.ndarray, true: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """The beginning of an array, of the ``true`` shape, as the beginning of one of another shape."""
    if host.shape == shape == true:
        return host
    beginning = tuple(map(slice, true))
    found = np.zeros(shape, host.dtype)
    found[beginning] = host[beginning]
    return found


def _number(leaf: Any) -> Hashable:
    """The number that a program may have baked in from a leaf that is no tensor; None for strings and ids, which pass through."""
    if isinstance(leaf, np.ndarray | np.generic):
        return None if leaf.dtype.kind in "OSU" else (leaf.shape, leaf.dtype.str, leaf.tobytes())
    return leaf if isinstance(leaf, bool | int | float) else None
