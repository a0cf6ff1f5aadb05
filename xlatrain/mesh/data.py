"""Batches: process-local host arrays become global ``jax.Array``s, split over the mesh's batch axes.

A *shard* here is one of the ``data_parallel_size(mesh)`` parts into which the mesh splits dim 0 of a batch. A process holds
the shards of its own devices and brings only their rows. Rows fill the shards in mesh order, so on every process count the
same global batch comes out.

Row counts that the shards do not divide are padded, and :class:`BatchPadding` says which rows are real: a program cuts the
padding off by a static slice before it computes anything (:meth:`BatchPadding.cut`), so an uneven batch is computed exactly.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from xlatrain.mesh.batch_layout import BatchLayout, BatchPadding
from xlatrain.mesh.lockstep import BatchAgreement, lockstep
from xlatrain.mesh.mesh import batch_axes
from xlatrain.mesh.placement import NARROW, Leaf, Placement, narrow, sequence_length, transfer_of

__all__ = ["BatchLayout", "BatchPlacer", "GlobalBatch", "Placed", "RowCut", "BatchPadding", "prefetch"]

T = TypeVar("T")
R = TypeVar("R")
Names = Callable[[], Sequence[str]]


class RowCut(NamedTuple):
    """Takes the padding off a placed batch, inside a program: leaves that are split by rows are cut, others kept. Hashable."""

    rows: BatchPadding
    split: tuple[bool, ...]

    def __call__(self, tree: Any) -> Any:
        leaves, treedef = jax.tree_util.tree_flatten(tree)
        real = [self.rows.cut(leaf) if split else leaf for leaf, split in zip(leaves, self.split, strict=True)]
        return jax.tree_util.tree_unflatten(treedef, real)


class GlobalBatch(NamedTuple):
    """A placed batch: the tree of global arrays, which of their rows are real, and which leaves (as JAX flattens) have rows."""

    tree: Any
    rows: BatchPadding
    split: tuple[bool, ...]

    @property
    def cut(self) -> RowCut:
        """The cut from padded rows to the real batch, inside a program. As a key: one program for all batches of these rows."""
        return RowCut(self.rows, self.split)


class Placed(NamedTuple):
    """Placed leaves: global arrays (numpy arrays on a mesh of one device), and where they lie."""

    arrays: list[Any]
    placement: Placement

    @property
    def rows(self) -> BatchPadding:
        return self.placement.rows

    @property
    def split(self) -> tuple[bool, ...]:
        return self.placement.split


@dataclass(frozen=True)
class _Form:
    """Facts about leaves that follow from their shapes and dtypes alone, before other processes are asked.

    Attributes:
        narrow: for each leaf the dtype that JAX makes of its 64 bits, or None; None where no leaf has any.
        size: this process's rows.
        split: which leaves have these rows.
        alone: their placement where no other process is asked.
    """

    narrow: list[np.dtype | None] | None
    size: int
    split: tuple[bool, ...]
    alone: Placement | None


class BatchPlacer:
    """Places process-local batches on a mesh.

    A leaf whose dim 0 is the batch size (dim 0 of the first leaf that has one) is split over the batch axes, every other leaf is
    replicated and must then be the same on all processes. A ``context`` axis splits dim 1 of these leaves, where it is as long as
    in the first that has one: the sequence. ``batch_spec`` overrides.

    Several processes may bring different numbers of rows, none included. They tell each other their shapes for every batch,
    over the network but not through the devices; a batch that does not fit together is an error on all of them.

    64-bit leaves narrow as everywhere in JAX unless x64 is enabled: float64 to float32 and complex128 to complex64, silently;
    int64 to int32 and uint64 to uint32 only if every value fits.

    On one device the leaves stay numpy arrays: handed to ``jax.jit`` they are transferred as fast as anything can. Placed arrays
    may share the caller's memory (as ``jax.device_put`` does on CPU): a caller that overwrites its batches asks for ``copy``.

    Args:
        mesh: the mesh of the program.
        batch_spec: a pytree prefix of the batch with a ``PartitionSpec`` for each subtree to override, ``None`` elsewhere.
            Dim 0 is either split over all batch axes, ``P(batch_axes(mesh))``, or whole; other dims may be split over other axes.
        copy: never share memory with the caller.
    """

    def __init__(self, mesh: Mesh, batch_spec: Any = None, *, copy: bool = False) -> None:
        self.mesh = mesh
        self.layout = BatchLayout.from_mesh(mesh)
        self._axes = batch_axes(mesh)
        self._batch_spec = batch_spec
        self._copy = copy
        self._straight = mesh.devices.size == 1
        self._agreement = BatchAgreement(self.layout) if self.layout.processes > 1 else None
        self._forms: dict[tuple[Any, ...], _Form] = {}
        self._placements: dict[tuple[Any, ...], Placement] = {}

    def __call__(self, batch: Any, *, batch_size: int | None = None, sizes: Sequence[int] | None = None) -> GlobalBatch:
        """Place a pytree of numpy arrays.

        Args:
            batch: the process's rows, in mesh order.
            batch_size: how many rows that is; None: dim 0 of the first leaf that has dims, dicts in the order of insertion.
            sizes: how many rows each process brings; None: they tell each other.

        Raises:
            TypeError: a leaf that no array can hold, named by its path.
            OverflowError: an integer that does not fit int32, named by its path.
            DataMismatchError: processes brought leaves that do not fit together.
        """
        leaves, treedef = jax.tree_util.tree_flatten(batch)
        placed = self.place_leaves(
            leaves,
            batch_size=_batch_size(batch) if batch_size is None else batch_size,
            sizes=sizes,
            specs=self._specs(batch),
            names=functools.partial(_path_names, batch),
        )
        return GlobalBatch(jax.tree_util.tree_unflatten(treedef, placed.arrays), placed.rows, placed.split)

    def feed(self, batches: Iterable[Any], depth: int = 1) -> Iterator[GlobalBatch]:
        """Place one batch after the other, ``depth`` ahead of their use (:func:`prefetch`), all processes together.

        Raises (from the iterator):
            DataMismatchError: some processes have another batch while others have none; or what :meth:`__call__` raises.
        """
        together = lockstep(batches, "the data") if self.layout.processes > 1 else batches
        return prefetch(together, self, depth)

    def place_leaves(
        self,
        leaves: Sequence[Any],
        *,
        batch_size: int | None = None,
        sizes: Sequence[int] | None = None,
        specs: Sequence[PartitionSpec | None] | None = None,
        names: Names | None = None,
        copy: bool | None = None,
    ) -> Placed:
        """Place a flat list of numpy arrays; raises what :meth:`__call__` does.

        Args:
            leaves: the process's rows.
            batch_size: this process's rows; None: dim 0 of the first leaf that has dims (1 if none has).
            sizes: how many rows each process brings; None: they tell each other.
            specs: for each leaf its ``PartitionSpec``, or None for the rule.
            names: gives the leaves' names; called only for an error message.
            copy: never share memory with the caller; None: as the placer was made.
        """
        hosts = [leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf) for leaf in leaves]
        key = (
            tuple([(host.shape, host.dtype) for host in hosts]),
            batch_size,
            sizes and tuple(sizes),
            specs and tuple(specs),
            jax.config.jax_enable_x64,  # pyright: ignore[reportAttributeAccessIssue]
        )
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = self._form(hosts, batch_size, sizes, specs, names)
        if form.narrow is not None:
            hosts = [
                host if dtype is None else narrow(host, dtype, functools.partial(_name, i, names))
                for i, (host, dtype) in enumerate(zip(hosts, form.narrow, strict=True))
            ]
        if self._copy if copy is None else copy:
            hosts = [np.array(host) if host is leaf else host for host, leaf in zip(hosts, leaves, strict=True)]
        if form.alone is not None:
            return Placed(form.alone.put(hosts), form.alone)
        assert self._agreement is not None
        agreed, split, hosts = self._agreement.agree(hosts, form.size, form.split, fixed=specs, names=names)
        placement = self._placement(hosts, agreed, split, specs, names)
        return Placed(placement.put(hosts), placement)

    def _specs(self, batch: Any) -> list[PartitionSpec | None] | None:
        if self._batch_spec is None:
            return None
        try:
            tree = jax.tree.broadcast(self._batch_spec, batch, is_leaf=_is_spec)
        except ValueError as error:
            raise ValueError(f"batch_spec is not a prefix of the batch's structure: {error}") from error
        return jax.tree_util.tree_leaves(tree, is_leaf=_is_spec)

    def _form(
        self,
        hosts: list[np.ndarray],
        batch_size: int | None,
        sizes: Sequence[int] | None,
        specs: Sequence[PartitionSpec | None] | None,
        names: Names | None,
    ) -> _Form:
        """The facts about leaves of these shapes and dtypes.

        Raises:
            TypeError: an array of objects, strings or times, which no device can hold.
            ValueError: ``specs`` splits a leaf whose dim 0 is not the batch size, or over other axes than the batch's.
        """
        for i, host in enumerate(hosts):
            if host.dtype.kind in "OUSMm":
                raise TypeError(
                    f"{_name(i, names)} is {host.dtype}, which no device array can hold; take it out of the batch before "
                    "placing it"
                )
        wide = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
        narrower = [None if wide else NARROW.get(host.dtype) for host in hosts]
        size: int = next((host.shape[0] for host in hosts if host.ndim), 1) if batch_size is None else batch_size
        split = tuple([self._is_split(host, size, None if specs is None else specs[i], i, names) for i, host in enumerate(hosts)])
        alone = None
        if sizes is not None or self._agreement is None:
            shaped = [jax.ShapeDtypeStruct(h.shape, d or h.dtype) for h, d in zip(hosts, narrower, strict=True)]
            alone = self._placement(shaped, (size,) if sizes is None else tuple(sizes), split, specs, names)
        return _Form(narrower if any(narrower) else None, size, split, alone)

    def _placement(
        self,
        leaves: Sequence[Leaf],
        sizes: tuple[int, ...],
        split: tuple[bool, ...],
        specs: Sequence[PartitionSpec | None] | None,
        names: Names | None,
    ) -> Placement:
        key = (tuple([(leaf.shape, leaf.dtype) for leaf in leaves]), sizes, split, specs and tuple(specs))
        found = self._placements.get(key)
        if found is None:
            rows = self.layout.rows(sizes)
            transfers = []
            rule = [leaf.shape for i, leaf in enumerate(leaves) if split[i] and (specs is None or specs[i] is None)]
            length = sequence_length(rule, self.mesh) if rule else None
            for i, leaf in enumerate(leaves) if not self._straight else ():
                name = functools.partial(_name, i, names)
                transfers.append(
                    transfer_of(leaf, split[i], rows, None if specs is None else specs[i], self.mesh, self.layout, name, length)
                )
            found = self._placements[key] = Placement(rows, split, tuple(transfers))
        return found

    def _is_split(self, host: np.ndarray, size: int, spec: PartitionSpec | None, i: int, names: Names | None) -> bool:
        """Whether dim 0 of the leaf is split over the batch axes: as ``spec`` says, else if it is as long as the batch.

        Raises:
            ValueError: ``spec`` splits over some of the batch axes only, or a dim 0 of another length than ``size``.
        """
        if spec is None:
            return host.ndim > 0 and host.shape[0] == size
        first = spec[0] if len(spec) else None
        first = first if isinstance(first, tuple) or first is None else (first,)
        if not first:
            return False
        if first != self._axes:
            raise ValueError(
                f"batch_spec of {_name(i, names)}: dim 0 is {spec[0]!r}, but it must be split over all batch axes of the mesh, "
                f"{self._axes}, or be None"
            )
        if not host.ndim or host.shape[0] != size:
            raise ValueError(
                f"batch_spec splits {_name(i, names)}, but its shape {host.shape} does not start with the batch size {size}"
            )
        return True


def prefetch(iterator: Iterable[T], place: Callable[[T], R], depth: int = 1) -> Iterator[R]:
    """``map(place, iterator)`` with ``depth`` placed batches kept ahead of the consumer.

    Batches are drawn and placed on the caller's thread, between two steps: JAX returns from a step before the device is done,
    so the work overlaps with the device, and the host's random number generators are drawn from in one order only.

    Args:
        iterator: the process-local batches.
        place: what to do with each, e.g. a :class:`BatchPlacer`.
        depth: how many batches to draw before they are asked for; 0 draws none ahead.

    Raises (from the iterator):
        ValueError: ``depth`` is negative.
    """
    if depth < 0:
        raise ValueError(f"prefetch depth must be at least 0, not {depth}")
    ahead: deque[R] = deque()
    for batch in iterator:
        ahead.append(place(batch))
        if len(ahead) > depth:
            yield ahead.popleft()
    yield from ahead


def _batch_size(tree: Any) -> int | None:
    """Dim 0 of the first leaf that has dims; dicts in insertion order, as a reader sees them (JAX would sort the keys)."""
    if isinstance(tree, dict):
        children: Iterable[Any] = tree.values()
    elif isinstance(tree, (list, tuple)):
        children = tree
    else:
        children = ()
        for leaf in jax.tree_util.tree_leaves(tree):
            if np.ndim(leaf):
                return np.shape(leaf)[0]
    return next((size for size in map(_batch_size, children) if size is not None), None)


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, PartitionSpec)


def _name(i: int, names: Names | None) -> str:
    return f"batch leaf {i}" if names is None else names()[i]


def _path_names(batch: Any) -> list[str]:
    return [f"batch{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(batch)]
