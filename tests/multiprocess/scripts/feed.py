"""Loads, places and reads back batches of several kinds of data; gives what the mesh then holds."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from torch_compat.run.batches import flatten_batch
from torch_compat.trainer.data.dataloaders import prepare_dataloader
from xlatrain.bridge.tensors.host import as_numpy
from xlatrain.cluster import distributed
from xlatrain.mesh.data import BatchPlacer
from xlatrain.mesh.lockstep import DataMismatchError
from xlatrain.mesh.mesh import make_mesh

directory = Path(sys.argv[1])
world = distributed.initialize()
mesh = make_mesh({"data": 2, "fsdp": 4})
placer = BatchPlacer(mesh)
whole = jax.jit(lambda rows, x: rows.cut(x), static_argnums=0, out_shardings=jax.sharding.NamedSharding(mesh, jax.P()))


def global_batches(loader: Any) -> list[Any]:
    """The real rows of each global batch: as every process sees them on the devices."""
    batches = []
    for batch in prepare_dataloader(loader, 8, layout=placer.layout):
        leaves, _ = flatten_batch(batch)
        placed = placer.place_leaves([as_numpy(leaf) for leaf in leaves])
        real = [whole(placed.rows, x) if split else x for x, split in zip(placed.arrays, placed.split, strict=True)]
        batches.append([np.asarray(x.addressable_data(0)).tolist() for x in real])
    return batches


def loaders() -> Iterator[tuple[str, Any]]:
    data = TensorDataset(torch.arange(43), torch.arange(86.0, dtype=torch.float64).reshape(43, 2))
    yield "sequential", DataLoader(data, 2)
    yield "shuffled", DataLoader(data, 1, shuffle=True)
    yield "few", DataLoader(TensorDataset(torch.arange(9)), 1)  # the last batch has one row
    yield (
        "with a leaf that is not split",
        DataLoader(data, 1, collate_fn=lambda rows: [torch.stack([r[0] for r in rows]), torch.ones(3)]),
    )
    yield "workers", DataLoader(data, 2, shuffle=True, num_workers=1)


torch.manual_seed(0 if world.is_main else 99)
result: dict[str, Any] = {name: global_batches(loader) for name, loader in loaders()}
result["rows on the devices"] = [
    [shard.device.id, shard.index[0].indices(16)[:2]]
    for shard in placer.place_leaves([np.arange(16 // world.process_count)]).arrays[0].addressable_shards
]

if world.process_count > 1:

    class Stream(IterableDataset):
        def __init__(self, n: int) -> None:
            self.n = n

        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.arange(self.n) + 100 * world.process_id)

    result["streams"] = global_batches(DataLoader(Stream(6), 1))
    for name, bad in {
        "lengths": [torch.zeros(4)] * (3 + world.process_id),
        "shapes": [torch.zeros(4, 2 + world.process_id)],
        "leaves": [[torch.zeros(4)] * (1 + world.process_id)],
        "values": [[torch.zeros(4), torch.tensor(float(world.process_id))]],
    }.items():
        try:
            global_batches(bad)
        except DataMismatchError as error:
            result[name] = str(error)

    # A mesh whose model axis goes over the processes: both hold the whole batch.
    across = [jax.devices()[i] for i in (0, 4, 1, 5, 2, 6, 3, 7)]
    both = BatchPlacer(make_mesh({"data": 4, "tensor": 2}, across))
    result["both"] = [both.layout.shards_of, both.place_leaves([np.arange(6)]).rows.size]
    try:
        both.place_leaves([np.arange(6) + world.process_id])
    except DataMismatchError as error:
        result["twins"] = str(error)

(directory / f"{world.process_id}.json").write_text(json.dumps(result))
