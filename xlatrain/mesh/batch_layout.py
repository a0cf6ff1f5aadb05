"""Rows of a batch: the layout of shards over processes, and the real rows of a padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
from jax.sharding import Mesh

from xlatrain.mesh.mesh import batch_axes


@dataclass(frozen=True)
class BatchPadding:
    """The real rows of a padded global batch. Hashable: part of a program's key.

    Attributes:
        size: number of real rows, over all processes.
        padded: rows of the global arrays, a multiple of the number of shards.
        runs: ``(start, stop)`` of each run of real rows in the padded order; one run ``(0, size)`` unless processes brought
            different numbers of rows.
    """

    size: int
    padded: int
    runs: tuple[tuple[int, int], ...]

    @property
    def is_padded(self) -> bool:
        return self.size != self.padded

    def cut(self, x: jax.Array) -> jax.Array:
        """The real rows of ``x`` ``[padded, …]`` → ``[size, …]``; static slices, for use inside a program."""
        if not self.is_padded:
            return x
        pieces = [jax.lax.slice_in_dim(x, start, stop) for start, stop in self.runs]
        return pieces[0] if len(pieces) == 1 else jax.lax.concatenate(pieces, 0)

    @classmethod
    def full(cls, size: int) -> BatchPadding:
        """Rows without padding."""
        return cls(size, size, ((0, size),))


@dataclass(frozen=True)
class BatchLayout:
    """The layout of a batch's shards over processes.

    Attributes:
        count: number of shards, ``data_parallel_size(mesh)``.
        shards_of: for each process of the mesh (sorted by process index), its shards in mesh order. Processes that differ
            only along a model axis (``tensor``, …) hold the same shards.
        position: which entry of ``shards_of`` is this process.
    """

    count: int
    shards_of: tuple[tuple[int, ...], ...]
    position: int
    _rows: dict[tuple[int, ...], BatchPadding] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_mesh(cls, mesh: Mesh) -> BatchLayout:
        axes = batch_axes(mesh)
        grid = np.moveaxis(mesh.devices, [mesh.axis_names.index(axis) for axis in axes], range(len(axes)))
        count = int(np.prod(grid.shape[: len(axes)], dtype=np.int64))
        grid = grid.reshape(count, -1)
        processes = sorted({device.process_index for device in grid.flat})
        owned: dict[int, list[int]] = {process: [] for process in processes}
        for shard, devices in enumerate(grid):
            for process in sorted({device.process_index for device in devices}):
                owned[process].append(shard)
        me = grid.flat[0].client.process_index()
        if me not in owned:
            raise ValueError(f"process {me} has no device in the mesh {dict(mesh.shape)}, whose processes are {processes}")
        return cls(count, tuple(tuple(owned[process]) for process in processes), processes.index(me))

    @classmethod
    def contiguous(cls, count: int, position: int = 0, processes: int = 1) -> BatchLayout:
        """``count`` shards dealt in equal contiguous blocks to ``processes`` processes.

        Raises:
            ValueError: they cannot be dealt evenly.
        """
        if count % processes:
            raise ValueError(f"{count} shards cannot be dealt evenly to {processes} processes")
        each = count // processes
        return cls(count, tuple(tuple(range(p * each, (p + 1) * each)) for p in range(processes)), position)

    @property
    def local(self) -> tuple[int, ...]:
        """The shards of this process."""
        return self.shards_of[self.position]

    @property
    def processes(self) -> int:
        return len(self.shards_of)

    def spans(self, size: int) -> list[range]:
        """The rows of a global batch of ``size`` rows that this process has to bring, in order (adjacent shards merged)."""
        per_shard = -(-size // self.count)
        spans: list[range] = []
        for shard in self.local:
            start, stop = min(shard * per_shard, size), min((shard + 1) * per_shard, size)
            if spans and spans[-1].stop == start:
                spans[-1] = range(spans[-1].start, stop)
            elif stop > start:
                spans.append(range(start, stop))
        return [span for span in spans if len(span)]

    def own_rows(self, rows: BatchPadding) -> np.ndarray:
        """The real rows of a global batch that this process brought: int64 positions among the ``rows.size`` real rows."""
        per_shard = rows.padded // self.count
        real = np.concatenate([np.arange(start, stop) for start, stop in rows.runs])
        return np.flatnonzero(np.isin(real // per_shard, self.local))

    def rows(self, sizes: Sequence[int]) -> BatchPadding:
        """The rows of the global batch to which process ``i`` brings ``sizes[i]`` rows.

        Raises:
            ValueError: two processes hold the same shard and bring different numbers of rows.
        """
        key = tuple(sizes)
        rows = self._rows.get(key)
        if rows is None:
            rows = self._rows[key] = self._lay_out(key)
        return rows

    def _lay_out(self, sizes: tuple[int, ...]) -> BatchPadding:
        per_shard = max(-(-size // len(shards)) for size, shards in zip(sizes, self.shards_of, strict=True))
        real: dict[int, tuple[int, int]] = {}
        for process, (size, shards) in enumerate(zip(sizes, self.shards_of, strict=True)):
            for i, shard in enumerate(shards):
                here = min(max(size - i * per_shard, 0), per_shard)
                there, other = real.setdefault(shard, (here, process))
                if there != here:
                    raise ValueError(
                        f"processes {other} and {process} hold the same part of the batch, so they must bring the same rows, "
                        f"but they brought {sizes[other]} and {size} rows; give both the same data"
                    )
        runs: list[tuple[int, int]] = []
        for shard in range(self.count):
            start, stop = shard * per_shard, shard * per_shard + real[shard][0]
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], stop)
            elif stop > start:
                runs.append((start, stop))
        size = sum(stop - start for start, stop in runs)
        return BatchPadding(size, per_shard * self.count, tuple(runs) or ((0, 0),))
