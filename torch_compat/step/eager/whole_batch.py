"""The rows of all processes, on the host of each: what eager steps on several processes compute with.

A step may do anything with a batch: normalise over it, compare its rows with each other, add its losses up, run its optimizer by
hand. So the one way to stock Lightning's numbers for every step is the whole batch, with the random stream of one process.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from torch_compat.run.batches import first_batch_size, flatten_batch, map_tensors
from torch_compat.utilities.seed import random_states, restore_random_states
from xlatrain.cluster.distributed import Channel
from xlatrain.mesh.batch_layout import BatchLayout
from xlatrain.mesh.lockstep import DataMismatchError

_ids = itertools.count()


@dataclass(frozen=True)
class _Part:
    """The part of a batch that one process brings.

    Attributes:
        structure: the places of its tensors.
        size: its number of rows.
        leaves: its tensors.
        others: its other leaves, pickled one by one, with their lengths (None for a leaf without rows).
        random: states of its generators; of the first process only.
    """

    structure: Any
    size: int
    leaves: list[torch.Tensor]
    others: list[tuple[bytes, int | None]]
    random: dict[str, Any] | None


class WholeBatches:
    """Puts whole batches together; every process makes the same calls.

    Args:
        layout: which process holds which rows.
    """

    def __init__(self, layout: BatchLayout) -> None:
        self._layout = layout
        self._channel = Channel(f"whole batches/{next(_ids)}")
        self._loading: dict[str, Any] | None = None
        self._size = 0
        self._own: np.ndarray = np.zeros(0, np.int64)

    def loaded(self, batches: Iterator[Any]) -> Iterator[Any]:
        """``batches``, each loaded with this process's own random stream: steps continue the first process's."""
        while True:
            shared = self._swap(self._loading)
            try:
                batch = next(batches, _END)
            finally:
                self._loading = self._swap(shared)
            if batch is _END:
                return
            yield batch

    def _swap(self, states: dict[str, Any] | None) -> dict[str, Any] | None:
        """The generators' states now; they continue with ``states``. The first process has one stream for everything."""
        if self._layout.position == 0:
            return None
        now = random_states(include_cuda=False)
        if states is not None:
            restore_random_states(states)
        return now

    def gather(self, batch: Any) -> Any:
        """The batch with the rows of all processes, in the order of the mesh; random generators are as on the first process.

        Leaves whose dim 0 (or length) is the number of rows on every process are put together, all others must be the same.

        Raises:
            DataMismatchError: batches that do not fit together; names the leaf.
        """
        leaves, spec = flatten_batch(batch)
        size = first_batch_size(leaves)
        if size is None:
            size = next((length for other in spec.others if (length := _length(other)) is not None), 0)
        mine = _Part(
            structure=repr(spec.key),
            size=size,
            leaves=[leaf.detach().clone() for leaf in leaves],  # a view would bring all of its storage
            others=[(pickle.dumps(other), _length(other)) for other in spec.others],
            random=random_states(include_cuda=False) if self._layout.position == 0 else None,
        )
        parts: list[_Part] = self._channel.all_gather(mine)
        if (shared := parts[0].random) is not None and self._layout.position:
            restore_random_states(shared)
        for process, part in enumerate(parts):
            if part.structure != mine.structure:
                raise DataMismatchError(
                    f"process {process} brought a batch of another structure, {part.structure}, than this one, {mine.structure}"
                )
        sizes = [part.size for part in parts]
        rows = self._layout.rows(sizes)
        positions = [replace(self._layout, position=process).own_rows(rows) for process in range(len(parts))]
        self._size, self._own = rows.size, positions[self._layout.position]
        merge = _Merge(sizes, positions, rows.size)
        names = spec.names()
        tensors = [merge.tensors([part.leaves[i] for part in parts], names[i]) for i in range(len(leaves))]
        others = [merge.others([part.others[i] for part in parts], i) for i in range(len(spec.others))]
        return spec.unflatten(tensors, lambda _, index: others[index])

    def own_rows(self, result: Any) -> Any:
        """Cut this process's rows out of a step's result for the last whole batch."""

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[torch.from_numpy(self._own)] if tensor.ndim and tensor.shape[0] == self._size else tensor

        return map_tensors(cut, result)


_END = object()


@dataclass(frozen=True)
class _Merge:
    """Puts a leaf together from what the processes brought: ``positions`` says which rows of the whole batch are whose."""

    sizes: Sequence[int]
    positions: Sequence[np.ndarray]
    size: int

    def tensors(self, found: Sequence[torch.Tensor], name: str) -> torch.Tensor:
        """The processes' tensors ``[rows of the process, …]`` as one, ``[rows, …]``; a tensor that is equal everywhere as it is.

        Raises:
            DataMismatchError: their dtypes, or their shapes but for the rows, differ; names the leaf.
        """
        if not all(leaf.ndim and leaf.shape[0] == size for leaf, size in zip(found, self.sizes, strict=True)):
            if all(leaf.shape == found[0].shape and torch.equal(leaf, found[0]) for leaf in found):
                return found[0]
            raise _differ(name, [f"{leaf.dtype} {list(leaf.shape)}" for leaf in found], self.sizes)
        kinds = {(leaf.shape[1:], leaf.dtype) for leaf, size in zip(found, self.sizes, strict=True) if size}
        if len(kinds) > 1:
            raise _differ(name, [f"{leaf.dtype} {list(leaf.shape)}" for leaf in found], self.sizes)
        (shape, dtype) = next(iter(kinds), (found[0].shape[1:], found[0].dtype))
        whole = torch.empty((self.size, *shape), dtype=dtype)
        for leaf, rows in zip(found, self.positions, strict=True):
            if len(rows):
                whole[torch.from_numpy(rows)] = leaf
        return whole

    def others(self, found: Sequence[tuple[bytes, int | None]], index: int) -> Any:
        if all(length == size for (_, length), size in zip(found, self.sizes, strict=True)):
            return self._sequence([pickle.loads(data) for data, _ in found])
        if len({data for data, _ in found}) == 1:
            return pickle.loads(found[0][0])
        values = [repr(pickle.loads(data))[:60] for data, _ in found]
        raise _differ(f"leaf {index} of those that are no tensors", values, self.sizes)

    def _sequence(self, found: list[Any]) -> Any:
        if not self.size:
            return found[0]
        whole: list[Any] = [None] * self.size
        for values, rows in zip(found, self.positions, strict=True):
            for row, value in zip(rows, values, strict=True):
                whole[row] = value
        if isinstance(found[0], np.ndarray):
            return np.stack(whole)
        return type(found[0])(whole)


def _length(leaf: Any) -> int | None:
    """The number of rows that a leaf that is no tensor may have; None if it is no plain sequence."""
    if type(leaf) in (list, tuple):
        return len(leaf)
    return leaf.shape[0] if isinstance(leaf, np.ndarray) and leaf.ndim else None


def _differ(name: str, values: Sequence[str], sizes: Sequence[int]) -> DataMismatchError:
    found = "; ".join(f"{value} on process {i} ({size} rows)" for i, (value, size) in enumerate(zip(values, sizes, strict=True)))
    return DataMismatchError(
        f"{name} cannot be put together from all processes: {found}. A leaf has a row for each sample, or is the same "
        "everywhere: make it so in collate_fn (the steps of this run are eager and take the whole batch)"
    )
