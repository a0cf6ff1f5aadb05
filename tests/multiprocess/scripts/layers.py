"""Repeated layers as loops over stacks that lie on several processes, and a mesh of three axes over them."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

from tests.multiprocess.deep import fit
from torch_compat.strategies import MeshStrategy
from xlatrain.cluster import distributed

warnings.simplefilter("ignore")
directory = Path(sys.argv[1])
world = distributed.initialize()
cube = MeshStrategy(
    {"data": 2, "fsdp": 2, "tensor": 2},
    min_size=16,  # norms stay whole on every device
    tensor_parallel_plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
)
found = fit(cube, 4, world.process_count, folder=directory)
(directory / f"{world.process_id}.json").write_text(json.dumps(found))
